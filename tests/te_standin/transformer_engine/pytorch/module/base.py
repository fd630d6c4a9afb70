"""The base of all modules: the state that checkpoints have beside parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def get_workspace() -> None:
    """Returns the memory for matrix products, which torch's need not have."""
    return None


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Returns a gradient that stands for one that is in `main_grad` already."""
    made = torch.empty(shape, dtype=dtype, device="cuda")
    return made.zero_() if zero else made


class TransformerEngineBaseModule(torch.nn.Module):
    """A module with extra state, which is empty without 8-bit products."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        return None

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is not None and state.numel():
            raise RuntimeError("the stand-in for Transformer Engine has no 8-bit state")
