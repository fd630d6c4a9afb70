"""Computes, for each kind of sharding, which 2-D slices of Hugging Face tensors form a rank's part of a parameter.

A partition describes one kind of sharding; its method `held` returns the blocks. 1-D tensors are treated as [n, 1]. The
module computes with indices only and touches no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

Shape = tuple[int, int]  # rows, columns


class Rect(NamedTuple):
    """A 2-D slice of a Hugging Face tensor, and the position where the slice is stored in a Megatron or engine
    parameter.

    tensor[row : row + rows, column : column + columns] is stored at parameter[at_row : at_row + rows, at_column :
    at_column + columns].
    """

    tensor: str
    row: int
    column: int
    rows: int
    columns: int
    at_row: int
    at_column: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Source(NamedTuple):
    """Name and shape of a Hugging Face tensor that a Megatron parameter is made of. `{e}` in the name is a placeholder
    for the expert index."""

    name: str
    rows: int
    columns: int = 1


# (shape of a parameter on a rank, 2-D slices of Hugging Face tensors that fill the parameter)
Held = tuple[Shape, list[Rect]]


class Partition(Protocol):
    """A way to shard a parameter over ranks."""

    sharded: ClassVar[bool]  # True if ranks hold different parts, False if each rank holds the whole parameter

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        """Returns (shape, blocks) of the parameter on rank `rank` of `ranks` ranks. The blocks say which parts of the
        Hugging Face tensors are stored at which position of the parameter.

        `sources`: the Hugging Face tensors that the parameter is made of.
        `multiple`: the rows of the embedding and the output layer are padded to a multiple of `multiple` * `ranks`.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """A partition with which every rank holds the whole tensor."""

    sharded: ClassVar[bool] = False

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, rows, columns),) = sources
        return (rows, columns), [Rect(name, 0, 0, rows, columns, 0, 0)]


@dataclass(frozen=True)
class ByRows:
    """A partition that splits every tensor into equal runs of rows. A rank's runs of all tensors are concatenated.

    For example, a joined gate and up parameter is [gate rows of this rank; up rows of this rank]. This parameter is not
    a slice of the concatenation of the whole gate and up tensors.
    """

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        rects, place = [], 0
        for name, rows, columns in sources:
            shard_rows = rows // ranks
            rects.append(Rect(name, rank * shard_rows, 0, shard_rows, columns, place, 0))
            place += shard_rows
        return (place, sources[0].columns), rects


@dataclass(frozen=True)
class ByColumns:
    """A partition that splits the tensor into equal runs of columns."""

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, rows, columns),) = sources
        shard_columns = columns // ranks
        return (rows, shard_columns), [Rect(name, 0, rank * shard_columns, rows, shard_columns, 0, 0)]


@dataclass(frozen=True)
class Vocabulary:
    """The partition of the embedding and the output layer in the trainer. Rows are padded so that all ranks hold equal
    runs of rows. Padding rows belong to none of the blocks that `held` returns."""

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, vocab, columns),) = sources
        rows = padded_vocab(vocab, ranks, multiple) // ranks
        return (rows, columns), stacked([(name, 0, vocab)], rank * rows, rows, columns)


@dataclass(frozen=True)
class EngineVocabulary:
    """The partition of the embedding and the output layer in vLLM and SGLang.

    Rows are padded to a multiple of 64. If the padded number of rows is not divisible by the number of ranks, SGLang
    pads to a multiple of 64 per rank, and vLLM does not start.
    """

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, vocab, columns),) = sources
        even = padded_vocab(vocab, 1, 64)
        rows = (padded_vocab(vocab, ranks, 64) if even % ranks else even) // ranks
        return (rows, columns), stacked([(name, 0, vocab)], rank * rows, rows, columns)


@dataclass(frozen=True)
class QueryGroups:
    """The partition with which Megatron shards the parameter that joins query, key and value, ordered by key/value
    head.

    The parameter consists of groups, one for each key/value head. The rows of a group are the query heads that use this
    key/value head, then the key head, then the value head. A rank holds one contiguous run of rows. If there are fewer
    key/value heads than ranks, a run may end inside a group.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        d, per_group, columns = self.head_dim, self.heads // self.kv_heads * self.head_dim, sources[0].columns
        rows = (self.heads + 2 * self.kv_heads) * d // ranks
        query, key, value = (source.name for source in sources)
        segments = []
        for group in range(self.kv_heads):
            segments += [(query, group * per_group, per_group), (key, group * d, d), (value, group * d, d)]
        return (rows, columns), stacked(segments, rank * rows, rows, columns)


@dataclass(frozen=True)
class EngineHeads:
    """The partition with which engines shard the parameter that joins query, key and value. The rows on a rank are the
    rank's query heads, then its key heads, then its value heads.

    Key/value heads are repeated if there are fewer key/value heads than ranks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        d = self.head_dim
        q_rows, kv_rows = self.heads // ranks * d, max(1, self.kv_heads // ranks) * d
        kv_first = rank * self.kv_heads // ranks * d
        rects, place = [], 0
        parts = ((rank * q_rows, q_rows), (kv_first, kv_rows), (kv_first, kv_rows))
        for source, (row, rows) in zip(sources, parts, strict=True):
            rects.append(Rect(source.name, row, 0, rows, source.columns, place, 0))
            place += rows
        return (place, sources[0].columns), rects


def padded_vocab(vocab: int, tp: int, multiple: int = 1) -> int:
    """Returns the number of rows of the embedding, rounded up to a multiple of `multiple` * `tp` so that ranks hold
    equal parts."""
    step = multiple * tp
    return -(-vocab // step) * step


def stacked(segments: Iterable[tuple[str, int, int]], first: int, rows: int, columns: int) -> list[Rect]:
    """Returns the 2-D slices of Hugging Face tensors that make up the rows [first, first + rows) of the concatenation
    of `segments`.

    A segment is (name of a tensor, index of the first row in the tensor, number of rows). Rows beyond the last segment
    are padding and have no block.
    """
    slices, place = [], 0
    for tensor, row, count in segments:
        low, high = max(first, place), min(first + rows, place + count)
        if low < high:
            slices.append(Rect(tensor, row + low - place, 0, high - low, columns, low - first, 0))
        place += count
    return slices
