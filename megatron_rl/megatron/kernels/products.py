"""Accumulates matrix products of bfloat16 matrices into a float32 sum, without an intermediate bfloat16 product."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total` in place. `left` is [n, k], `right` is [k, m], and `total` is [n, m] float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:  # addmm supports out_dtype only on a GPU, from torch 2.10 on
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
