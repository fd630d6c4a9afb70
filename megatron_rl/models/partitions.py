"""Computes which rectangles of Hugging Face tensors a rank holds of a parameter, for each way to shard a parameter.

A partition is a small value with one method, `held`. 1-D tensors are treated as [n, 1]. The module computes with
indices only and touches no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

Shape = tuple[int, int]  # rows, columns


class Rect(NamedTuple):
    """A rectangle of a Hugging Face tensor, and its position in a parameter.

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
        """Returns the number of elements of the rectangle."""
        return self.rows * self.columns


class Source(NamedTuple):
    """A Hugging Face tensor that a parameter is made of, with its shape. `{e}` in its name is a placeholder for the
    expert index."""

    name: str
    rows: int
    columns: int = 1


Held = tuple[Shape, list[Rect]]  # (shape of a parameter on a rank, the rectangles that fill it)


class Partition(Protocol):
    """A way to shard a parameter over ranks."""

    sharded: ClassVar[bool]  # whether ranks hold different parts; if False, each rank holds the whole parameter

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        """Returns (shape, rectangles) of the parameter on rank `rank` of `ranks`.

        `sources`: the Hugging Face tensors that the parameter is made of.
        `multiple`: the rows of a vocabulary are padded to a multiple of `multiple` * `ranks`.
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

    For example, a joined gate and up parameter is [gate rows of this rank; up rows of this rank]. This is not a slice
    of the concatenation of gate and up.
    """

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        rects, place = [], 0
        for name, rows, columns in sources:
            own = rows // ranks
            rects.append(Rect(name, rank * own, 0, own, columns, place, 0))
            place += own
        return (place, sources[0].columns), rects


@dataclass(frozen=True)
class ByColumns:
    """A partition that splits the tensor into equal runs of columns."""

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, rows, columns),) = sources
        own = columns // ranks
        return (rows, own), [Rect(name, 0, rank * own, rows, own, 0, 0)]


@dataclass(frozen=True)
class Vocabulary:
    """A partition that pads the rows so that ranks hold equal runs of rows. No rectangle covers the padding."""

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, vocab, columns),) = sources
        rows = padded_vocab(vocab, ranks, multiple) // ranks
        return (rows, columns), stacked([(name, 0, vocab)], rank * rows, rows, columns)


@dataclass(frozen=True)
class EngineVocabulary:
    """A partition that pads the rows as vLLM and SGLang do.

    Rows are padded to a multiple of 64. If the ranks do not divide the padded rows, SGLang pads to a multiple of 64 per
    rank, and vLLM does not start.
    """

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, vocab, columns),) = sources
        even = padded_vocab(vocab, 1, 64)
        rows = (padded_vocab(vocab, ranks, 64) if even % ranks else even) // ranks
        return (rows, columns), stacked([(name, 0, vocab)], rank * rows, rows, columns)


@dataclass(frozen=True)
class QueryGroups:
    """A partition of query, key and value in one Megatron tensor, ordered by key/value head.

    The rows of a group are the query heads of one key/value head, then its key, then its value. A rank holds one
    contiguous run of rows. If there are fewer key/value heads than ranks, a run may end inside a group.
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
    """A partition with which a rank holds its query heads, then its key heads, then its value heads, as engines do.

    Key/value heads are repeated if there are fewer of them than ranks.
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
    """Returns the rectangles for rows [first, first + rows) of the concatenation of `segments`.

    A segment is (tensor, index of its first row, number of rows). Rows beyond the last segment are padding.
    """
    out, place = [], 0
    for tensor, row, count in segments:
        low, high = max(first, place), min(first + rows, place + count)
        if low < high:
            out.append(Rect(tensor, row + low - place, 0, high - low, columns, low - first, 0))
        place += count
    return out
