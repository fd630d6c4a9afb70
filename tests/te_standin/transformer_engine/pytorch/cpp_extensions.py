"""Matrix products by the name of cuBLAS's, whose first matrix is the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def general_gemm(
    A: Tensor, B: Tensor, workspace: Any = None, out_dtype: torch.dtype | None = None, layout: str = "TN",
    bias: Tensor | None = None, **unused: Any,
) -> list[Tensor | None]:  # fmt: skip
    """Returns [product, None, None]: B A^T for "TN", B A for "NN", B^T A for "NT", plus `bias`.

    Transformer Engine reads the bytes of a bias as values of the output's dtype, whatever the bias's dtype is.
    """
    dtype = out_dtype or A.dtype
    left = B.T if layout[1] == "T" else B
    right = A.T if layout[0] == "T" else A
    product = left.to(dtype) @ right.to(dtype)
    if bias is not None:
        assert bias.dtype == dtype
        product = product + bias
    return [product, None, None]
