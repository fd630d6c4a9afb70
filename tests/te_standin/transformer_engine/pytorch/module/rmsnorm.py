"""A root-mean-square norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """Norms the last dimension."""
    if zero_centered_gamma:
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).type_as(x)
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(TransformerEngineBaseModule):
    """A norm with one weight per element. Under sequence parallelism core sums its gradient over tensor ranks."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        fill = torch.zeros if zero_centered_gamma else torch.ones
        assert size is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = torch.nn.Parameter(fill(size, dtype=params_dtype, device=device))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)
