"""Operations that Transformer Engine fuses, one by one. Its op fuser is not offered here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class FusibleOperation(torch.nn.Module):
    """An operation of the op fuser."""


class Sequential(torch.nn.Sequential):
    """Operations one after the other."""


class _Gated(FusibleOperation):
    """A gate on joined halves, [..., gate | up]."""

    activation: Any = None

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return type(self).activation(gate) * up


class SwiGLU(_Gated):
    """A gate by the sigmoid linear unit."""

    activation = staticmethod(F.silu)


class GEGLU(_Gated):
    """A gate by the Gaussian error linear unit, in its tanh form."""

    activation = staticmethod(lambda x: F.gelu(x, approximate="tanh"))


class ReGLU(_Gated):
    """A gate by the rectified linear unit."""

    activation = staticmethod(F.relu)
