"""Attention over padded (sbhd) and packed (thd) sequences, with the refusals of Transformer Engine's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.distributed import GatherRows
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

__all__ = ["DotProductAttention", "apply_rotary_pos_emb"]


class _SplitAlongDim(torch.autograd.Function):
    """Splits a tensor into views; the gradients are joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Any, squeeze: bool = False) -> Any:  # type: ignore[override]
        ctx.dim, ctx.squeeze = dim, squeeze
        parts = x.split(sizes, dim)
        return tuple(part.squeeze(dim) if squeeze else part for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = [grad.unsqueeze(ctx.dim) if ctx.squeeze else grad for grad in grads]
        return torch.cat(own, ctx.dim), None, None, None


class DotProductAttention(TransformerEngineBaseModule):
    """Causal attention. Without a mask's other kinds, dropout and bias, which nobody here uses."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and attention_type == "self", (
            "the stand-in has neither dropout nor cross-attention"
        )
        self.qkv_format, self.attn_mask_type, self.cp_group = qkv_format, attn_mask_type, cp_group
        self.kv_heads = (num_gqa_groups or num_attention_heads) // tp_size
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        **others: Any,
    ) -> Tensor:
        """Returns [N, H * d] or [L, S, H * d]. Raises as Transformer Engine does for what it cannot compute."""
        assert not any(value is not None for value in others.values()), f"the stand-in does not know {others}"
        form, mask = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        assert query_layer.is_cuda and key_layer.is_cuda and value_layer.is_cuda, (
            "DotProductAttention only supports CUDA tensors."
        )
        assert query_layer.dtype == key_layer.dtype == value_layer.dtype, (
            "Queries, keys and values must have the same data type!"
        )
        assert key_layer.shape[-2] == self.kv_heads, f"Keys and values must have num_gqa_group = {self.kv_heads} heads!"
        if form == "thd":
            return self._packed(query_layer, key_layer, value_layer, cu_seqlens_q, mask, max_seqlen_q)
        ranks = 1 if self.cp_group is None else self.cp_group.size()
        length = (query_layer.shape[0] if max_seqlen_q is None else max_seqlen_q) * ranks
        if length != query_layer.shape[0] * ranks:
            raise RuntimeError(
                f"max_seqlen_q = {max_seqlen_q} stands for {length} tokens over {ranks} context-parallel ranks, not "
                f"for {query_layer.shape[0] * ranks}: in the format sbhd it is a rank's own number"
            )
        assert mask == "causal", f"the stand-in knows causal attention, not {mask}"
        order = _zigzag(length, ranks, query_layer.device)
        return self._attend(query_layer, key_layer, value_layer, order)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, mask: str, longest: int | None
    ) -> Tensor:
        """Attends within packed sequences, one after the other."""
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                "No dot product attention backend is available for the provided inputs: packed sequences (thd) need "
                f"bfloat16 or float16, these are {query.dtype}"
            )
        assert "padding" in mask, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        assert cu_seqlens is not None, "cu_seqlens_q and cu_seqlens_kv can not be None when qkv_format = thd!"
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_cuda, "cu_seqlens must be int32 on the GPU"
        raw = getattr(cu_seqlens, "raw", cu_seqlens)  # kernels read it on the device: the host does not wait
        ends, ranks = raw.tolist(), 1 if self.cp_group is None else self.cp_group.size()
        if longest is not None and longest < max(b - a for a, b in zip(ends, ends[1:], strict=False)):
            raise RuntimeError(f"max_seqlen_q = {longest} is less than the longest sequence")
        out = []
        for first, last in zip(ends, ends[1:], strict=False):
            own = slice(first // ranks, last // ranks)
            parts = (one[own].unsqueeze(1) for one in (query, key, value))
            out.append(self._attend(*parts, _zigzag(last - first, ranks, query.device)).squeeze(1))
        return torch.cat(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, order: Tensor) -> Tensor:
        """Attends from a rank's own [L, S, H, d] to the keys of all ranks. `order`: positions of all ranks' rows."""
        if self.cp_group is not None and self.cp_group.size() > 1:
            key, value = (GatherRows.apply(one, self.cp_group) for one in (key, value))
            own = order[self.cp_group.rank() * len(query) :][: len(query)]
        else:
            own = order
        mask = order[None] <= own[:, None]
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def _zigzag(length: int, ranks: int, device: torch.device) -> Tensor:
    """Returns the positions of a sequence's tokens, rank after rank: rank r has chunks r and 2 * ranks - 1 - r."""
    places = torch.arange(length, device=device)
    if ranks == 1:
        return places
    chunks = places.chunk(2 * ranks)
    return torch.cat([chunk for rank in range(ranks) for chunk in (chunks[rank], chunks[2 * ranks - 1 - rank])])
