"""A root-mean-square norm over all query (or key) heads jointly, with the heads split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.megatron import platform
from megatron_rl.megatron.torch_layers import TensorSharded
from megatron_rl.models.sizes import Sizes

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes  # noqa: E402


class JointNorm(TensorSharded):
    """A root-mean-square norm over all heads jointly. The heads are split over the tensor-parallel ranks. Input and
    output are [..., heads of this rank, d].

    Each rank holds the weight elements that belong to its heads. `qk_layernorm` in Megatron-core's config must be
    False: otherwise Megatron-core would treat the weight as replicated, because the weight has the name of a per-head
    norm, and would sum the weight's gradient over ranks.
    """

    def __init__(self, config: Any, hidden_size: int, heads: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.group: Any = parallel_state.get_tensor_model_parallel_group()
        self.axis = {"weight": 0}
        self.eps, self.head_dim, self.width = eps, hidden_size, heads * hidden_size
        local_width = self.width // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(local_width, dtype=config.params_dtype))
        # Without these attributes Megatron-core would include only the first tensor rank's weight in the gradient norm.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1, self.head_dim)
        normed: Any = _NormOverRanks.apply(x, weight, self.eps, self.width, self.group)
        return normed


def set_joint_norms(layers: Iterable[Any], sizes: Sizes) -> None:
    """Sets JointNorm modules as the query and key norms of Megatron-core's layers. The norms cannot be given in the
    layer spec, because Megatron-core 0.19 rejects query and key norms in a spec if `qk_layernorm` is False."""
    for layer in layers:
        attention, eps = layer.self_attention, layer.config.layernorm_epsilon
        attention.q_layernorm = JointNorm(layer.config, sizes.head_dim, sizes.heads, eps)
        attention.k_layernorm = JointNorm(layer.config, sizes.head_dim, sizes.kv_heads, eps)


class _NormOverRanks(torch.autograd.Function):
    """Computes weight * x / sqrt(mean of x^2 + eps) in float32, where the mean is over the heads of all ranks.

    The forward and the backward pass each all-reduce one scalar per token. x is [..., H, d], and the weight is [H, d].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, eps: float, width: int, group: Any
    ) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(_over_heads(wide.square(), group) / width + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.width, ctx.group = width, group
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        wide, normed = grad.float(), x.float() * scale
        weighted = wide * weight.float()
        along = _over_heads(weighted * normed, ctx.group) / ctx.width
        for_x = (weighted - normed * along) * scale
        for_weight = (wide * normed).flatten(0, -3).sum(0)
        return for_x.to(x.dtype), for_weight.to(weight.dtype), None, None, None


def _over_heads(x: Tensor, group: Any) -> Tensor:
    """Returns the sum over the last two dimensions and over all ranks of the tensor-parallel group. [..., H, d] ->
    [..., 1, 1]."""
    total = x.sum((-2, -1), keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
