"""Says whether this machine can run the project's Triton kernels. The modules of kernels themselves import Triton."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def obstacle() -> str | None:
    """Returns what keeps Triton kernels from running here, or None. Triton's interpreter runs them on a CPU."""
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed"
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "there is no GPU"
