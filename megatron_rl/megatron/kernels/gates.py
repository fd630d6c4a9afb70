"""Triton kernels of gated activations: one kernel for the forward pass and one for the backward pass."""

# pyright rules are off: calls of Triton kernels have more arguments (such as num_warps) than the type hints allow.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # number of row elements and number of warps per Triton program


def gated(x: Tensor, *, tanh: bool) -> Tensor:
    """Returns the gated activation act(gate) * up for x = [gate | up], computed in float32. [..., 2 f] -> [..., f].

    `tanh`: True for the tanh approximation of GELU as activation, False for SiLU.
    """
    activation: Any = _Gated.apply(x, tanh)
    return activation


class _Gated(torch.autograd.Function):
    """Autograd function for act(gate) * up. The backward pass recomputes the activation instead of storing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:  # type: ignore[override]
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.tanh, width = tanh, x.shape[-1] // 2
        activation = x.new_empty(*x.shape[:-1], width)
        if activation.numel():
            _forward[_grid(activation)](x, activation, width, TANH=tanh, BLOCK=BLOCK, num_warps=WARPS)
        return activation

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad, back = grad.contiguous(), torch.empty_like(x)
        if grad.numel():
            _backward[_grid(grad)](x, grad, back, grad.shape[-1], TANH=ctx.tanh, BLOCK=BLOCK, num_warps=WARPS)
        return back, None


def _grid(rows: Tensor) -> tuple[int, int]:
    """Returns the grid of Triton programs for a tensor [..., f]: (number of rows, number of blocks per row)."""
    return rows.numel() // rows.shape[-1], triton.cdiv(rows.shape[-1], BLOCK)


@triton.jit
def _share(gate, TANH: tl.constexpr):
    """Returns (s, derivative of s with respect to the gate), where the activation is gate * s.

    For SiLU, and for the tanh approximation of GELU, s is a sigmoid, because (1 + tanh z) / 2 = sigmoid(2 z).
    """
    if TANH:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    else:
        inner = gate
        slope = gate * 0.0 + 1.0
    share = tl.sigmoid(inner)
    return share, share * (1.0 - share) * slope


@triton.jit
def _forward(x, activation, width, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = places < width
    gate = tl.load(x + row * 2 * width + places, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + places, mask=real, other=0.0).to(tl.float32)
    share, _ = _share(gate, TANH)
    tl.store(activation + row * width + places, (gate * share * up).to(activation.dtype.element_ty), mask=real)


@triton.jit
def _backward(x, grad, back, width, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = places < width
    gate = tl.load(x + row * 2 * width + places, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + places, mask=real, other=0.0).to(tl.float32)
    slopes = tl.load(grad + row * width + places, mask=real, other=0.0).to(tl.float32)
    share, slope = _share(gate, TANH)
    for_gate = slopes * up * (share + gate * slope)
    tl.store(back + row * 2 * width + places, for_gate.to(back.dtype.element_ty), mask=real)
    for_up = slopes * gate * share
    tl.store(back + row * 2 * width + width + places, for_up.to(back.dtype.element_ty), mask=real)
