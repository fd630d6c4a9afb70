"""Norms, gates and rotary embedding of the project's torch layer spec, by torch's operations or by Triton kernels.

Modules of kernels are imported where they are used: they need Triton, which a CPU does without.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.megatron import platform

platform.install()

from megatron.core.transformer.module import MegatronModule  # noqa: E402


class Chosen:
    """A module that has a form of torch's operations and one of Triton kernels. `choose` says which a model takes."""

    triton = False


def choose(model: torch.nn.Module, *, triton: bool) -> None:
    """Makes all modules of a model take Triton kernels, or none."""
    for module in model.modules():
        if isinstance(module, Chosen):
            module.triton = triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, triton: bool = False) -> Tensor:
    """Applies rotary embedding in the half-split convention. [..., H, d] -> [..., H, d].

    `cos` and `sin` are [N, 1, d] or [L, 1, 1, d]. With `triton` it is computed in float32, in one pass.
    """
    if triton:
        from megatron_rl.megatron.kernels import rope

        return rope.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(Chosen, torch.nn.RMSNorm):
    """A root-mean-square norm whose weight gradient Megatron sums over tensor ranks under sequence parallelism.

    With core's `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32. Triton's kernels are for that
    alone: torch has its own for an ordinary weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.from_one = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self.from_one:
            return super().forward(x)
        if self.triton:
            from megatron_rl.megatron.kernels import norm

            return norm.rms_norm(x, self.weight, self.eps or 0.0, from_one=True)
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class NormedAddition(RMSNorm):
    """Adds what a layer's part computes, normed, to the residual stream.

    It stands where core adds bias and residual, and is called like core's function: it returns the one that adds.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:  # type: ignore[override]
        def add(made: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            out, bias = made
            return residual + RMSNorm.forward(self, out if bias is None else out + bias)

        return add


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up of [..., gate | up].

    The backward pass writes both halves in place, where autograd would join copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        back = torch.empty_like(x)
        for_gate, for_up = back.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=for_gate)
        torch.mul(F.silu(gate), grad, out=for_up)
        return back


class SwiGLU(Chosen, MegatronModule):
    """A gate by the sigmoid linear unit, on fc1's joined output. [..., 2 f] -> [..., f]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        if self.triton:
            from megatron_rl.megatron.kernels import gates

            return gates.gated(x, tanh=False)
        return _SwiGLU.apply(x)  # type: ignore[return-value]


class GeGLU(Chosen, MegatronModule):
    """A gate by the Gaussian error linear unit in its tanh form, on fc1's joined output. [..., 2 f] -> [..., f]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        if self.triton:
            from megatron_rl.megatron.kernels import gates

            return gates.gated(x, tanh=True)
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
