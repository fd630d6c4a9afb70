"""The plan of a refit: for every rectangle that an engine rank needs, which trainer rank sends which part of which parameter.

Computed from the two layouts' rectangles alone, so that every rank comes to the same plan by itself. Every element that an engine
rank needs is sent to it once, by a rank that holds it: nothing is gathered on the way.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_rl.weights.layouts import Holding

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """Where ranks run. The same device: nothing is sent. The same node: it stays off the network."""

    nodes: Sequence[int]  # of each rank
    devices: Sequence[int]  # of each rank, numbered through over all nodes


@dataclass(frozen=True)
class Slices:
    """Rectangles to copy, one per entry of every column; sorted by source, then destination.

    source_parameter[source_row : + rows, source_column : + columns] goes to destination_parameter[row : + rows, column : + columns].
    Parameters are numbers into `source_names` and `destination_names`.
    """

    source: Column  # trainer rank
    destination: Column  # engine rank
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
        return self.rows * self.columns

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Bucket:
    """Slices [first, last) of one (source, destination), sent in one message in round `turn`."""

    turn: int
    source: int
    destination: int
    first: int
    last: int
    elements: int


@dataclass(frozen=True)
class Plan:
    slices: Slices
    buckets: tuple[Bucket, ...]  # by round; in a round a rank sends at most one and receives at most one
    local: tuple[Bucket, ...]  # of a source and a destination on the same device, by round of their own
    needed: Mapping[int, int]  # engine rank -> elements it must have (padding aside)
    held: Mapping[int, int]  # engine rank -> elements of these that lie on its own device before

    @property
    def lower_bound(self) -> int:
        """Elements that no plan can avoid sending."""
        return sum(self.needed.values()) - sum(self.held.values())

    @property
    def sent(self) -> int:
        """Elements that this plan sends from device to device."""
        return sum(bucket.elements for bucket in self.buckets)


def plan(
    sources: Iterable[Holding],
    destinations: Iterable[Holding],
    *,
    trainer: Places,
    engine: Places,
    bucket_elements: int = 64 << 20,
) -> Plan:
    """The plan between two sets of holdings.

    Of the ranks that hold a needed part, one on the same device is taken, else the least loaded of the same node, else the least
    loaded of all. Raises ValueError when nobody holds something that an engine rank needs.
    """
    tensors: dict[str, int] = {}
    send, sending = _table(sources, tensors)
    receive, receiving = _table(destinations, tensors)
    receive, owners = _one_row_per_rank(receive, receiving)
    wanted = receive.elements
    pairs = _once(_overlaps(send, receive), send, sending, owners, trainer, engine)
    _check_all_found(receive, pairs, wanted, tensors)
    chosen = _choose(pairs, send, sending, owners, trainer, engine)
    needed = _sum_by(owners, wanted)
    local = np.asarray(trainer.devices)[chosen] == np.asarray(engine.devices)[owners[pairs.receive]]
    held = _sum_by(owners[pairs.receive][local], pairs.elements[local])
    slices = _cut(_merge(_slices(pairs, send, receive, chosen, owners)), bucket_elements)
    on_device = np.asarray(trainer.devices)[slices.source] == np.asarray(engine.devices)[slices.destination]
    buckets = [tuple(_buckets(slices, chosen, bucket_elements)) for chosen in (~on_device, on_device)]
    return Plan(slices, buckets[0], buckets[1], needed, held)


@dataclass(frozen=True)
class _Table:
    """Rectangles as columns."""

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

    def take(self, index: Column) -> _Table:
        columns = {name: getattr(self, name)[index] for name in self.__dataclass_fields__ if name != "names"}
        return _Table(**columns, names=self.names)


def _table(holdings: Iterable[Holding], tensors: dict[str, int]) -> tuple[_Table, list[tuple[int, ...]]]:
    """-> (all rectangles, ranks of each holding). Numbers `tensors` as they come."""
    names: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    ranks = []
    for number, holding in enumerate(holdings):
        ranks.append(holding.ranks)
        for name, rect in holding.parameters:
            parameter = names.setdefault(name, len(names))
            rows.append((tensors.setdefault(rect.tensor, len(tensors)), *rect[1:], parameter, number))
    if not rows:
        raise ValueError("no parameters: nothing to plan")
    return _Table(*np.array(rows, dtype=np.int64).T, names=tuple(names)), ranks


def _one_row_per_rank(table: _Table, ranks: Sequence[tuple[int, ...]]) -> tuple[_Table, Column]:
    """Repeats the rectangles of each holding for each of its ranks -> (table, the rank of each row)."""
    copies = np.array([len(r) for r in ranks], dtype=np.int64)[table.holding]
    index = np.repeat(np.arange(len(copies)), copies)
    which = np.arange(len(index)) - np.repeat(np.cumsum(copies) - copies, copies)
    width = max(len(r) for r in ranks)
    grid = np.array([[*r, *[-1] * (width - len(r))] for r in ranks], dtype=np.int64)
    return table.take(index), grid[table.holding[index], which]


@dataclass(frozen=True)
class _Pairs:
    """Overlaps of a sent and a received rectangle."""

    send: Column  # row of the sending table
    receive: Column  # row of the receiving table
    row: Column  # of the tensor
    column: Column
    rows: Column
    columns: Column

    @property
    def elements(self) -> Column:
        return self.rows * self.columns


def _overlaps(send: _Table, receive: _Table) -> _Pairs:
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


def _once(
    pairs: _Pairs, send: _Table, ranks: Sequence[tuple[int, ...]], owners: Column, trainer: Places, engine: Places
) -> _Pairs:  # fmt: skip
    """Of pairs that bring the same part (what all tensor-parallel ranks hold alike, a tied embedding under its second name) the
    nearest one."""
    holdings, destinations = send.holding[pairs.send], owners[pairs.receive]
    width = len(engine.nodes)
    keys, inverse = np.unique(holdings * width + destinations, return_inverse=True)
    near = np.array(
        [_distance(ranks[key // width], key % width, trainer, engine) for key in keys.tolist()], dtype=np.int64
    )[inverse]
    order = np.lexsort([near, pairs.column, pairs.row, pairs.receive])
    same = [np.concatenate([[False], c[order][1:] == c[order][:-1]]) for c in (pairs.column, pairs.row, pairs.receive)]
    index = np.sort(order[~(same[0] & same[1] & same[2])])
    return _Pairs(*(getattr(pairs, name)[index] for name in pairs.__dataclass_fields__))


def _distance(ranks: Sequence[int], destination: int, trainer: Places, engine: Places) -> int:
    """0: one of `ranks` is on the destination's device; 1: on its node; 2: neither."""
    if any(trainer.devices[r] == engine.devices[destination] for r in ranks):
        return 0
    return 1 if any(trainer.nodes[r] == engine.nodes[destination] for r in ranks) else 2


def _check_all_found(receive: _Table, pairs: _Pairs, wanted: Column, tensors: Mapping[str, int]) -> None:
    found = np.bincount(pairs.receive, weights=pairs.elements, minlength=len(wanted)).astype(np.int64)
    bad = np.flatnonzero(found != wanted)
    if len(bad):
        names = list(tensors)
        first = bad[0]
        raise ValueError(
            f"{len(bad)} rectangles of the engines are not held by the trainer, e.g. {names[receive.tensor[first]]} from row "
            f"{receive.row[first]}: {found[first]} of {wanted[first]} elements"
        )


def _choose(
    pairs: _Pairs, send: _Table, ranks: Sequence[tuple[int, ...]], owners: Column, trainer: Places, engine: Places
) -> Column:  # fmt: skip
    """The sending rank of every pair; the largest pairs choose first."""
    load = [0] * len(trainer.nodes)
    out = np.empty(len(pairs.send), dtype=np.int64)
    holdings, destinations = send.holding[pairs.send].tolist(), owners[pairs.receive].tolist()
    sizes = pairs.elements.tolist()
    near: dict[tuple[int, int], tuple[bool, tuple[int, ...]]] = {}
    for i in np.argsort(-pairs.elements, kind="stable").tolist():
        key = holdings[i], destinations[i]
        if key not in near:
            near[key] = _nearest(ranks[key[0]], key[1], trainer, engine)
        free, candidates = near[key]
        best = candidates[0] if len(candidates) == 1 else min(candidates, key=load.__getitem__)
        out[i] = best
        if not free:
            load[best] += sizes[i]
    return out


def _nearest(ranks: Sequence[int], destination: int, trainer: Places, engine: Places) -> tuple[bool, tuple[int, ...]]:
    """(whether nothing is sent, the candidates that are equally near), in an order that differs between destinations."""
    turned = [ranks[(i + destination) % len(ranks)] for i in range(len(ranks))]
    same_device = [r for r in turned if trainer.devices[r] == engine.devices[destination]]
    if same_device:
        return True, tuple(same_device[:1])
    return False, tuple([r for r in turned if trainer.nodes[r] == engine.nodes[destination]] or turned)


def _sum_by(keys: Column, values: Column) -> dict[int, int]:
    totals: dict[int, int] = {}
    for key in np.unique(keys).tolist():
        totals[key] = int(values[keys == key].sum())
    return totals


def _slices(pairs: _Pairs, send: _Table, receive: _Table, chosen: Column, owners: Column) -> Slices:
    s, r = pairs.send, pairs.receive
    columns = dict(
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
    )
    order = np.lexsort(
        [
            columns[name]
            for name in ("column", "row", "destination_parameter", "source_parameter", "destination", "source")
        ]
    )
    return Slices(
        **{name: c[order] for name, c in columns.items()}, source_names=send.names, destination_names=receive.names
    )


def _merge(slices: Slices) -> Slices:
    """Joins slices that follow each other in both parameters (q, k and v of one group; gate and up)."""
    n = slices
    same = np.ones(len(n), dtype=bool)
    for column in (
        n.source,
        n.destination,
        n.source_parameter,
        n.destination_parameter,
        n.source_column,
        n.column,
        n.columns,
    ):
        same &= np.concatenate([[False], column[1:] == column[:-1]])
    follows = [np.concatenate([[False], c[1:] == c[:-1] + n.rows[:-1]]) for c in (n.source_row, n.row)]
    starts = np.flatnonzero(~(same & follows[0] & follows[1]))
    columns = {name: getattr(n, name)[starts] for name in n.__dataclass_fields__ if not name.endswith("names")}
    columns["rows"] = np.add.reduceat(n.rows, starts) if len(n) else n.rows
    return Slices(**columns, source_names=n.source_names, destination_names=n.destination_names)


def _cut(slices: Slices, limit: int) -> Slices:
    """Cuts slices of more than `limit` elements by rows, into parts of as many rows as fit (at least one)."""
    fitting = np.maximum(1, limit // slices.columns)
    parts = -(-slices.rows // fitting)
    which = np.repeat(np.arange(len(slices)), parts)
    first = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * fitting[which]
    columns = {name: getattr(slices, name)[which] for name in slices.__dataclass_fields__ if not name.endswith("names")}
    columns |= {"source_row": columns["source_row"] + first, "row": columns["row"] + first}
    columns["rows"] = np.minimum(fitting[which], columns["rows"] - first)
    return Slices(**columns, source_names=slices.source_names, destination_names=slices.destination_names)


def _buckets(slices: Slices, sent: NDArray[np.bool_], limit: int) -> list[Bucket]:
    """Fills messages of the `sent` slices up to `limit` elements (a longer row goes alone), each in the first round with both ends free,
    the busiest ends choosing first."""
    messages: list[tuple[int, int, int, int, int]] = []  # source, destination, first, last, elements
    elements, source, destination = slices.elements.tolist(), slices.source.tolist(), slices.destination.tolist()
    for i in np.flatnonzero(sent).tolist():
        if messages:
            s, d, first, last, size = messages[-1]
            if (s, d, last) == (source[i], destination[i], i) and size + elements[i] <= limit:
                messages[-1] = (s, d, first, i + 1, size + elements[i])
                continue
        messages.append((source[i], destination[i], i, i + 1, elements[i]))
    return _rounds(messages)


def _rounds(messages: Sequence[tuple[int, int, int, int, int]]) -> list[Bucket]:
    waiting: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    for message in messages:
        waiting.setdefault(message[:2], []).append(message)
    left_out: dict[int, int] = {}
    left_in: dict[int, int] = {}
    for (s, d), queue in waiting.items():
        left_out[s] = left_out.get(s, 0) + len(queue)
        left_in[d] = left_in.get(d, 0) + len(queue)
    out, turn = [], 0
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
            out.append(Bucket(turn, *message))
            left_out[s] -= 1
            left_in[d] -= 1
            if not waiting[s, d]:
                del waiting[s, d]
        turn += 1
    return out
