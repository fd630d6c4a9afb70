"""Says whether this machine can run the project's Triton kernels. The modules of kernels themselves import Triton."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

INTERPRETER = "TRITON_INTERPRET"  # in the environment when Triton is imported: its interpreter runs kernels on a CPU


def obstacle() -> str | None:
    """Returns what keeps Triton kernels from being taken here, or None: also that one computed something wrong when all
    were tried, which takes seconds the first time in a process, as they are compiled."""
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
