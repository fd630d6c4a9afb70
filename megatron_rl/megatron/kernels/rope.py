"""Triton kernel of rotary embedding in the half-split convention, forward and backward."""

# pyright rules are off: calls of Triton kernels have more arguments (such as num_warps) than the type hints allow.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4  # number of warps per Triton program; a program rotates all heads of one token


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding in float32 to x [N, H, d] with cos and sin [N, 1, d].

    x may also be [L, S, H, d], with cos and sin [L, 1, 1, d]. `cos` and `sin` get no gradient.
    """
    turned: Any = _Rotated.apply(x, cos, sin)
    return turned


class _Rotated(torch.autograd.Function):
    """Autograd function that rotates pairs of elements. The backward pass rotates the gradient by the negative
    angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _turned(grad, *ctx.saved_tensors, back=True), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Returns x rotated by the angles given by `cos` and `sin`, or by the negative angles if `back`.

    `x` may be a view with gaps between heads.
    """
    heads, width = x.shape[-2:]
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, turned = x.reshape(-1, heads, width), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if turned.numel():
        # number of consecutive rows of the flattened x that have the same rotation angles
        alike = len(rows) // len(cos)
        _turn[(len(rows),)](
            rows, turned, cos.contiguous(), sin.contiguous(), *rows.stride()[:2], alike, heads, width // 2, BACK=back,
            HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(width // 2), num_warps=WARPS,
        )  # fmt: skip
    return turned


@triton.jit
def _turn(
    x, turned, cos, sin, row_stride, head_stride, alike, heads, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places, head_numbers = tl.arange(0, HALF), tl.arange(0, HEADS)
    angles, real = (row // alike) * 2 * half + places, places < half
    cos_first = tl.load(cos + angles, mask=real, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + angles + half, mask=real, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + angles, mask=real, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + angles + half, mask=real, other=0.0).to(tl.float32)[None, :]
    mask = (head_numbers < heads)[:, None] & real[None, :]
    start = x + row * row_stride + head_numbers[:, None] * head_stride + places[None, :]
    first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second
    target = turned + (row * heads + head_numbers[:, None]) * 2 * half + places[None, :]
    tl.store(target, turned_first.to(turned.dtype.element_ty), mask=mask)
    tl.store(target + half, turned_second.to(turned.dtype.element_ty), mask=mask)
