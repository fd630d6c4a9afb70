"""Runs one rank's part of a planned refit: packs and sends what it has, receives, writes and checks what it needs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.refit import delta, messages
from megatron_rl.refit.checksums import INTEGERS, Place, checksums
from megatron_rl.refit.messages import (
    CHECKSUM_BYTES,
    BucketMessage,
    NamedPart,
    SliceMove,
    SliceRun,
    Verify,
    elements_of,
)
from megatron_rl.refit.transport import (
    WORD_BYTES,
    Deadline,
    Mismatch,
    Parameters,
    Reachable,
    Readable,
    Tensors,
    Transport,
    TransportError,
    as_words,
)
from megatron_rl.weights.refit_plan import RefitBucket, RefitPlan

ALONE_PART_BYTES = 1 << 16  # slices of at least so many bytes are not packed for a transport that joins pieces
PROBE_BYTES = 256 << 20  # size of the messages, of all ranks together, that measure the links
# (source rank, destination rank) -> (transport, number of the other side in it)
Route = Callable[[int, int], tuple[Transport, int]]


@dataclass(frozen=True, kw_only=True)
class LocalSide:
    """The part of this rank in a plan: a source, a destination, or both."""

    source: int | None = None  # number of this trainer rank
    sources: Readable | None = None  # the parameters that it sends from
    destination: int | None = None  # number of this engine rank
    targets: Parameters | None = None  # the parameters that it receives into
    device: torch.device = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RefitOrder:
    """The instructions for one refit, the same on all ranks."""

    version: int
    verify: Verify = "sample"
    sums_on: Place = "host"  # where checksums are computed
    base: dict[int, int] = field(default_factory=dict)  # destination -> version that it holds, for deltas to build on
    keeps_sent: bool = False  # whether sources keep what they send, to find the changes against it in the next refit


@dataclass(kw_only=True)
class ExchangeOutcome:
    """The result of one rank's part in a refit. Sizes are bytes."""

    sent: int = 0
    full: int = 0  # what `sent` would be without deltas
    received: int = 0
    local: int = 0  # copied within this process
    checked: int = 0  # slices whose checksum was compared
    delta_seconds: float = 0.0  # time that finding changes and applying them took
    seconds: float = 0.0
    lost_destinations: dict[int, str] = field(default_factory=dict)  # rank that a message did not reach -> why
    lost_sources: dict[int, str] = field(default_factory=dict)  # rank from which a message did not come -> why
    mismatch: str | None = None  # the first parameter that holds other values than the source


class Exchange:
    """One rank's exchange of messages under a plan. Made once and used for every refit under that plan."""

    def __init__(
        self,
        plan: RefitPlan,
        side: LocalSide,
        route: Route,
        *,
        dtype: torch.dtype,
        pulse: Callable[[int], Any] = lambda destination: None,
    ) -> None:
        """Prepares this rank's messages.

        `route` gives the transport of a message. `pulse(engine rank)` returns a value that changes while that rank
        waits.
        """
        self._side, self._route, self._dtype, self._pulse = side, route, dtype, pulse
        # What a transport may read from, and write into, without a copy.
        self._readable, self._writable = (
            parameters if isinstance(parameters, Reachable) else None for parameters in (side.sources, side.targets)
        )
        width, sent = dtype.itemsize, [*enumerate(plan.buckets)]
        local = [(n, b) for n, b in enumerate(plan.local, len(plan.buckets))]
        inside = [(n, b) for n, b in local if b.source == side.source and b.destination == side.destination]
        self._inside = [messages.bucket_message(plan, n, b, width) for n, b in inside]
        between = [x for x in local if x not in inside]  # ranks on one device in different processes
        rounds = functools.partial(messages.rounds, plan, source=side.source, destination=side.destination, width=width)
        self._rounds = rounds(between) + rounds(sent)
        self._probed = rounds(sent[: messages.buckets_in_first_rounds(plan, PROBE_BYTES // width)])
        self._last: dict[int, tuple[int, Tensor]] = {}  # bucket -> (version, values sent)

    def run(self, order: RefitOrder, deadline: Deadline, out: ExchangeOutcome) -> None:
        """Moves the weights and fills `out`. A rank that does not answer is noted there and left out from then on."""
        start = time.perf_counter()
        if not order.keeps_sent:
            self._last.clear()
        waiting: list[Callable[[], None]] = []
        inside, each = iter(self._inside), -(-len(self._inside) // max(1, len(self._rounds)))
        for sending, receiving in self._rounds:
            begun = self._start_round(sending, receiving, order, deadline, out)
            for message in itertools.islice(inside, each):  # while messages are on their way
                self._copy_locally(message, order, out)
            _finish(waiting)
            waiting = begun
        for message in inside:  # a rank without any round has all of them left
            self._copy_locally(message, order, out)
        _finish(waiting)
        _synchronize(self._side.device)
        out.seconds = time.perf_counter() - start

    def probe(self, deadline: Deadline, out: ExchangeOutcome) -> tuple[int, float]:
        """Measures the links: sends empty messages of the sizes in the plan's first rounds. Returns (bytes, seconds).

        Fills `out.lost_sources` and `out.lost_destinations`.
        """
        total, waiting, start = 0, list[Callable[[], None]](), time.perf_counter()
        for sending, receiving in self._probed:
            begun = []
            for message, lost in ((receiving, out.lost_sources), (sending, out.lost_destinations)):
                if message is not None:
                    total += message.bucket.elements * self._dtype.itemsize
                    begun.append(self._start_probe(message, message is sending, lost, deadline))
            _finish(waiting)
            waiting = begun
        _finish(waiting)
        return total, time.perf_counter() - start

    def _start_probe(
        self, message: BucketMessage, out: bool, lost: dict[int, str], deadline: Deadline
    ) -> Callable[[], None]:
        """Starts an empty message of the bucket's size. Returns a function that finishes it."""
        bucket, size = message.bucket, message.bucket.elements * self._dtype.itemsize
        transport, peer = self._route(bucket.source, bucket.destination)
        other = bucket.destination if out else bucket.source
        label = f"a first message, rank {bucket.source} to engine rank {bucket.destination},"
        if out:
            handle = transport.send(peer, label, transport.buffer(size, self._side.device), size_known=True)
        else:
            handle = transport.receive(peer, label, size, self._side.device)

        def finish() -> None:
            try:
                if other not in lost:
                    handle.wait(replace(deadline, pulse=lambda: self._pulse(bucket.destination)) if out else deadline)
                    handle.release()
            except TransportError as error:
                lost[other] = str(error)

        return finish

    def _copy_locally(self, message: BucketMessage, order: RefitOrder, out: ExchangeOutcome) -> None:
        """Copies a message whose source and destination are both in this process, and checks it."""
        sources, targets = self._side.sources, self._side.targets
        assert sources is not None and targets is not None
        quick = (sources, targets) if isinstance(sources, Tensors) and isinstance(targets, Tensors) else None
        for move in message.moves:
            target = quick[1].words(move.destination_name, move.destination, self._dtype) if quick else None
            source = quick[0].words(move.source_name, move.source, self._dtype) if quick else None
            if target is not None and source is not None:
                target[...] = source
            else:
                targets.write(
                    move.destination_name, move.destination, sources.read(move.source_name, move.source).to(self._dtype)
                )
        out.local += message.bucket.elements * self._dtype.itemsize
        checked = message.checked(order.verify, order.version)
        out.checked += len(checked)
        if not checked:
            return
        sums = checksums(
            (sources.read(m.source_name, m.source) for m in checked), self._dtype, order.sums_on, self._side.device
        )
        try:
            self._compare(checked, sums.view(torch.uint8), message.bucket, order.sums_on)
        except Mismatch as error:
            out.mismatch = out.mismatch or str(error)

    def _start_round(
        self,
        sending: BucketMessage | None,
        receiving: BucketMessage | None,
        order: RefitOrder,
        deadline: Deadline,
        out: ExchangeOutcome,
    ) -> list[Callable[[], None]]:
        """Starts the messages that this rank sends and receives in a round. Returns functions that finish them."""
        starts: list[tuple[int, Callable[[], Callable[[], None]]]] = []
        if sending is not None and sending.bucket.destination not in out.lost_destinations:
            starts.append((sending.bucket.source, lambda: self._send(sending, order, deadline, out)))
        if receiving is not None and receiving.bucket.source not in out.lost_sources:
            starts.append((receiving.bucket.source, lambda: self._receive(receiving, order, deadline, out)))
        # Both sides of a pair start their messages in one order: NCCL needs that.
        begun = {start: start() for _, start in sorted(starts, key=lambda item: item[0])}
        # What comes is taken first, because the other side waits for that.
        return [begun[start] for _, start in reversed(starts)]

    def _send(
        self, message: BucketMessage, order: RefitOrder, deadline: Deadline, out: ExchangeOutcome
    ) -> Callable[[], None]:
        """Packs a message and starts to send it. Returns a function that waits until it is sent."""
        bucket, width, checked = message.bucket, self._dtype.itemsize, message.checked(order.verify, order.version)
        base, sums = order.base.get(bucket.destination), CHECKSUM_BYTES * len(checked)
        head, size = delta.HEADER if base is not None else 0, bucket.elements * width
        try:
            transport, peer = self._route(bucket.source, bucket.destination)
            joined, alone = message.split(transport.takes_pieces and not head, width)
            whole = transport.buffer(head + size + sums, self._side.device)
            end = head + elements_of(joined) * width
            values = self._pack(joined, whole[head:end])
            begun = time.perf_counter()
            if head:
                end = self._encode(message.number, values, base, whole)
            if order.keeps_sent:
                kept = (
                    self._pack(message.runs, torch.empty(size, dtype=torch.uint8, device=values.device))
                    if alone
                    else values.clone()
                )
                self._last[message.number] = (order.version, kept)
                out.delta_seconds += time.perf_counter() - begun
            self._put_checksums(checked, whole[end : end + sums], order.sums_on)
            pieces = self._pieces(alone, whole[end + sums :], transport.streams)
            handle = transport.send(
                peer, message.label(order.version), whole[: end + sums], size_known=not head, pieces=pieces
            )
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

    def _receive(
        self, message: BucketMessage, order: RefitOrder, deadline: Deadline, out: ExchangeOutcome
    ) -> Callable[[], None]:
        """Starts to receive a message. Returns a function that waits for it and writes it to the parameters."""
        bucket, checked = message.bucket, message.checked(order.verify, order.version)
        size_known = order.base.get(bucket.destination) is None
        transport, peer = self._route(bucket.source, bucket.destination)
        joined, alone = message.split(transport.takes_pieces and size_known, self._dtype.itemsize)
        pieces, loose = [], list[SliceRun]()
        for run in alone:
            memory = self._writable.memory(run.name, run.part, self._dtype) if self._writable else None
            pieces.append(run.part.elements * self._dtype.itemsize if memory is None else memory)
            loose += [run] if memory is None else []
        size = elements_of(joined + loose) * self._dtype.itemsize + CHECKSUM_BYTES * len(checked)
        handle = transport.receive(
            peer, message.label(order.version), size if size_known else None, self._side.device, pieces=pieces
        )

        def finish() -> None:
            if bucket.source in out.lost_sources:
                return
            try:
                whole = handle.wait(deadline).to(self._side.device)
                self._land(message, joined, loose, whole, size_known, checked, order.sums_on, out)
            except TransportError as error:
                out.lost_sources.setdefault(bucket.source, str(error))
            except ValueError as error:
                out.lost_sources.setdefault(bucket.source, f"{message.label(order.version)} {error}")
            except Mismatch as error:
                out.mismatch = out.mismatch or str(error)
            else:
                _synchronize(self._side.device)  # the other side writes to that memory next
                handle.release()

        return finish

    def _land(
        self,
        message: BucketMessage,
        joined: Sequence[SliceRun],
        loose: Sequence[SliceRun],
        whole: Tensor,
        size_known: bool,
        checked: Sequence[SliceMove],
        sums_on: Place,
        out: ExchangeOutcome,
    ) -> None:
        """Writes a received message to the parameters and checks it.

        `whole` holds the values of `joined`, the checksums of `checked`, and then the values of `loose`: runs that came
        alone and have no memory that a transport can write to.
        """
        assert self._side.targets is not None
        sums, width = CHECKSUM_BYTES * len(checked), self._dtype.itemsize
        end = elements_of(joined) * width if size_known else len(whole) - sums
        if size_known:
            values = whole[:end].view(self._dtype)
        else:
            begun = time.perf_counter()
            present = torch.empty(message.bucket.elements, dtype=self._dtype, device=self._side.device)
            _gather(self._side.targets, [(run.name, run.part) for run in joined], present)
            values = delta.decode(whole[:end], present.view(INTEGERS[width])).view(self._dtype)
            out.delta_seconds += time.perf_counter() - begun
        self._write(joined, values)
        self._write(loose, whole[end + sums :].view(self._dtype) if loose else values)
        out.received += message.bucket.elements * width if size_known else end
        out.checked += len(checked)
        self._compare(checked, whole[end : end + sums], message.bucket, sums_on)

    def _write(self, runs: Sequence[SliceRun], values: Tensor) -> None:
        """Writes values that lie end to end to the runs they belong to."""
        assert self._side.targets is not None
        place = 0
        for run in runs:
            part = values[place : place + run.part.elements]
            self._side.targets.write(run.name, run.part, part.view(run.part.rows, run.part.columns))
            place += run.part.elements

    def _pieces(self, runs: Sequence[SliceRun], buffer: Tensor, streams: bool) -> Iterator[Tensor]:
        """Yields the bytes of each run when its turn to be sent comes.

        The bytes are those of the parameters themselves, or, where a transport cannot read these, packed into `buffer`.
        """
        for run in runs:
            size, found = run.part.elements * self._dtype.itemsize, list[Tensor | None]()
            if self._readable is not None and (
                len(run.moves) == 1 or (streams and size >= ALONE_PART_BYTES * len(run.moves))
            ):
                found = [self._readable.memory(*place, self._dtype) for place in run.sources]
            lying = [piece for piece in found if piece is not None]
            if len(lying) < len(run.moves):
                lying, buffer = [buffer[:size]], buffer[size:]
                self._pack([run], lying[0])
            yield from lying

    def _pack(self, runs: Sequence[SliceRun], buffer: Tensor) -> Tensor:
        """Puts the values of the runs end to end, in `buffer` where that is aligned. Returns them as integers."""
        assert self._side.sources is not None
        aligned = buffer.storage_offset() % self._dtype.itemsize == 0
        values = (
            buffer.view(self._dtype)
            if aligned
            else torch.empty(elements_of(runs), dtype=self._dtype, device=buffer.device)
        )
        _gather(self._side.sources, [place for run in runs for place in run.sources], values)
        return values.view(INTEGERS[self._dtype.itemsize])

    def _encode(self, number: int, values: Tensor, base: int | None, whole: Tensor) -> int:
        """Writes the message as a delta to what the receiver holds, where that is known. Returns its bytes."""
        version, old = self._last.get(number, (None, None))
        return delta.encode(values, old if version == base else None, whole)

    def _put_checksums(self, checked: Sequence[SliceMove], place: Tensor, sums_on: Place) -> None:
        """Writes the checksums of the checked slices to `place`, uint8 [8 * slices]."""
        if checked:
            sources = self._side.sources
            assert sources is not None
            own = checksums(
                (sources.read(m.source_name, m.source) for m in checked), self._dtype, sums_on, self._side.device
            )
            place.copy_(own.view(torch.uint8))

    def _compare(self, checked: Sequence[SliceMove], wanted: Tensor, bucket: RefitBucket, sums_on: Place) -> None:
        """Raises Mismatch unless the slices in this rank's parameters have the `wanted` checksums, uint8 [8 * n]."""
        if not checked:
            return
        targets = self._side.targets
        assert targets is not None
        own = checksums(
            (targets.read(m.destination_name, m.destination) for m in checked), self._dtype, sums_on, self._side.device
        )
        both = torch.stack([own, wanted.clone().view(torch.int64).to(own.device)]).tolist()
        for move, found, want in zip(checked, *both, strict=True):
            if found != want:
                part = move.destination
                raise Mismatch(
                    f"{move.destination_name} of engine rank {bucket.destination}, rows {part.row} to "
                    f"{part.row + part.rows}, is not {move.source_name} of trainer rank {bucket.source}: checksums "
                    f"{found:x} and {want:x} differ"
                )


def _gather(parameters: Readable, parts: Sequence[NamedPart], out: Tensor) -> None:
    """Writes the parts one after the other into `out` [elements], cast to its dtype."""
    whole, place, dtype, width = as_words(out[None]), 0, out.dtype, out.element_size()
    cut = parameters.words if isinstance(parameters, Tensors) and whole is not None else None
    for name, part in parts:
        end, source = place + part.rows * part.columns, None if cut is None else cut(name, part, dtype)
        if whole is not None and source is not None and place * width % WORD_BYTES == 0:
            whole[0, place * width // WORD_BYTES : end * width // WORD_BYTES].reshape(source.shape)[...] = source
        else:
            out[place:end].view(part.rows, part.columns).copy_(parameters.read(name, part))
        place = end


def _synchronize(device: torch.device) -> None:
    """Waits until everything that was started on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _finish(waiting: Sequence[Callable[[], None]]) -> None:
    """Finishes messages in order."""
    for finish in waiting:
        finish()
