"""Says which rectangles of Hugging Face tensors a rank holds in one parameter: the few ways to cut a parameter.

A cut is a small value with one method, `held`. 1-D tensors count as [n, 1]. Everything here is arithmetic on numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

Shape = tuple[int, int]  # rows, columns


class Rect(NamedTuple):
    """A rectangle of a Hugging Face tensor, and the place of the same size that it has in a parameter.

    tensor[row : row + rows, column : column + columns] lies at parameter[at_row :, at_column :].
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
        """Returns the number of elements."""
        return self.rows * self.columns


class Source(NamedTuple):
    """A Hugging Face tensor that a parameter is made of, with its shape. `{e}` in its name stands for an expert."""

    name: str
    rows: int
    columns: int = 1


Held = tuple[Shape, list[Rect]]  # the shape of a parameter on a rank, and its rectangles


class Partition(Protocol):
    """A way to divide a parameter among ranks."""

    sharded: ClassVar[bool]  # whether ranks hold different parts; otherwise each holds the whole

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        """Returns (shape, rectangles) of the parameter on `rank` of `ranks`.

        `multiple`: the vocabulary's rows are padded to this number times the ranks.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """Every rank holds the whole tensor."""

    sharded: ClassVar[bool] = False

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, rows, columns),) = sources
        return (rows, columns), [Rect(name, 0, 0, rows, columns, 0, 0)]


@dataclass(frozen=True)
class ByRows:
    """Every tensor is cut into equal runs of rows, and a rank's runs are joined end to end.

    A joined gate and up is [gate of this rank; up of this rank], and no cut of their concatenation.
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
    """The tensor is cut into equal runs of columns."""

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, rows, columns),) = sources
        own = columns // ranks
        return (rows, own), [Rect(name, 0, rank * own, rows, own, 0, 0)]


@dataclass(frozen=True)
class Vocabulary:
    """The rows are padded, so that ranks hold equal runs of them. No rectangle covers the padding."""

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, vocab, columns),) = sources
        rows = padded_vocab(vocab, ranks, multiple) // ranks
        return (rows, columns), stacked([(name, 0, vocab)], rank * rows, rows, columns)


@dataclass(frozen=True)
class EngineVocabulary:
    """The rows are padded as vLLM and SGLang do it: to 64, and to 64 per rank where the ranks do not divide that.

    The second is SGLang's rule; vLLM does not start then.
    """

    sharded: ClassVar[bool] = True

    def held(self, sources: Sequence[Source], ranks: int, rank: int, multiple: int = 1) -> Held:
        ((name, vocab, columns),) = sources
        even = padded_vocab(vocab, 1, 64)
        rows = (padded_vocab(vocab, ranks, 64) if even % ranks else even) // ranks
        return (rows, columns), stacked([(name, 0, vocab)], rank * rows, rows, columns)


@dataclass(frozen=True)
class QueryGroups:
    """Query, key and value are one tensor in Megatron, group by group.

    For each key/value head there stand its query heads, its key and its value, end to end. A rank holds one run of
    these rows, which may cut through such a group when there are fewer key/value heads than ranks.
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
    """Query, key and value of a rank's heads stand end to end, as engines have them.

    Key/value heads are repeated when there are fewer than ranks.
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
    """Returns the rows of the embedding, rounded up to a multiple of `multiple` * tp: ranks hold equal parts."""
    step = multiple * tp
    return -(-vocab // step) * step


def stacked(segments: Iterable[tuple[str, int, int]], first: int, rows: int, columns: int) -> list[Rect]:
    """Returns the rectangles of rows [first, first + rows) of segments that are joined end to end.

    A segment is (tensor, its first row, its number of rows). Rows beyond the last segment are padding.
    """
    out, place = [], 0
    for tensor, row, count in segments:
        low, high = max(first, place), min(first + rows, place + count)
        if low < high:
            out.append(Rect(tensor, row + low - place, 0, high - low, columns, low - first, 0))
        place += count
    return out
