"""Sums of matrix products in float32, of factors in bfloat16, without a product in bfloat16 in between."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total` [n, m] float32. The factors are [n, k] and [k, m]."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:  # torch's CPU kernels have no such product; a GPU's have it from torch 2.10
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
