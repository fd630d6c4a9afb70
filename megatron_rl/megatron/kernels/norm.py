"""Triton kernels of the root-mean-square norm: a forward kernel, and a backward kernel with partial weight gradients.

torch has fused kernels for norms that multiply by the weight. The kernels of this module can also multiply by 1 +
weight, without float32 copies.
"""

# pyright rules are off: calls of Triton kernels have more arguments (such as num_warps) than the type hints allow.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 256  # maximum number of Triton programs of the backward pass; each sums the weight gradient over several rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, from_one: bool) -> Tensor:
    """Returns weight * x / sqrt(mean of x^2 + eps), with the mean over the last dimension of x.

    The norm is computed in float32, and the result has the dtype of x.

    With `from_one`, x is multiplied by 1 + weight instead of weight.
    """
    normed: Any = _Normed.apply(x, weight, eps, from_one)
    return normed


class _Normed(torch.autograd.Function):
    """Autograd function for the RMS norm. Saves each row's factor 1 / sqrt(mean of x^2 + eps) for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, from_one: bool) -> Tensor:  # type: ignore[override]
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        normed, factors = torch.empty_like(x), torch.empty(rows, device=x.device)
        if rows:
            _forward[(rows,)](x, weight, normed, factors, width, eps, FROM_ONE=from_one, **_sizes(width))
        ctx.save_for_backward(x, weight, factors)
        ctx.from_one = from_one
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, factors = ctx.saved_tensors
        grad, back, width = grad.contiguous(), torch.empty_like(x), x.shape[-1]
        parts = min(PARTS, len(factors))
        sums = torch.empty(parts, width, device=x.device)
        if parts:
            _backward[(parts,)](
                x, weight, grad, factors, back, sums, len(factors), width, parts, FROM_ONE=ctx.from_one, **_sizes(width)
            )
        return back, sums.sum(0).to(weight.dtype), None, None


def _sizes(width: int) -> dict[str, int]:
    """Returns the launch options of a kernel: the block size, which holds a whole row, and the number of warps."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def _forward(x, weight, normed, factors, width, eps, FROM_ONE: tl.constexpr, BLOCK: tl.constexpr):
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real = places < width
    values = tl.load(x + row * width + places, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(weight + places, mask=real, other=0.0).to(tl.float32)
    if FROM_ONE:
        scale += 1.0
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(factors + row, factor)
    tl.store(normed + row * width + places, (values * factor * scale).to(normed.dtype.element_ty), mask=real)


@triton.jit
def _backward(
    x, weight, grad, factors, back, sums, rows, width, parts, FROM_ONE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    part, places = tl.program_id(0), tl.arange(0, BLOCK)
    real = places < width
    scale = tl.load(weight + places, mask=real, other=0.0).to(tl.float32)
    if FROM_ONE:
        scale += 1.0
    total, wide = tl.zeros([BLOCK], dtype=tl.float32), part.to(tl.int64) * 0
    for number in range(part, rows, parts):
        row = (wide + number) * width  # in 64 bits
        factor = tl.load(factors + number)
        normed = tl.load(x + row + places, mask=real, other=0.0).to(tl.float32) * factor
        slope = tl.load(grad + row + places, mask=real, other=0.0).to(tl.float32)
        weighted = slope * scale
        along = tl.sum(weighted * normed, 0) / width
        tl.store(back + row + places, ((weighted - normed * along) * factor).to(back.dtype.element_ty), mask=real)
        total += slope * normed
    tl.store(sums + part * width + places, total, mask=real)
