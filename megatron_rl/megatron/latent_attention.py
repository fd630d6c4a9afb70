"""Multi-latent attention in torch operations, for models that do not use Transformer Engine's layers.

The layer's forward pass is Megatron-core's (MultiLatentAttention). This module replaces the projections of
Megatron-core's class for three reasons: core uses the layer norms' epsilon for the norms of the latents, its rotary
embedding loops over packed sequences in every layer, and without Transformer Engine it does not sum the gradient of the
key's shared part over tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.megatron import platform
from megatron_rl.megatron.attention import SequenceLayout
from megatron_rl.megatron.torch_layers import Chosen, RMSNorm, rotate
from megatron_rl.models.sizes import Features

platform.install()

from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402


class SharedLinear(MegatronModule):
    """A linear projection whose weight is replicated on every tensor rank.

    Under sequence parallelism each rank projects only its tokens, and Megatron-core sums the weight's gradients over
    the ranks.
    """

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(Chosen, MultiLatentAttention):
    """Self-attention whose keys and values are projected from a latent vector, as in DeepSeek models. If config.json
    sets `q_lora_rank`, queries are also projected from a latent vector, which has this width."""

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        *,
        features: Features,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **newer: Any,  # arguments that Megatron-core 0.19 adds
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, groups, **newer)
        heads, rank = config.num_attention_heads, config.q_lora_rank
        if rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, config.hidden_size, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = SharedLinear(config, config.hidden_size, rank)
            self.q_layernorm = RMSNorm(config, rank, eps=features.latent_eps)
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, rank, heads * self.q_head_dim)
        rank, head_width = config.kv_lora_rank, config.qk_head_dim + config.v_head_dim
        self.linear_kv_down_proj = SharedLinear(config, config.hidden_size, rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = RMSNorm(config, rank, eps=features.latent_eps)
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, rank, heads * head_width)

    def get_query_key_value_tensors(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: SequenceLayout | None = None,
        inference_context: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Computes queries, keys and values from hidden states [N, 1, h]. Under sequence parallelism, `hidden_states`
        has only this rank's part of the tokens.

        Returns (queries, keys, values, vectors from which the queries were projected, latent vectors from which the
        keys and values were projected). Queries and keys are [N, H, d], with rotary embedding already applied. Values
        are [N, H, v]. H is the number of heads of this rank.
        """
        assert packed_seq_params is not None, "the torch layer spec needs a SequenceLayout as packed_seq_params"
        config, (cos, sin) = self.config, packed_seq_params.turns[0]
        down = self.linear_kv_down_proj(hidden_states)
        latent, turned = down.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        latent, turned = self.kv_layernorm(latent), _halves(turned)
        # The heads of all ranks use the shared part of the key, so the gradient of this part is summed over the ranks.
        if config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned, group=self.tp_group)
        else:
            turned = copy_to_tensor_model_parallel_region(turned, group=self.tp_group)
            # Megatron-core 0.16.1 all-reduces a copy of a non-contiguous gradient and discards the copy.
            # The hook makes the gradient contiguous.
            if turned.requires_grad:
                turned.register_hook(Tensor.contiguous)
        if config.q_lora_rank is None:
            low, projected = hidden_states, self.linear_q_proj(hidden_states)[0]
        else:
            low = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            projected = self.linear_q_up_proj(low)[0]
        query = projected.unflatten(-1, (-1, self.q_head_dim))
        both = self.linear_kv_up_proj(latent)[0].unflatten(-1, (-1, config.qk_head_dim + config.v_head_dim))
        turned = turned[..., None, :]
        query, both, turned = (x.squeeze(1) for x in (query, both, turned))
        plain, to_turn = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat([plain, rotate(_halves(to_turn), cos, sin, triton=self.triton)], dim=-1)
        key, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        shared = rotate(turned, cos, sin, triton=self.triton)
        key = torch.cat([key, shared.expand(*key.shape[:-1], -1)], dim=-1)
        return query, key, value, low, latent

    def _up(self, kind: Any, inputs: int, outputs: int) -> Any:
        """Returns a linear module that projects latent vectors (or hidden states) to heads. The heads are split over
        the tensor-parallel ranks."""
        return build_module(
            kind, inputs, outputs, config=self.config, init_method=self.config.init_method, gather_output=False,
            bias=False, skip_bias_add=False, is_expert=False, tp_group=self.tp_group,
        )  # fmt: skip


def _halves(x: Tensor) -> Tensor:
    """Reorders interleaved pairs (x0, x1), (x2, x3), ... into halves [x0, x2, ..., x1, x3, ...]. [..., d] -> [..., d].

    The rotary embedding of these models rotates neighbouring elements. Queries and keys are reordered in the same way,
    so attention scores do not change.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
