"""Checks whether this machine can run the project's Triton kernels, without importing Triton at module level."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

INTERPRETER = "TRITON_INTERPRET"  # environment variable; if set to 1 before Triton is imported, kernels run on a CPU


def obstacle() -> str | None:
    """Returns the reason why the project's Triton kernels cannot be used on this machine, or None if they can be used.

    Runs all kernels and compares their results with torch's. The first call in a process takes seconds, because the
    kernels are compiled.
    """
    try:
        importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif os.environ.get(INTERPRETER) == "1":
        device = torch.device("cpu")
    else:
        return "there is no GPU"
    trial: Any = importlib.import_module("megatron_rl.megatron.kernels.trial")
    return trial.trouble(device)
