"""Causal attention over packed sequences in torch operations, with or without a sliding window.

Megatron-core builds the attention modules from a layer spec. The modules apply rotary embedding themselves, from tables
that are computed once per micro-batch, because Megatron-core's rotary embedding of packed sequences loops over
sequences in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.devices import sdpa
from megatron_rl.devices.host_to_device import upload
from megatron_rl.megatron import platform
from megatron_rl.megatron.kernels import varlen
from megatron_rl.megatron.torch_layers import Chosen, TensorSharded, rotate
from megatron_rl.models.sizes import Features
from megatron_rl.weights.hf_model import Architecture

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

MAX_PADDING = 1.15  # maximum ratio of a bucket's token count including padding to the count without padding
# On a CPU, bfloat16 attention is computed in float32 if the padded sequences have fewer keys than WIDENED.
# With fewer keys, torch's backward pass is up to three times slower in bfloat16 (benchmarks/attention.py).
WIDENED = 384


@dataclass(frozen=True)
class Grid:
    """A padded [S, L] grid of token positions, for S sequences of at most L tokens. Row `source[i]` of a flat tensor
    [rows, ...] is placed at position `target[i]` of the flattened grid."""

    shape: tuple[int, int]
    source: Tensor  # [n] row indices in the flat tensor
    target: Tensor  # [n] positions in the flattened grid
    repeats: bool = False  # True if a row may be copied to several positions; the copies' gradients are then summed

    def spread(self, x: Tensor) -> Tensor:
        """Returns the grid [S, H, L, d] filled with the flat rows [rows, H, d], and with zeros at empty positions."""
        rows, width = self.shape
        grid: Any = _Spread.apply(x, self.source, self.target, rows * width, self.repeats)
        return grid.view(rows, width, *x.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class AttentionBucket:
    """Sequences of similar length whose attention is computed in one call."""

    queries: Grid
    keys: Grid  # `source` indexes the concatenated rows of all context-parallel ranks, in rank order
    # One mask per kind of attention: [S or 1, 1, L of queries, L of keys], True where a query attends to a key.
    # A mask that is None means causal attention in which queries and keys are the same tokens.
    masks: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Context:
    """The context-parallel group of this rank.

    Each sequence is padded so that it can be split into 2 * size equal chunks. The chunks are assigned in a zig-zag:
    rank r has the chunks r and 2 * size - 1 - r, so that causal attention costs the same on every rank.
    """

    size: int = 1
    rank: int = 0
    group: Any = None

    def multiple(self, others: int) -> int:
        """Returns the number that every sequence length must be a multiple of, so that a sequence can be split over the
        context-parallel ranks, and each rank's tokens of the sequence can be split into `others` equal parts."""
        return math.lcm(2 * self.size, others * self.size) if self.size > 1 else others

    def chunks(self, rank: int) -> tuple[int, int]:
        """Returns the indices, in ascending order, of the two chunks of a sequence that rank `rank` has."""
        return rank, 2 * self.size - 1 - rank

    def rank_positions(self, lengths: Sequence[int]) -> Tensor:
        """Returns the positions of this rank's tokens in the concatenation of padded sequences of the given lengths.

        `lengths` has S elements, and the result is [sum of lengths / size].
        """
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        if self.size == 1:
            return torch.arange(ends[-1])
        parts = []
        for start, n in zip(ends, lengths, strict=False):
            width = n // (2 * self.size)
            parts += [torch.arange(start + i * width, start + (i + 1) * width) for i in self.chunks(self.rank)]
        return torch.cat(parts)


ALONE = Context()


@dataclass
class SequenceLayout(PackedSeqParams):
    """The layout of a micro-batch: how the tokens form sequences, with the rotary tables and masks of each kind of
    attention, for example full and sliding-window attention.

    If one flash attention call computes the attention of all sequences, `runs` is set and `buckets` is empty.
    """

    # rotary tables (cos, sin) of this rank's tokens, [N, 1, d] each, for each kind of attention
    turns: tuple[tuple[Tensor, Tensor], ...] = ()
    buckets: tuple[AttentionBucket, ...] = ()
    packed: Tensor | None = None  # [N] row indices of the queries, in the order of the buckets' grids
    # [N] position of each query in the concatenation of the buckets' flattened query grids
    gridded: Tensor | None = None
    # sequences for one flash attention call; None if the attention is computed in buckets
    runs: varlen.Segments | None = None
    context: Context = ALONE


class RotaryTable:
    """A cache of rotary tables on the model's device: one cos and one sin table for each kind of attention (for example
    full and sliding-window attention).

    The tables grow when a longer sequence is requested.
    """

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch
        self.windows = [kind.window for kind in arch.features.kinds]
        self._tables = self._of(256)

    def at(self, positions: Tensor, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns (cos, sin) of the given positions, two tensors [N, d] for each kind of attention.

        `positions` is [N] on the CPU. The result has the dtype and the device of `like`.
        """
        needed, cos_table = int(positions.max()) + 1, self._tables[0][0]
        if needed > len(cos_table):
            self._tables = self._of(2 * needed)
        if self._tables[0][0].device != like.device:
            self._tables = [(upload(cos, like.device), upload(sin, like.device)) for cos, sin in self._tables]
        index = upload(positions, like.device)
        return [(cos[index].to(like.dtype), sin[index].to(like.dtype)) for cos, sin in self._tables]

    def _of(self, length: int) -> list[tuple[Tensor, Tensor]]:
        places = torch.arange(length)
        return [self.arch.rotary(places, kind) for kind in range(len(self.arch.features.kinds))]


def packed_layout(
    lengths: Sequence[int], rotary: RotaryTable | None, *, context: Context = ALONE, like: Tensor, flash: bool = False
) -> SequenceLayout:
    """Returns the layout of sequences that are packed end to end in one row.

    `lengths`: [S] sequence lengths, counting the tokens of all context-parallel ranks. Each is a positive multiple of
    the result of `context.multiple`.
    `rotary`: the rotary tables. If None, the layout has only the fields that Transformer Engine's layers need.
    `like`: a tensor with the dtype and device of the model.
    `flash`: whether one flash attention call computes the attention of all sequences (kernels/varlen.py).
    """
    cu = upload(torch.tensor([0, *lengths]).cumsum(0).int(), like.device)
    longest = max(lengths)
    ends = SequenceLayout("thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest, context=context)
    if rotary is None:
        return ends
    positions = torch.cat([torch.arange(n) for n in lengths])[context.rank_positions(lengths)]
    turns = rotary.at(positions, like)
    starts = [end // context.size for end in torch.tensor([0, *lengths]).cumsum(0).tolist()]
    rows = [torch.arange(start, start + n // context.size) for start, n in zip(starts, lengths, strict=False)]
    ends = replace(ends, turns=tuple((cos[:, None], sin[:, None]) for cos, sin in turns))
    if flash:
        return replace(ends, runs=_runs(lengths, rows, context, like.device))
    return replace(ends, **attention_fields(whole_buckets(lengths, rows, rotary.windows, context), like.device))


def _runs(lengths: Sequence[int], rows: Sequence[Tensor], context: Context, device: torch.device) -> varlen.Segments:
    """Returns the flash attention segments of sequences that do not share a prefix. `rows[s]` has the row indices of
    sequence s on one context-parallel rank.

    With context parallelism, each of a rank's two chunks of a sequence is a separate run.
    """
    if context.size == 1:
        return varlen.segments(lengths, None, device)
    counts, keys = [], []
    for n, places in zip(lengths, rows, strict=True):
        counts += [n // (2 * context.size)] * 2
        keys += [_keys_up_to(last, places, sum(len(r) for r in rows), context) for last in context.chunks(context.rank)]
    return varlen.segments(counts, keys, device)


def _keys_up_to(last: int, sequence_rows: Tensor, local: int, context: Context) -> Tensor:
    """Returns the row indices of the tokens in the first `last` + 1 chunks of one sequence (see Context). The indices
    refer to the concatenated rows of all context-parallel ranks.

    `sequence_rows`: row indices of the sequence's tokens on one rank; every rank has the same indices.
    `local`: total number of rows on one rank; every rank has the same number.
    """
    width, chunks = len(sequence_rows) // 2, 2 * context.size
    places = [sequence_rows[:width] if c < context.size else sequence_rows[width:] for c in range(last + 1)]
    return torch.cat([part + min(c, chunks - 1 - c) * local for c, part in enumerate(places)])


def whole_buckets(
    lengths: Sequence[int], rows: Sequence[Tensor], windows: Sequence[int | None], context: Context
) -> list[AttentionBucket]:
    """Returns the attention buckets of sequences without a shared prefix.

    `rows[s]` has the row indices of sequence s on one context-parallel rank; the indices are the same on all these
    ranks. `windows` has one element per kind of attention: the length of the sliding window, or None for no window.
    """
    return [
        bucket
        for group in _group_by_length(lengths)
        for bucket in _group_buckets(group, lengths, rows, windows, context)
    ]


def attention_fields(buckets: Sequence[AttentionBucket], device: torch.device) -> dict[str, Any]:
    """Returns the values of the SequenceLayout fields `buckets`, `packed` and `gridded`, on `device`. Each row must be
    a query of exactly one bucket."""
    starts = torch.tensor([0] + [b.queries.shape[0] * b.queries.shape[1] for b in buckets]).cumsum(0).tolist()
    return dict(
        buckets=tuple(_to_device(bucket, device) for bucket in buckets),
        packed=upload(torch.cat([b.queries.source for b in buckets]), device),
        gridded=upload(
            torch.cat([b.queries.target + start for b, start in zip(buckets, starts, strict=False)]), device
        ),
    )


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups sequences of similar length, longest first. The token count of a group including padding is at most
    MAX_PADDING times its token count without padding. Returns the indices of the sequences in each group."""
    groups: list[list[int]] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= MAX_PADDING * (real + lengths[i]):
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            real = lengths[i]
    return groups


def _group_buckets(
    group: list[int], lengths: Sequence[int], rows: Sequence[Tensor], windows: Sequence[int | None], context: Context
) -> list[AttentionBucket]:
    """Returns the attention buckets of one group of sequences.

    Without context parallelism there is one bucket. With context parallelism, this rank has two chunks of every
    sequence, and there is one bucket for all first chunks and one bucket for all second chunks. A query attends to the
    keys up to the query's position.
    """
    if context.size == 1:
        both = grid([rows[i] for i in group])
        masks = tuple(_window_mask(both.shape[1], window) for window in windows)
        return [AttentionBucket(queries=both, keys=both, masks=masks)]
    local, chunks = sum(len(r) for r in rows), 2 * context.size
    buckets = []
    for half, last in enumerate(context.chunks(context.rank)):
        widths = [lengths[i] // chunks for i in group]
        queries = [rows[i].chunk(2)[half] for i in group]
        keys = [_keys_up_to(last, rows[i], local, context) for i in group]
        distinct = widths if len(set(widths)) > 1 else widths[:1]
        masks = tuple(
            torch.stack([_causal_mask(width, max(widths), last, window) for width in distinct])[:, None]
            for window in windows
        )
        buckets.append(AttentionBucket(queries=grid(queries), keys=grid(keys), masks=masks))
    return buckets


def _causal_mask(width: int, widest: int, chunk: int, window: int | None = None) -> Tensor:
    """Returns the attention mask for the queries in chunk `chunk` of a sequence with chunks of `width` tokens. The mask
    is padded to `widest` queries.

    The mask is [widest, widest * (chunk + 1)], True where a query attends to a key. With a `window`, a query attends to
    the last `window` tokens, including itself.
    """
    keys, queries = torch.arange(widest * (chunk + 1)), torch.arange(widest)[:, None] + chunk * width
    return keys <= queries if window is None else (keys <= queries) & (keys > queries - window)


def _window_mask(length: int, window: int | None) -> Tensor | None:
    """Returns the causal sliding-window mask [1, 1, length, length] of whole sequences, or None if the window does not
    exclude any key."""
    return None if window is None or window >= length else _causal_mask(length, length, 0, window)[None, None]


def grid(rows: Sequence[Tensor], *, repeats: bool = False) -> Grid:
    """Returns the grid of sequences, padded on the right. `rows[s]` has the row indices of sequence s in a flat tensor.
    `repeats`: whether a row index may occur several times."""
    width = max(len(r) for r in rows)
    return Grid(
        (len(rows), width),
        torch.cat([*rows]),
        torch.cat([torch.arange(i * width, i * width + len(r)) for i, r in enumerate(rows)]),
        repeats,
    )


def _to_device(bucket: AttentionBucket, device: torch.device) -> AttentionBucket:
    """Returns the bucket with its tensors on `device`. If queries and keys are the same grid object, they are also the
    same object in the result."""

    def moved(cpu_grid: Grid) -> Grid:
        return Grid(cpu_grid.shape, upload(cpu_grid.source, device), upload(cpu_grid.target, device), cpu_grid.repeats)

    queries = moved(bucket.queries)
    keys = queries if bucket.keys is bucket.queries else moved(bucket.keys)
    masks = tuple(None if mask is None else upload(mask, device) for mask in bucket.masks)
    return AttentionBucket(queries=queries, keys=keys, masks=masks)


class _Spread(torch.autograd.Function):
    """Scatters rows of a tensor into a zero tensor: out[target] = x[source].

    The target positions are distinct. If the source rows are distinct too, the backward pass is a gather. Otherwise the
    backward pass sums the gradients of repeated rows in float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, source: Tensor, target: Tensor, size: int, repeats: bool
    ) -> Tensor:
        ctx.save_for_backward(source, target)
        ctx.size, ctx.repeats = x.shape[0], repeats
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, target, x.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        source, target = ctx.saved_tensors
        taken, shape = grad.index_select(0, target), (ctx.size, *grad.shape[1:])
        if ctx.repeats:
            back = grad.new_zeros(shape, dtype=torch.float32).index_add_(0, source, taken.float()).to(grad.dtype)
        else:
            back = grad.new_zeros(shape).index_copy_(0, source, taken)
        return back, None, None, None, None


class SDPAttention(Chosen, TensorSharded, MegatronModule):
    """Causal attention with rotary embedding. It is computed by torch's scaled_dot_product_attention, or by one call of
    torch's variable-length flash attention for all sequences.

    `features` gives the kind of attention of each layer. With multi-latent attention, rotary embedding is already
    applied to the queries and keys that this module receives.
    """

    def __init__(self, config: Any, layer_number: int, *, features: Features, **unused: Any) -> None:
        super().__init__(config=config)
        self.scale, self.kind = features.softmax_scale, features.kind_of(layer_number - 1)
        self.window = features.kinds[self.kind].window
        self.rotates = not config.multi_latent_attention
        self.group, self.axis = parallel_state.get_tensor_model_parallel_group(), {"softmax_offset": 0}
        self.softmax_offset: torch.nn.Parameter | None = None  # [H] attention sinks; the name is Megatron-core's
        if features.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: SequenceLayout | None = None,
        **unused: Any,
    ) -> Tensor:
        """Returns the attention's output, [N, H * v].

        `query` is [N, H, d], `key` is [N, H_kv, d], and `value` is [N, H_kv, v], where H_kv is the number of key/value
        heads. Raises ValueError if `packed_seq_params` is not a complete SequenceLayout.
        """
        layout = packed_seq_params
        if layout is None or not layout.turns:
            raise ValueError("the torch layer spec needs a SequenceLayout as packed_seq_params")
        if self.rotates:
            cos, sin = layout.turns[self.kind]
            query, key = (rotate(x, cos, sin, triton=self.triton) for x in (query, key))
        rows = [query, key, value]
        if layout.context.size > 1:
            both = gather_from_sequence_parallel_region(torch.cat(rows[1:], dim=-1), group=layout.context.group)
            rows[1:] = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        if layout.runs is not None:
            q, k, v = rows
            return varlen.attend(q, k, v, layout.runs, scale=self.scale, window=self.window).flatten(1)
        grids = []
        for bucket in layout.buckets:
            attended = self._attend(
                bucket.queries.spread(rows[0]), *(bucket.keys.spread(x) for x in rows[1:]), mask=bucket.masks[self.kind]
            )
            grids.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return _Spread.apply(torch.cat(grids), layout.gridded, layout.packed, len(rows[0]), False)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes attention: query [S, H, L, d], key [S, H_kv, M, d], value [S, H_kv, M, v] -> [S, H, L, v].

        If `mask` is None, attention is causal.
        """
        width, dtype = value.shape[-1], query.dtype
        if dtype == torch.bfloat16 and query.device.type == "cpu" and key.shape[-2] < WIDENED:
            query, key, value = query.float(), key.float(), value.float()
        # pads the values: on a CPU, torch would materialize all scores if values are narrower than keys
        if width != key.shape[-1] and not value.is_cuda:
            value = F.pad(value, (0, key.shape[-1] - width))
        attended = sdpa.attend(query, key, value, mask=mask, scale=self.scale, sinks=self.softmax_offset)
        return attended[..., :width].to(dtype)
