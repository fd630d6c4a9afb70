"""One rank's part of a planned refit: packs and sends what it has, receives and lands what it needs, and checks what landed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from megatron_rl.refit import delta
from megatron_rl.refit.base import Deadline, Mismatch, Parameters, Part, Readable, Transport, TransportError
from megatron_rl.weights.reshard import Bucket, Plan

Verify = Literal["off", "sample", "full"]
SAMPLED = 16  # one slice of so many is checked with verify = sample
CHECK = 8  # bytes of a checksum
PROBE_BYTES = 256 << 20  # of raw messages, of all ranks together, to know what the links give
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Route = Callable[[int, int], tuple[Transport, int]]  # (source, destination) -> (transport, number of the other side in it)


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


class _Move(NamedTuple):
    """A slice of a bucket."""

    source_name: str
    source: Part
    destination_name: str
    destination: Part


class _Message(NamedTuple):
    number: int  # of the bucket in the plan
    bucket: Bucket
    moves: list[_Move]


class Exchange:
    """Made once for a plan and used for every refit under it. `pulse` of an engine rank changes while that waits for messages."""

    def __init__(
        self, plan: Plan, end: End, route: Route, *, dtype: torch.dtype, pulse: Callable[[int], Any] = lambda destination: None
    ) -> None:  # fmt: skip
        self._end, self._route, self._dtype, self._pulse = end, route, dtype, pulse
        local = [(n, b) for n, b in enumerate(plan.local, len(plan.buckets))]
        inside = [(n, b) for n, b in local if b.source == end.source and b.destination == end.destination]
        self._inside = [_message(plan, n, b) for n, b in inside]
        sent = [*enumerate(plan.buckets)]
        self._turns = _turns(plan, [x for x in local if x not in inside], end) + _turns(plan, sent, end)
        self._probed = _turns(plan, sent[: _first_turns(plan, PROBE_BYTES // dtype.itemsize)], end)
        self._last: dict[int, tuple[int, Tensor]] = {}  # bucket -> (version, values sent)

    def run(self, order: Order, deadline: Deadline, out: Outcome) -> None:
        """Moves the weights, and fills `out`. A rank that does not answer is noted there and left out from then on."""
        start = time.perf_counter()
        if not order.keeps:
            self._last.clear()
        for message in self._inside:
            self._copy(message, order, out)
        waiting: list[Callable[[], None]] = []
        for sending, receiving in self._turns:
            begun = self._begin(sending, receiving, order, deadline, out)
            _finish(waiting)
            waiting = begun
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
        for move in message.moves:
            targets.write(move.destination_name, move.destination, sources.read(move.source_name, move.source).to(self._dtype))
        out.local += message.bucket.elements * self._dtype.itemsize
        checked = _checked(message, order)
        out.checked += len(checked)
        sums = torch.tensor([checksum(sources.read(m.source_name, m.source), self._dtype) for m in checked], dtype=torch.int64)
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
        begun = {start: start() for _, start in sorted(steps, key=lambda s: s[0])}  # both sides of a pair in one order: NCCL needs it
        return [begun[start] for _, start in reversed(steps)]  # what comes is taken first: the other side waits for that

    def _send(self, message: _Message, order: Order, deadline: Deadline, out: Outcome) -> Callable[[], None]:
        bucket, width = message.bucket, self._dtype.itemsize
        base, size = order.base.get(bucket.destination), bucket.elements * width
        checked = _checked(message, order)
        head = delta.HEADER if base is not None else 0
        label = f"bucket {message.number} of refit {order.version}, rank {bucket.source} to engine rank {bucket.destination},"
        try:
            transport, peer = self._route(bucket.source, bucket.destination)
            whole = transport.buffer(head + size + CHECK * len(checked), self._end.device)
            values = self._pack(message, whole[head : head + size])
            begun = time.perf_counter()
            end = self._encode(message.number, values, base, whole) if head else size
            if order.keeps:
                self._last[message.number] = (order.version, values.clone())
                out.delta_seconds += time.perf_counter() - begun
            self._put_checksums(checked, whole[end : end + CHECK * len(checked)])
            handle = transport.send(peer, label, whole[: end + CHECK * len(checked)], told=base is None)
        except TransportError as error:
            out.lost_destinations[bucket.destination] = str(error)
            return lambda: None
        out.full += size
        out.sent += end

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
        size = bucket.elements * self._dtype.itemsize + CHECK * len(checked)
        label = f"bucket {message.number} of refit {order.version}, rank {bucket.source} to engine rank {bucket.destination},"
        transport, peer = self._route(bucket.source, bucket.destination)
        handle = transport.receive(peer, label, size if told else None, self._end.device)

        def finish() -> None:
            if bucket.source in out.lost_sources:
                return
            try:
                whole = handle.wait(deadline).to(self._end.device)
                self._land(message, whole, told, checked, out)
            except TransportError as error:
                out.lost_sources.setdefault(bucket.source, str(error))
            except ValueError as error:
                out.lost_sources.setdefault(bucket.source, f"{label} {error}")
            except Mismatch as error:
                out.mismatch = out.mismatch or str(error)
            else:
                _settle(self._end.device)  # the other side writes there next
                handle.release()

        return finish

    def _land(self, message: _Message, whole: Tensor, told: bool, checked: Sequence[_Move], out: Outcome) -> None:
        assert self._end.targets is not None
        end = len(whole) - CHECK * len(checked)
        body = whole[:end]
        if told:
            values = body.view(self._dtype)
        else:
            begun = time.perf_counter()
            present = torch.empty(message.bucket.elements, dtype=self._dtype, device=self._end.device)
            _gather(self._end.targets, [(m.destination_name, m.destination) for m in message.moves], present)
            values = delta.decode(body, present.view(_INTEGERS[self._dtype.itemsize])).view(self._dtype)
            out.delta_seconds += time.perf_counter() - begun
        place = 0
        for move in message.moves:
            count = move.destination.rows * move.destination.columns
            part = values[place : place + count].view(move.destination.rows, move.destination.columns)
            self._end.targets.write(move.destination_name, move.destination, part)
            place += count
        out.received += end
        out.checked += len(checked)
        self._compare(checked, whole[end:], message.bucket)

    def _pack(self, message: _Message, buffer: Tensor) -> Tensor:
        """The bucket's values, in place in `buffer`, as integers of their width."""
        assert self._end.sources is not None
        aligned = buffer.storage_offset() % self._dtype.itemsize == 0
        values = buffer.view(self._dtype) if aligned else torch.empty(message.bucket.elements, dtype=self._dtype, device=buffer.device)
        _gather(self._end.sources, [(m.source_name, m.source) for m in message.moves], values)
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


def _gather(parameters: Readable, parts: Sequence[tuple[str, Part]], out: Tensor) -> None:
    """Writes the parts one after the other into `out` [elements], cast to its dtype."""
    place = 0
    for name, part in parts:
        count = part.rows * part.columns
        out[place : place + count].view(part.rows, part.columns).copy_(parameters.read(name, part))
        place += count


def _checked(message: _Message, order: Order) -> list[_Move]:
    """Which slices carry a checksum; other ones in every refit."""
    if order.verify == "off":
        return []
    if order.verify == "full":
        return message.moves
    return message.moves[(order.version + message.number) % min(SAMPLED, len(message.moves)) :: SAMPLED]


def _turns(plan: Plan, buckets: Sequence[tuple[int, Bucket]], end: End) -> list[tuple[_Message | None, _Message | None]]:
    """(what this rank sends, what it receives) in every round that it has a part in."""
    found: dict[int, list[_Message | None]] = {}
    for number, bucket in buckets:
        for side, mine in enumerate((bucket.source == end.source, bucket.destination == end.destination)):
            if mine:
                found.setdefault(bucket.turn, [None, None])[side] = _message(plan, number, bucket)
    return [(found[turn][0], found[turn][1]) for turn in sorted(found)]


def _first_turns(plan: Plan, elements: int) -> int:
    """Number of buckets in the first rounds that have more than so many elements together, or in all."""
    total = 0
    for number, bucket in enumerate(plan.buckets):
        if total > elements and bucket.turn != plan.buckets[number - 1].turn:
            return number
        total += bucket.elements
    return len(plan.buckets)


def _message(plan: Plan, number: int, bucket: Bucket) -> _Message:
    s, part = plan.slices, slice(bucket.first, bucket.last)
    columns = (s.source_parameter, s.source_row, s.source_column, s.destination_parameter, s.row, s.column, s.rows, s.columns)
    moves = []
    for source, source_row, source_column, destination, row, column, rows, width in zip(*(c[part].tolist() for c in columns), strict=True):
        moves.append(
            _Move(
                s.source_names[source], Part(source_row, source_column, rows, width),
                s.destination_names[destination], Part(row, column, rows, width),
            )
        )  # fmt: skip
    return _Message(number, bucket, moves)


def _settle(device: torch.device) -> None:
    """What was started on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _finish(waiting: Sequence[Callable[[], None]]) -> None:
    for finish in waiting:
        finish()
