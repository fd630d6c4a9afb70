"""Heads, norms, gated activations and rotary embedding, computed by torch operations or by Triton kernels.

Kernel modules are imported inside the functions that use them, because they need Triton, which may not be installed on
machines without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.megatron import platform
from megatron_rl.models.sizes import ALPHA, CLAMP

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402


class Head(torch.nn.Module):
    """A linear map from hidden states to one number per token. The head replaces the output layer in a critic or a
    reward model, and is added beside the output layer in a policy whose model is shared with a critic. Every
    tensor-parallel rank of the last pipeline stage holds the whole weight [1, hidden]."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the outputs [..., 1] for hidden states [..., hidden]. The matrix product is computed in float32
        whatever the model's dtype, because bfloat16 would round a value of 0.9 to a multiple of 0.004."""
        return F.linear(hidden.float(), self.weight.float())

    def beside(self, hidden: Tensor) -> Tensor:
        """Returns the outputs [1, n] for hidden states [n, hidden] that are also the input of an output layer.

        Every tensor-parallel rank computes the same outputs and the whole gradient with respect to `hidden`. The
        backward pass of the output layer sums gradients over the tensor-parallel ranks, so this gradient is divided by
        the number of these ranks.
        """
        tp, head_input = parallel_state.get_tensor_model_parallel_world_size(), hidden.view_as(hidden)
        if tp > 1 and head_input.requires_grad:
            head_input.register_hook(lambda gradient: gradient / tp)
        return self(head_input).T


class TensorSharded(torch.nn.Module):
    """A module with parameters that are split over tensor-parallel ranks. `group`: process group of these ranks.
    `axis`: {name of a parameter: axis along which the parameter is split}."""

    group: Any
    axis: dict[str, int]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns Megatron-core's sharded state dict of the parameters."""
        state = self.state_dict(prefix="", keep_vars=True)
        replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, self.axis, sharded_offsets, tp_group=self.group, dp_cp_group=replicas
        )


class Chosen:
    """Mixin for modules that have an implementation in torch operations and one in Triton kernels. The function
    `choose` selects the implementation."""

    triton = False


def choose(model: torch.nn.Module, *, triton: bool) -> None:
    """Selects Triton kernels, or torch operations if not `triton`, for all `Chosen` modules of a model."""
    for module in model.modules():
        if isinstance(module, Chosen):
            module.triton = triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, triton: bool = False) -> Tensor:
    """Applies rotary embedding in the half-split convention. [..., H, d] -> [..., H, d].

    `cos` and `sin` are [N, 1, d] or [L, 1, 1, d]. With `triton`, one kernel computes the result in float32.
    """
    if triton:
        from megatron_rl.megatron.kernels import rope

        return rope.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(Chosen, torch.nn.RMSNorm):
    """A root-mean-square norm. Under sequence parallelism Megatron-core sums the gradient of the norm's weight over the
    tensor-parallel ranks.

    If Megatron-core's setting `layernorm_zero_centered_gamma` is True, the norm multiplies by 1 + weight, in float32.
    Only this variant has a Triton kernel, because torch has a fused kernel for the ordinary variant.
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
    """Applies an RMS norm to the output of attention or MLP and adds the result to the residual stream.

    It replaces Megatron-core's bias-dropout-add function and has the same interface: calling it returns a function that
    computes the addition.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:  # type: ignore[override]
        def add(sublayer_output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = sublayer_output
            return residual + RMSNorm.forward(self, output if bias is None else output + bias)

        return add


class _SwiGLU(torch.autograd.Function):
    """Autograd function for silu(gate) * up, where the input [..., 2 f] is [gate | up].

    The backward pass writes both halves of the gradient in place, whereas autograd would concatenate copies.
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
    """The SwiGLU activation silu(gate) * up on the fused output [gate | up] of the first feed-forward projection (fc1).
    [..., 2 f] -> [..., f]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        if self.triton:
            from megatron_rl.megatron.kernels import gates

            return gates.gated(x, tanh=False)
        return _SwiGLU.apply(x)  # type: ignore[return-value]


class ClampedSwiGLU(SwiGLU):
    """The activation of gpt-oss's experts, on the output of the first feed-forward projection (fc1), in which the
    elements of gate and up alternate. [..., 2 f] -> [..., f]. It has no Triton kernel."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x[..., ::2].clamp(max=CLAMP), x[..., 1::2].clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


class GeGLU(SwiGLU):
    """The GeGLU activation gelu_tanh(gate) * up on the fused output [gate | up] of the first feed-forward projection
    (fc1). [..., 2 f] -> [..., f]."""

    def forward(self, x: Tensor) -> Tensor:
        if self.triton:
            from megatron_rl.megatron.kernels import gates

            return gates.gated(x, tanh=True)
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


# {name of the activation (models/sizes.py): (function, module)}.
# The module computes the gated activation from the fused output of fc1, in place of Megatron-core's own code. The
# function is only the value of core's setting activation_func, because core accepts no other functions.
ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "silu": (F.silu, SwiGLU),
    "gelu_tanh": (F.gelu, GeGLU),
    "clamped_silu": (F.silu, ClampedSwiGLU),
}
