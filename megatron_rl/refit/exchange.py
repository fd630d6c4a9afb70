"""One rank's part of a planned refit: packs and sends what it has, receives and lands what it needs, and checks what landed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from megatron_rl.refit import delta
from megatron_rl.refit.base import (
    WORD,
    Deadline,
    Mismatch,
    Parameters,
    Part,
    Reachable,
    Readable,
    Tensors,
    Transport,
    TransportError,
    words,
)
from megatron_rl.weights.reshard import Bucket, Plan

Verify = Literal["off", "sample", "full"]
SAMPLED = 16  # one slice of so many is checked with verify = sample
CHECK = 8  # bytes of a checksum
LONG = 1 << 20  # bytes from which on what lies in one piece travels alone, where that spares copying it
PART = 1 << 16  # bytes from which on its parts do too, where pieces join on their way
PROBE_BYTES = 256 << 20  # of raw messages, of all ranks together, to know what the links give
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Route = Callable[
    [int, int], tuple[Transport, int]
]  # (source, destination) -> (transport, number of the other side in it)


@dataclass(frozen=True, kw_only=True)
class End:
    """What this rank is in the plan: a source, a destination, or both."""

    source: int | None = None
    sources: Readable | None = None
    destination: int | None = None
    targets: Parameters | None = None
    device: torch.device = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be done in one refit; the same for all ranks."""

    version: int
    verify: Verify = "sample"
    base: dict[int, int] = field(default_factory=dict)  # destination -> version that it holds and changes may build on
    keeps: bool = False  # what is sent, to find changes against it the next time


@dataclass(kw_only=True)
class Outcome:
    """What a rank did. `lost`: ranks that a message did not reach or come from."""

    sent: int = 0  # bytes
    full: int = 0  # bytes that `sent` would be without deltas
    received: int = 0
    local: int = 0
    checked: int = 0  # slices
    delta_seconds: float = 0.0  # of finding changes and putting them in
    seconds: float = 0.0
    lost_destinations: dict[int, str] = field(default_factory=dict)
    lost_sources: dict[int, str] = field(default_factory=dict)
    mismatch: str | None = None


_Place = tuple[str, Part]


class _Move(NamedTuple):
    """A slice of a bucket."""

    source_name: str
    source: Part
    destination_name: str
    destination: Part


class _Run(NamedTuple):
    """Slices that follow each other in a destination parameter."""

    moves: list[_Move]
    name: str
    part: Part  # all of it

    @property
    def sources(self) -> list[_Place]:
        return [(move.source_name, move.source) for move in self.moves]


class _Message(NamedTuple):
    number: int  # of the bucket in the plan
    bucket: Bucket
    moves: list[_Move]
    runs: list[_Run]

    def split(self, pieces: bool, width: int) -> tuple[list[_Run], list[_Run]]:
        """(what travels joined in one message, what travels alone): the same on both sides."""
        alone = [run.part.elements * width >= LONG for run in self.runs] if pieces else [False] * len(self.runs)
        return [run for run, by in zip(self.runs, alone, strict=True) if not by], [
            *itertools.compress(self.runs, alone)
        ]

    def label(self, order: Order) -> str:
        return f"bucket {self.number} of refit {order.version}, rank {self.bucket.source} to engine rank {self.bucket.destination},"


class Exchange:
    """Made once for a plan and used for every refit under it. `pulse` of an engine rank changes while that waits for messages."""

    def __init__(
        self, plan: Plan, end: End, route: Route, *, dtype: torch.dtype, pulse: Callable[[int], Any] = lambda destination: None
    ) -> None:  # fmt: skip
        self._end, self._route, self._dtype, self._pulse = end, route, dtype, pulse
        self._lying, self._landing = (end if isinstance(end, Reachable) else None for end in (end.sources, end.targets))
        width, sent = dtype.itemsize, [*enumerate(plan.buckets)]
        local = [(n, b) for n, b in enumerate(plan.local, len(plan.buckets))]
        inside = [(n, b) for n, b in local if b.source == end.source and b.destination == end.destination]
        self._inside = [_message(plan, n, b, width) for n, b in inside]
        self._turns = _turns(plan, [x for x in local if x not in inside], end, width) + _turns(plan, sent, end, width)
        self._probed = _turns(plan, sent[: _first_turns(plan, PROBE_BYTES // width)], end, width)
        self._last: dict[int, tuple[int, Tensor]] = {}  # bucket -> (version, values sent)

    def run(self, order: Order, deadline: Deadline, out: Outcome) -> None:
        """Moves the weights, and fills `out`. A rank that does not answer is noted there and left out from then on."""
        start = time.perf_counter()
        if not order.keeps:
            self._last.clear()
        waiting: list[Callable[[], None]] = []
        inside, each = iter(self._inside), -(-len(self._inside) // max(1, len(self._turns)))
        for sending, receiving in self._turns:
            begun = self._begin(sending, receiving, order, deadline, out)
            for message in itertools.islice(inside, each):  # while messages are under way
                self._copy(message, order, out)
            _finish(waiting)
            waiting = begun
        for message in inside:  # of a rank that has no part in any turn
            self._copy(message, order, out)
        _finish(waiting)
        _settle(self._end.device)
        out.seconds = time.perf_counter() - start

    def probe(self, deadline: Deadline, out: Outcome) -> tuple[int, float]:
        """Sends messages of the plan's first rounds with nothing in them -> (bytes, seconds): what the link gives. Fills `out.lost_*`."""
        total, waiting, start = 0, list[Callable[[], None]](), time.perf_counter()
        for sending, receiving in self._probed:
            begun = []
            for message, lost in ((receiving, out.lost_sources), (sending, out.lost_destinations)):
                if message is not None:
                    total += message.bucket.elements * self._dtype.itemsize
                    begun.append(self._post(message, message is sending, lost, deadline))
            _finish(waiting)
            waiting = begun
        _finish(waiting)
        return total, time.perf_counter() - start

    def _post(self, message: _Message, out: bool, lost: dict[int, str], deadline: Deadline) -> Callable[[], None]:
        """Starts an empty message of the bucket's size -> what to call to finish it."""
        bucket, size = message.bucket, message.bucket.elements * self._dtype.itemsize
        transport, peer = self._route(bucket.source, bucket.destination)
        other, label = (
            (bucket.destination if out else bucket.source),
            f"a first message, rank {bucket.source} to engine rank {bucket.destination},",
        )
        if out:
            handle = transport.send(peer, label, transport.buffer(size, self._end.device), told=True)
        else:
            handle = transport.receive(peer, label, size, self._end.device)

        def finish() -> None:
            try:
                if other not in lost:
                    handle.wait(replace(deadline, pulse=lambda: self._pulse(bucket.destination)) if out else deadline)
                    handle.release()
            except TransportError as error:
                lost[other] = str(error)

        return finish

    def _copy(self, message: _Message, order: Order, out: Outcome) -> None:
        """Within this process."""
        sources, targets = self._end.sources, self._end.targets
        assert sources is not None and targets is not None
        quick = isinstance(sources, Tensors) and isinstance(targets, Tensors)
        for move in message.moves:
            target = targets.words(move.destination_name, move.destination, self._dtype) if quick else None
            source = sources.words(move.source_name, move.source, self._dtype) if quick else None
            if target is not None and source is not None:
                target[...] = source
            else:
                targets.write(
                    move.destination_name, move.destination, sources.read(move.source_name, move.source).to(self._dtype)
                )
        out.local += message.bucket.elements * self._dtype.itemsize
        checked = _checked(message, order)
        out.checked += len(checked)
        sums = torch.tensor(
            [checksum(sources.read(m.source_name, m.source), self._dtype) for m in checked], dtype=torch.int64
        )
        try:
            self._compare(checked, sums.view(torch.uint8), message.bucket)
        except Mismatch as error:
            out.mismatch = out.mismatch or str(error)

    def _begin(
        self, sending: _Message | None, receiving: _Message | None, order: Order, deadline: Deadline, out: Outcome
    ) -> list[Callable[[], None]]:  # fmt: skip
        """Starts both messages of a turn -> what to call to finish them."""
        steps: list[tuple[int, Callable[[], Callable[[], None]]]] = []
        if sending is not None and sending.bucket.destination not in out.lost_destinations:
            steps.append((sending.bucket.source, lambda: self._send(sending, order, deadline, out)))
        if receiving is not None and receiving.bucket.source not in out.lost_sources:
            steps.append((receiving.bucket.source, lambda: self._receive(receiving, order, deadline, out)))
        begun = {
            start: start() for _, start in sorted(steps, key=lambda s: s[0])
        }  # both sides of a pair in one order: NCCL needs it
        return [
            begun[start] for _, start in reversed(steps)
        ]  # what comes is taken first: the other side waits for that

    def _send(self, message: _Message, order: Order, deadline: Deadline, out: Outcome) -> Callable[[], None]:
        bucket, width, checked = message.bucket, self._dtype.itemsize, _checked(message, order)
        base, sums = order.base.get(bucket.destination), CHECK * len(checked)
        head, size = delta.HEADER if base is not None else 0, bucket.elements * width
        try:
            transport, peer = self._route(bucket.source, bucket.destination)
            joined, alone = message.split(transport.takes_pieces and not head, width)
            whole = transport.buffer(head + size + sums, self._end.device)
            end = head + _elements(joined) * width
            values = self._pack(joined, whole[head:end])
            begun = time.perf_counter()
            if head:
                end = self._encode(message.number, values, base, whole)
            if order.keeps:
                kept = (
                    self._pack(message.runs, torch.empty(size, dtype=torch.uint8, device=values.device))
                    if alone
                    else values.clone()
                )
                self._last[message.number] = (order.version, kept)
                out.delta_seconds += time.perf_counter() - begun
            self._put_checksums(checked, whole[end : end + sums])
            pieces = self._pieces(alone, whole[end + sums :], transport.streams)
            handle = transport.send(peer, message.label(order), whole[: end + sums], told=not head, pieces=pieces)
        except TransportError as error:
            out.lost_destinations[bucket.destination] = str(error)
            return lambda: None
        out.full += size
        out.sent += end if head else size

        def finish() -> None:
            if bucket.destination in out.lost_destinations:
                return
            try:
                handle.wait(replace(deadline, pulse=lambda: self._pulse(bucket.destination)))
            except TransportError as error:
                out.lost_destinations.setdefault(bucket.destination, str(error))
            else:
                handle.release()

        return finish

    def _receive(self, message: _Message, order: Order, deadline: Deadline, out: Outcome) -> Callable[[], None]:
        bucket, checked = message.bucket, _checked(message, order)
        told = order.base.get(bucket.destination) is None
        transport, peer = self._route(bucket.source, bucket.destination)
        joined, alone = message.split(transport.takes_pieces and told, self._dtype.itemsize)
        pieces, loose = [], list[_Run]()
        for run in alone:
            memory = self._landing.memory(run.name, run.part, self._dtype) if self._landing else None
            pieces.append(run.part.elements * self._dtype.itemsize if memory is None else memory)
            loose += [run] if memory is None else []
        size = _elements(joined + loose) * self._dtype.itemsize + CHECK * len(checked)
        handle = transport.receive(peer, message.label(order), size if told else None, self._end.device, pieces=pieces)

        def finish() -> None:
            if bucket.source in out.lost_sources:
                return
            try:
                whole = handle.wait(deadline).to(self._end.device)
                self._land(message, joined, loose, whole, told, checked, out)
            except TransportError as error:
                out.lost_sources.setdefault(bucket.source, str(error))
            except ValueError as error:
                out.lost_sources.setdefault(bucket.source, f"{message.label(order)} {error}")
            except Mismatch as error:
                out.mismatch = out.mismatch or str(error)
            else:
                _settle(self._end.device)  # the other side writes there next
                handle.release()

        return finish

    def _land(
        self, message: _Message, joined: Sequence[_Run], loose: Sequence[_Run], whole: Tensor, told: bool, checked: Sequence[_Move],
        out: Outcome,
    ) -> None:  # fmt: skip
        """`loose`: what came alone, behind the message."""
        assert self._end.targets is not None
        sums, width = CHECK * len(checked), self._dtype.itemsize
        end = _elements(joined) * width if told else len(whole) - sums
        if told:
            values = whole[:end].view(self._dtype)
        else:
            begun = time.perf_counter()
            present = torch.empty(message.bucket.elements, dtype=self._dtype, device=self._end.device)
            _gather(self._end.targets, [(run.name, run.part) for run in joined], present)
            values = delta.decode(whole[:end], present.view(_INTEGERS[width])).view(self._dtype)
            out.delta_seconds += time.perf_counter() - begun
        self._put(joined, values)
        self._put(loose, whole[end + sums :].view(self._dtype) if loose else values)
        out.received += message.bucket.elements * width if told else end
        out.checked += len(checked)
        self._compare(checked, whole[end : end + sums], message.bucket)

    def _put(self, runs: Sequence[_Run], values: Tensor) -> None:
        assert self._end.targets is not None
        place = 0
        for run in runs:
            part = values[place : place + run.part.elements]
            self._end.targets.write(run.name, run.part, part.view(run.part.rows, run.part.columns))
            place += run.part.elements

    def _pieces(self, runs: Sequence[_Run], buffer: Tensor, streams: bool) -> Iterator[Tensor]:
        """Of each run the bytes, where they lie or packed into the buffer, when their turn comes."""
        for run in runs:
            size, found = run.part.elements * self._dtype.itemsize, list[Tensor | None]()
            if self._lying is not None and (len(run.moves) == 1 or (streams and size >= PART * len(run.moves))):
                found = [self._lying.memory(*place, self._dtype) for place in run.sources]
            lying = [piece for piece in found if piece is not None]
            if len(lying) < len(run.moves):
                lying, buffer = [buffer[:size]], buffer[size:]
                self._pack([run], lying[0])
            yield from lying

    def _pack(self, runs: Sequence[_Run], buffer: Tensor) -> Tensor:
        """The values one after the other, in place in `buffer`, as integers of their width."""
        assert self._end.sources is not None
        aligned = buffer.storage_offset() % self._dtype.itemsize == 0
        values = (
            buffer.view(self._dtype)
            if aligned
            else torch.empty(_elements(runs), dtype=self._dtype, device=buffer.device)
        )
        _gather(self._end.sources, [place for run in runs for place in run.sources], values)
        return values.view(_INTEGERS[self._dtype.itemsize])

    def _encode(self, number: int, values: Tensor, base: int | None, whole: Tensor) -> int:
        version, old = self._last.get(number, (None, None))
        return delta.encode(values, old if version == base else None, whole)

    def _put_checksums(self, checked: Sequence[_Move], place: Tensor) -> None:
        if checked:
            assert self._end.sources is not None
            sums = [checksum(self._end.sources.read(m.source_name, m.source), self._dtype) for m in checked]
            place.copy_(torch.tensor(sums, dtype=torch.int64).view(torch.uint8))

    def _compare(self, checked: Sequence[_Move], sums: Tensor, bucket: Bucket) -> None:
        assert self._end.targets is not None
        wanted = sums.cpu().clone().view(torch.int64).tolist()
        for move, want in zip(checked, wanted, strict=True):
            found = checksum(self._end.targets.read(move.destination_name, move.destination), self._dtype)
            if found != want:
                part = move.destination
                raise Mismatch(
                    f"{move.destination_name} of engine rank {bucket.destination}, rows {part.row} to {part.row + part.rows}, is not "
                    f"{move.source_name} of trainer rank {bucket.source}: checksums {found:x} and {want:x} differ"
                )


def checksum(values: Tensor, dtype: torch.dtype) -> int:
    """Of the bytes of `values` in `dtype`, on whatever device: 64 bits (XXH3) as a signed number."""
    flat = values.detach().to(dtype).contiguous().view(-1).view(torch.uint8).cpu()
    number = xxhash.xxh3_64_intdigest(flat.numpy().data)
    return number - (1 << 64) if number >> 63 else number


def _gather(parameters: Readable, parts: Sequence[_Place], out: Tensor) -> None:
    """Writes the parts one after the other into `out` [elements], cast to its dtype."""
    whole, place, dtype, width = words(out[None]), 0, out.dtype, out.element_size()
    cut = parameters.words if isinstance(parameters, Tensors) and whole is not None else None
    for name, part in parts:
        end, source = place + part.rows * part.columns, None if cut is None else cut(name, part, dtype)
        if whole is not None and source is not None and place * width % WORD == 0:
            whole[0, place * width // WORD : end * width // WORD].reshape(source.shape)[...] = source
        else:
            out[place:end].view(part.rows, part.columns).copy_(parameters.read(name, part))
        place = end


def _elements(runs: Sequence[_Run]) -> int:
    return sum(run.part.elements for run in runs)


def _checked(message: _Message, order: Order) -> list[_Move]:
    """Which slices carry a checksum; other ones in every refit."""
    if order.verify == "off":
        return []
    if order.verify == "full":
        return message.moves
    return message.moves[(order.version + message.number) % min(SAMPLED, len(message.moves)) :: SAMPLED]


def _turns(
    plan: Plan, buckets: Sequence[tuple[int, Bucket]], end: End, width: int
) -> list[tuple[_Message | None, _Message | None]]:
    """(what this rank sends, what it receives) in every round that it has a part in."""
    found: dict[int, list[_Message | None]] = {}
    for number, bucket in buckets:
        for side, mine in enumerate((bucket.source == end.source, bucket.destination == end.destination)):
            if mine:
                found.setdefault(bucket.turn, [None, None])[side] = _message(plan, number, bucket, width)
    return [(found[turn][0], found[turn][1]) for turn in sorted(found)]


def _first_turns(plan: Plan, elements: int) -> int:
    """Number of buckets in the first rounds that have more than so many elements together, or in all."""
    total = 0
    for number, bucket in enumerate(plan.buckets):
        if total > elements and bucket.turn != plan.buckets[number - 1].turn:
            return number
        total += bucket.elements
    return len(plan.buckets)


def _message(plan: Plan, number: int, bucket: Bucket, width: int) -> _Message:
    s, part = plan.slices, slice(bucket.first, bucket.last)
    columns = (
        s.source_parameter,
        s.source_row,
        s.source_column,
        s.destination_parameter,
        s.row,
        s.column,
        s.rows,
        s.columns,
    )
    moves = []
    for source, source_row, source_column, destination, row, column, rows, wide in zip(
        *(c[part].tolist() for c in columns), strict=True
    ):
        moves.append(
            _Move(
                s.source_names[source], Part(source_row, source_column, rows, wide),
                s.destination_names[destination], Part(row, column, rows, wide),
            )
        )  # fmt: skip
    runs = _runs(moves, LONG // width)
    return _Message(number, bucket, [move for run in runs for move in run.moves], runs)


def _runs(moves: Sequence[_Move], long: int) -> list[_Run]:
    """Joins slices of fewer than `long` elements that follow each other. A longer one stays by itself: it may lie in one piece in the
    source too."""
    runs: list[_Run] = []
    last: dict[str, int] = {}  # destination parameter -> place in `runs`
    for move in moves:
        part, at = move.destination, last.get(move.destination_name)
        if at is not None and max(part.elements, runs[at].moves[0].destination.elements) < long:
            whole = runs[at].part
            if (whole.row + whole.rows, whole.column, whole.columns) == (part.row, part.column, part.columns):
                runs[at].moves.append(move)
                runs[at] = runs[at]._replace(part=whole._replace(rows=whole.rows + part.rows))
                continue
        last[move.destination_name] = len(runs)
        runs.append(_Run([move], move.destination_name, part))
    return runs


def _settle(device: torch.device) -> None:
    """What was started on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _finish(waiting: Sequence[Callable[[], None]]) -> None:
    for finish in waiting:
        finish()
