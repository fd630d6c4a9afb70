"""Plans a refit (weight sync from the trainer to the engines): which rank sends which slice to each engine rank.

The plan depends only on the 2-D slices of parameters in the two layouts, so that every rank computes the same plan
without communication. Every element that an engine rank needs is sent to this rank exactly once, by a trainer rank that
holds the element. No tensor is gathered.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_rl.weights.rank_layouts import Holding

Column = NDArray[np.int64]


@dataclass(frozen=True)
class RankPlacement:
    """The node and the device of every rank of the trainer or of the engines.

    Ranks on the same device exchange data without sending it. Traffic within a node does not use the network.
    """

    nodes: Sequence[int]  # node index of each rank
    devices: Sequence[int]  # device index of each rank, unique across nodes


class _Columns:
    """A table stored as columns: arrays of the same length, with one entry per row of the table. Fields that are tuples
    are lists of names, not columns.
    """

    def take(self, index: NDArray[Any], **columns: Column) -> Self:
        """Returns a table with the rows at the given indices. `columns`: new values for columns, by name."""
        held: Any = self
        taken_columns = {name: values[index] for name, values in vars(held).items() if not isinstance(values, tuple)}
        return replace(held, **(taken_columns | columns))


@dataclass(frozen=True)
class Slices(_Columns):
    """The 2-D slices of parameters that are copied. Each field is a column with one entry per slice, sorted by source
    and then by destination.

    The slice of `rows` x `columns` at (source_row, source_column) of source_parameter is copied to (row, column) of
    destination_parameter. Parameters are given as indices into `source_names` and `destination_names`.
    """

    source: Column  # trainer ranks
    destination: Column  # engine ranks
    source_parameter: Column
    destination_parameter: Column
    source_row: Column
    source_column: Column
    row: Column
    column: Column
    rows: Column
    columns: Column
    source_names: tuple[str, ...]
    destination_names: tuple[str, ...]

    @property
    def elements(self) -> Column:
        """Returns the number of elements of each slice."""
        return self.rows * self.columns

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class RefitBucket:
    """A message of a refit (weight sync): slices [first, last) from one source rank to one destination rank, sent in
    round `round_number`.
    """

    round_number: int
    source: int
    destination: int
    first: int
    last: int
    elements: int


@dataclass(frozen=True)
class RefitPlan:
    """The messages of a refit (weight sync from the trainer to the engines), in rounds. In a round, a rank sends at
    most one message and receives at most one.
    """

    slices: Slices
    buckets: tuple[RefitBucket, ...]  # messages between devices, sorted by round
    local: tuple[RefitBucket, ...]  # messages within a device; their rounds are numbered separately
    needed: Mapping[int, int]  # engine rank -> number of elements that the rank needs, without padding
    held: Mapping[int, int]  # engine rank -> how many of the needed elements the trainer holds on the same device

    @property
    def lower_bound(self) -> int:
        """Returns the minimum number of elements that a plan must send between devices: the number of needed elements
        that the trainer does not hold on the engine rank's device.
        """
        return sum(self.needed.values()) - sum(self.held.values())

    @property
    def sent(self) -> int:
        """Returns the number of elements that this plan sends between devices."""
        return sum(bucket.elements for bucket in self.buckets)


def plan(
    sources: Iterable[Holding],
    destinations: Iterable[Holding],
    *,
    trainer: RankPlacement,
    engine: RankPlacement,
    bucket_elements: int = 64 << 20,
    local_bucket_elements: int | None = None,
) -> RefitPlan:
    """Returns the plan for sending weights from the trainer's holdings (`sources`) to the engines' holdings
    (`destinations`). A holding lists parameters and the ranks that hold copies of them.

    `trainer`, `engine`: the nodes and devices of the trainer ranks and of the engine ranks.
    `bucket_elements`: the maximum number of elements of a message.
    `local_bucket_elements`: the maximum number of elements of a message within a device; by default `bucket_elements`.

    Among the trainer ranks that hold a needed slice, the sender is a rank on the engine rank's device if there is one.
    Otherwise the sender is the least loaded rank on the engine rank's node. If no rank on this node holds the slice,
    the sender is the least loaded of all ranks that hold it.

    Raises ValueError if no trainer rank holds an element that an engine rank needs.
    """
    tensors: dict[str, int] = {}
    send, sending = _table(sources, tensors)
    receive, receiving = _table(destinations, tensors)
    receive, owners = _one_row_per_rank(receive, receiving)
    required = receive.elements
    pairs = _drop_duplicates(_find_overlaps(send, receive), send, sending, owners, trainer, engine)
    _check_all_found(receive, pairs, required, tensors)
    chosen = _choose_senders(pairs, send, sending, owners, trainer, engine)
    needed = _sum_by(owners, required)
    local = np.asarray(trainer.devices)[chosen] == np.asarray(engine.devices)[owners[pairs.receive]]
    held = _sum_by(owners[pairs.receive][local], pairs.elements[local])
    slices = _cut_long(_join_adjacent(_slices(pairs, send, receive, chosen, owners)), bucket_elements)
    on_device = np.asarray(trainer.devices)[slices.source] == np.asarray(engine.devices)[slices.destination]
    buckets = tuple(_buckets(slices, ~on_device, bucket_elements))
    local_buckets = tuple(_buckets(slices, on_device, local_bucket_elements or bucket_elements))
    return RefitPlan(slices, buckets, local_buckets, needed, held)


@dataclass(frozen=True)
class _Table(_Columns):
    """A table of 2-D slices of parameters, stored as columns: each array has one entry per slice."""

    tensor: Column
    row: Column
    column: Column
    rows: Column
    columns: Column
    at_row: Column
    at_column: Column
    parameter: Column
    holding: Column
    names: tuple[str, ...]

    @property
    def elements(self) -> Column:
        return self.rows * self.columns


def _table(holdings: Iterable[Holding], tensors: dict[str, int]) -> tuple[_Table, list[tuple[int, ...]]]:
    """Returns (table of the 2-D slices of all holdings, list of the ranks of each holding). A holding lists parameters
    and the ranks that hold copies of them.

    `tensors`: tensor name -> index. Tensors that are not in this dict yet are added.
    """
    names: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    holders = []
    for number, holding in enumerate(holdings):
        holders.append(holding.ranks)
        for name, rect in holding.parameters:
            parameter = names.setdefault(name, len(names))
            rows.append((tensors.setdefault(rect.tensor, len(tensors)), *rect[1:], parameter, number))
    if not rows:
        raise ValueError("no parameters: nothing to plan")
    return _Table(*np.array(rows, dtype=np.int64).T, names=tuple(names)), holders


def _one_row_per_rank(table: _Table, holders: Sequence[tuple[int, ...]]) -> tuple[_Table, Column]:
    """Returns (a table in which each 2-D slice is repeated once for each rank that holds it, the rank of each row of
    this table). `holders`: the ranks of each holding (list of parameters with the same ranks).
    """
    copies = np.array([len(r) for r in holders], dtype=np.int64)[table.holding]
    index = np.repeat(np.arange(len(copies)), copies)
    which = np.arange(len(index)) - np.repeat(np.cumsum(copies) - copies, copies)
    width = max(len(r) for r in holders)
    grid = np.array([[*r, *[-1] * (width - len(r))] for r in holders], dtype=np.int64)
    return table.take(index), grid[table.holding[index], which]


@dataclass(frozen=True)
class _Pairs(_Columns):
    """A table of pairs, stored as columns. A pair is a 2-D slice that a trainer rank holds, and an overlapping slice
    that an engine rank needs.
    """

    send: Column  # row indices in the sending table
    receive: Column  # row indices in the receiving table
    row: Column  # position of the overlap in the Hugging Face tensor
    column: Column
    rows: Column
    columns: Column

    @property
    def elements(self) -> Column:
        return self.rows * self.columns


def _find_overlaps(send: _Table, receive: _Table) -> _Pairs:
    """Returns every overlap between a 2-D slice of `send` (trainer) and a 2-D slice of `receive` (engines)."""
    order = np.argsort(send.tensor, kind="stable")
    keys = send.tensor[order]
    low, high = np.searchsorted(keys, receive.tensor, "left"), np.searchsorted(keys, receive.tensor, "right")
    counts = high - low
    r = np.repeat(np.arange(len(counts)), counts)
    s = order[np.arange(len(r)) - np.repeat(np.cumsum(counts) - counts, counts) + low[r]]
    top, left = np.maximum(send.row[s], receive.row[r]), np.maximum(send.column[s], receive.column[r])
    bottom = np.minimum(send.row[s] + send.rows[s], receive.row[r] + receive.rows[r])
    right = np.minimum(send.column[s] + send.columns[s], receive.column[r] + receive.columns[r])
    index = np.flatnonzero((bottom > top) & (right > left))
    return _Pairs(s[index], r[index], top[index], left[index], (bottom - top)[index], (right - left)[index])


def _drop_duplicates(
    pairs: _Pairs,
    send: _Table,
    holders: Sequence[tuple[int, ...]],
    owners: Column,
    trainer: RankPlacement,
    engine: RankPlacement,
) -> _Pairs:
    """Returns the pairs (overlaps of a sent and a received 2-D slice) without duplicates. Of pairs that deliver the
    same elements, keeps the pair with the nearest sender.

    Duplicates occur if all tensor-parallel ranks hold the same part, and for a tied embedding, which the trainer may
    hold under two names.
    """
    holdings, destinations = send.holding[pairs.send], owners[pairs.receive]
    width = len(engine.nodes)
    keys, inverse = np.unique(holdings * width + destinations, return_inverse=True)
    nearest_senders = [_nearest(holders[key // width], key % width, trainer, engine)[0] for key in keys.tolist()]
    nearest = np.array(nearest_senders, dtype=np.int64)[inverse]
    order = np.lexsort([nearest, pairs.column, pairs.row, pairs.receive])
    same = [np.concatenate([[False], c[order][1:] == c[order][:-1]]) for c in (pairs.column, pairs.row, pairs.receive)]
    return pairs.take(np.sort(order[~(same[0] & same[1] & same[2])]))


def _nearest(
    holders: Sequence[int], destination: int, trainer: RankPlacement, engine: RankPlacement
) -> tuple[int, Sequence[int]]:
    """Finds the trainer ranks among `holders` that are nearest to the engine rank `destination`. Returns (distance,
    ranks). The distance is 0 for the same device, 1 for the same node, otherwise 2.

    Returns one rank for distance 0, and all ranks at the distance otherwise. The order of the ranks depends on the
    destination, so that different destinations prefer different ranks.
    """
    turned = [holders[(i + destination) % len(holders)] for i in range(len(holders))]
    same_device = [r for r in turned if trainer.devices[r] == engine.devices[destination]]
    if same_device:
        return 0, same_device[:1]
    same_node = [r for r in turned if trainer.nodes[r] == engine.nodes[destination]]
    return (1, same_node) if same_node else (2, turned)


def _check_all_found(receive: _Table, pairs: _Pairs, required: Column, tensors: Mapping[str, int]) -> None:
    """Raises ValueError unless the trainer holds every element that the engines need."""
    held = np.bincount(pairs.receive, weights=pairs.elements, minlength=len(required)).astype(np.int64)
    bad = np.flatnonzero(held != required)
    if len(bad):
        names = list(tensors)
        first = bad[0]
        raise ValueError(
            f"{len(bad)} rectangles of the engines are not held by the trainer, e.g. "
            f"{names[receive.tensor[first]]} from row {receive.row[first]}: {held[first]} of {required[first]} elements"
        )


def _choose_senders(
    pairs: _Pairs,
    send: _Table,
    holders: Sequence[tuple[int, ...]],
    owners: Column,
    trainer: RankPlacement,
    engine: RankPlacement,
) -> Column:
    """Returns the sending rank of every pair (overlap of a sent and a received 2-D slice). Senders are chosen greedily,
    for the largest pairs first.
    """
    load = [0] * len(trainer.nodes)
    senders = np.empty(len(pairs.send), dtype=np.int64)
    holdings, destinations = send.holding[pairs.send].tolist(), owners[pairs.receive].tolist()
    sizes = pairs.elements.tolist()
    nearest: dict[tuple[int, int], tuple[int, Sequence[int]]] = {}
    for i in np.argsort(-pairs.elements, kind="stable").tolist():
        key = holdings[i], destinations[i]
        if key not in nearest:
            nearest[key] = _nearest(holders[key[0]], key[1], trainer, engine)
        distance, candidates = nearest[key]
        best = candidates[0] if len(candidates) == 1 else min(candidates, key=load.__getitem__)
        senders[i] = best
        if distance:
            load[best] += sizes[i]
    return senders


def _sum_by(keys: Column, values: Column) -> dict[int, int]:
    """Returns {key: sum of the values with this key}."""
    return {key: int(values[keys == key].sum()) for key in np.unique(keys).tolist()}


def _slices(pairs: _Pairs, send: _Table, receive: _Table, chosen: Column, owners: Column) -> Slices:
    """Returns the 2-D slices to copy, sorted by source and destination, from the pairs of overlapping slices."""
    s, r = pairs.send, pairs.receive
    slices = Slices(
        source=chosen,
        destination=owners[r],
        source_parameter=send.parameter[s],
        destination_parameter=receive.parameter[r],
        source_row=send.at_row[s] + pairs.row - send.row[s],
        source_column=send.at_column[s] + pairs.column - send.column[s],
        row=receive.at_row[r] + pairs.row - receive.row[r],
        column=receive.at_column[r] + pairs.column - receive.column[r],
        rows=pairs.rows,
        columns=pairs.columns,
        source_names=send.names,
        destination_names=receive.names,
    )
    keys = ("column", "row", "destination_parameter", "source_parameter", "destination", "source")
    return slices.take(np.lexsort([getattr(slices, key) for key in keys]))


def _join_adjacent(slices: Slices) -> Slices:
    """Joins slices that are adjacent in both the source and the destination parameter.

    Examples are the q, k and v projections of one group of heads, and the gate and up projections of an MLP.
    """
    n = slices
    alike = (n.source, n.destination, n.source_parameter, n.destination_parameter, n.source_column, n.column, n.columns)
    same = np.ones(len(n), dtype=bool)
    for column in alike:
        same &= np.concatenate([[False], column[1:] == column[:-1]])
    follows = [np.concatenate([[False], c[1:] == c[:-1] + n.rows[:-1]]) for c in (n.source_row, n.row)]
    starts = np.flatnonzero(~(same & follows[0] & follows[1]))
    return n.take(starts, rows=np.add.reduceat(n.rows, starts) if len(n) else n.rows)


def _cut_long(slices: Slices, limit: int) -> Slices:
    """Splits slices of more than `limit` elements by rows. Each part has as many rows as fit into `limit` elements, but
    at least one row.
    """
    fitting = np.maximum(1, limit // slices.columns)
    parts = -(-slices.rows // fitting)
    which = np.repeat(np.arange(len(slices)), parts)
    first = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * fitting[which]
    return slices.take(
        which,
        source_row=slices.source_row[which] + first,
        row=slices.row[which] + first,
        rows=np.minimum(fitting[which], slices.rows[which] - first),
    )


def _buckets(slices: Slices, sent: NDArray[np.bool_], limit: int) -> list[RefitBucket]:
    """Packs the `sent` slices into messages of up to `limit` elements, and assigns a round to each message.

    A single row with more than `limit` elements is sent as a separate message.
    """
    messages: list[tuple[int, int, int, int, int]] = []  # columns: source, destination, first, last, elements
    elements, source, destination = slices.elements.tolist(), slices.source.tolist(), slices.destination.tolist()
    for i in np.flatnonzero(sent).tolist():
        if messages:
            s, d, first, last, size = messages[-1]
            if (s, d, last) == (source[i], destination[i], i) and size + elements[i] <= limit:
                messages[-1] = (s, d, first, i + 1, size + elements[i])
                continue
        messages.append((source[i], destination[i], i, i + 1, elements[i]))
    return _assign_rounds(messages)


def _assign_rounds(messages: Sequence[tuple[int, int, int, int, int]]) -> list[RefitBucket]:
    """Assigns to each message the first round in which its source and its destination are free. Messages of the ranks
    with the most traffic are assigned first.
    """
    waiting: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    for message in messages:
        waiting.setdefault(message[:2], []).append(message)
    left_out: dict[int, int] = {}
    left_in: dict[int, int] = {}
    for (s, d), queue in waiting.items():
        left_out[s] = left_out.get(s, 0) + len(queue)
        left_in[d] = left_in.get(d, 0) + len(queue)
    buckets, round_number = [], 0
    while waiting:
        order = [(-max(left_out[s], left_in[d]), (d - s) % (len(left_out) + 1), s, d) for s, d in waiting]
        heapq.heapify(order)
        busy_out: set[int] = set()
        busy_in: set[int] = set()
        while order:
            _, _, s, d = heapq.heappop(order)
            if s in busy_out or d in busy_in:
                continue
            busy_out.add(s)
            busy_in.add(d)
            message = waiting[s, d].pop(0)
            buckets.append(RefitBucket(round_number, *message))
            left_out[s] -= 1
            left_in[d] -= 1
            if not waiting[s, d]:
                del waiting[s, d]
        round_number += 1
    return buckets
