"""Communication among tensor-parallel ranks with its gradients, random states, and recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CudaRNGStatesTracker:
    """Random states by name."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Tells 8-bit modules that activations are computed a second time. There are none here."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def gather_rows(x: Tensor, group: Any) -> Tensor:
    """Joins the rows of all ranks of a group."""
    out = torch.empty(x.shape[0] * group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scatter_sum(x: Tensor, group: Any) -> Tensor:
    """Sums rows over the ranks of a group, of which each keeps its part."""
    out = torch.empty(x.shape[0] // group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def sum_over(x: Tensor, group: Any) -> Tensor:
    """Sums over the ranks of a group."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class ToColumns(torch.autograd.Function):
    """Brings an input to the ranks that share the columns' outputs. Its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sequence: bool) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.sequence = group, sequence
        return gather_rows(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (scatter_sum if ctx.sequence else sum_over)(grad, ctx.group), None, None


class FromRows(torch.autograd.Function):
    """Sums the outputs of the ranks that share the rows of an input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sequence: bool) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.sequence = group, sequence
        return (scatter_sum if sequence else sum_over)(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return gather_rows(grad, ctx.group) if ctx.sequence else grad, None, None


class GatherRows(torch.autograd.Function):
    """Joins the rows of all ranks; the gradient of a rank's rows is the sum of what all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return scatter_sum(grad, ctx.group), None
