"""Norm, activation and attention of the project's torch layer spec: RMSNorm under sequence parallelism, SDPA over packed sequences.

They enter Megatron through its layer-spec extension point. Rotary embedding is applied here, from positions that were laid out
once per micro-batch, because core's packed rotary loops over sequences in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.megatron import platform
from megatron_rl.weights.hf import Architecture

platform.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

MAX_PADDING = 1.15  # padded over real tokens within one attention bucket


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length that attend in one call: packed rows `source` stand at `target` of a padded [S, L] grid."""

    shape: tuple[int, int]
    source: Tensor  # [n] positions in the packed sequence
    target: Tensor  # [n] positions in the flattened grid


@dataclass
class SequenceLayout(PackedSeqParams):
    """How the tokens of a micro-batch form sequences, and their rotary tables. `buckets` is empty for a padded micro-batch."""

    cos: Tensor | None = None  # [N, 1, d] packed, [L, 1, 1, d] padded
    sin: Tensor | None = None
    buckets: tuple[Bucket, ...] = ()
    packed: Tensor | None = None  # [N] packed positions in the order in which the buckets' grids hold them
    gridded: Tensor | None = None  # [N] where these stand in the concatenated grids


class RotaryTable:
    """cos and sin of all positions seen so far; grows when a longer sequence comes."""

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch
        self.cos, self.sin = arch.rotary(torch.arange(256))

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[N] -> two [N, d]."""
        needed = int(positions.max()) + 1
        if needed > len(self.cos):
            self.cos, self.sin = self.arch.rotary(torch.arange(2 * needed))
        device = positions.device
        index = positions.to(self.cos.device)
        return self.cos[index].to(device, dtype), self.sin[index].to(device, dtype)


def packed_layout(lengths: Sequence[int], rotary: RotaryTable, *, dtype: torch.dtype, device: torch.device) -> SequenceLayout:
    """Layout of sequences that stand end to end in one row. [S] lengths, all positive."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    cos, sin = rotary.at(positions.to(device), dtype)
    cu = ends.to(device, torch.int32)
    buckets = _buckets(list(lengths), ends.tolist(), device)
    starts = torch.tensor([0] + [b.shape[0] * b.shape[1] for b in buckets]).cumsum(0).tolist()
    return SequenceLayout(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cos=cos[:, None],
        sin=sin[:, None],
        buckets=tuple(buckets),
        packed=torch.cat([b.source for b in buckets]),
        gridded=torch.cat([b.target + start for b, start in zip(buckets, starts, strict=False)]),
    )


def padded_layout(length: int, rotary: RotaryTable, *, dtype: torch.dtype, device: torch.device) -> SequenceLayout:
    """Layout of a [S, L] micro-batch, padded on the right."""
    cos, sin = rotary.at(torch.arange(length, device=device), dtype)
    return SequenceLayout(qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length, cos=cos[:, None, None], sin=sin[:, None, None])


def _buckets(lengths: list[int], ends: list[int], device: torch.device) -> list[Bucket]:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    real = 0
    for i in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= MAX_PADDING * (real + lengths[i]):
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            real = lengths[i]
    buckets = []
    for group in groups:
        width = lengths[group[0]]
        source = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in group])
        target = torch.cat([torch.arange(row * width, row * width + lengths[i]) for row, i in enumerate(group)])
        buckets.append(Bucket(shape=(len(group), width), source=source.to(device), target=target.to(device)))
    return buckets


class _Spread(torch.autograd.Function):
    """rows [n_out] = zeros, rows[target] = x[source]; all positions distinct, so that the backward is a gather, not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(source, target)
        ctx.size = x.shape[0]
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, target, x.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        source, target = ctx.saved_tensors
        back = grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, source, grad.index_select(0, target))
        return back, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention of Qwen and Llama. [..., d] -> [..., d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm whose weight gradient Megatron sums over tensor ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., gate | up]; the backward pass writes both halves in place, where autograd would join copies."""

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


class SwiGLU(MegatronModule):
    """The gated activation of Qwen and Llama on fc1's joined output. [..., 2 f] -> [..., f]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)  # type: ignore[return-value]


class SDPAttention(MegatronModule):
    """Causal attention by torch's scaled_dot_product_attention, packed (thd) or padded (sbhd), with rotary embedding."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
        packed_seq_params: SequenceLayout | None = None, **unused: Any,
    ) -> Tensor:  # fmt: skip
        """query [N, H, d] or [L, S, H, d], key and value with the key/value heads -> [N, H * d] or [L, S, H * d]."""
        layout = packed_seq_params
        if layout is None or layout.cos is None or layout.sin is None:
            raise ValueError("the torch layer spec needs a SequenceLayout as packed_seq_params")
        query, key = rotate(query, layout.cos, layout.sin), rotate(key, layout.cos, layout.sin)
        if not layout.buckets:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))  # [S, H, L, d]
            return out.permute(2, 0, 1, 3).flatten(2)
        grids = []
        for bucket in layout.buckets:
            rows, width = bucket.shape
            padded = (_Spread.apply(x, bucket.source, bucket.target, rows * width) for x in (query, key, value))
            out = self._attend(*(x.view(rows, width, *x.shape[1:]).transpose(1, 2) for x in padded))
            grids.append(out.transpose(1, 2).reshape(rows * width, -1))
        return _Spread.apply(torch.cat(grids), layout.gridded, layout.packed, query.shape[0])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[S, H, L, d] each -> [S, H, L, d]."""
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)
