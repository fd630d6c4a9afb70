"""Runs one rank's part of a refit (weight sync): packs and sends weights; receives, writes and verifies weights."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
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
    Handle,
    Mismatch,
    Parameters,
    Readable,
    Tensors,
    Transport,
    TransportError,
    as_words,
)
from megatron_rl.weights.refit_plan import RefitBucket, RefitPlan

# A long run of slices is sent without packing, slice by slice, if the slices have at least this average size in bytes.
ALONE_PART_BYTES = 1 << 16
PROBE_BYTES = 256 << 20  # total bytes, over all ranks, of the dummy messages that measure the links' bandwidth
# function: (trainer rank, engine rank) -> (transport between the two ranks, the other process's index in the transport)
Route = Callable[[int, int], tuple[Transport, int]]


@dataclass(frozen=True, kw_only=True)
class LocalSide:
    """The role of this process in a refit plan: a source (trainer rank), a destination (engine rank), or both."""

    source: int | None = None  # trainer rank of this process; None if this process sends no weights
    sources: Readable | None = None  # parameters to send
    destination: int | None = None  # engine rank of this process; None if this process receives no weights
    targets: Parameters | None = None  # parameters to receive into
    device: torch.device = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RefitOrder:
    """The settings of one refit (weight sync to the engines), the same on all ranks."""

    version: int
    verify: Verify = "sample"
    sums_on: Place = "host"  # where checksums are computed
    # engine rank -> weight version that this engine rank holds, and to which it can apply a delta
    base: dict[int, int] = field(default_factory=dict)
    keeps_sent: bool = False  # whether senders keep a copy of the sent values, to compute the next refit's delta from


# Outcomes come from engines: a larger number would overflow in the metrics of a refit.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]


@dataclass(kw_only=True)
class ExchangeOutcome:
    """The result of one rank's part in a refit. Sizes are in bytes."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    sent: Count = 0
    full: Count = 0  # number of bytes that would have been sent without delta encoding
    received: Count = 0
    local: Count = 0  # bytes copied within this process
    checked: Count = 0  # number of slices whose checksum was compared
    delta_seconds: Seconds = 0.0  # time spent on encoding and applying deltas
    seconds: Seconds = 0.0
    # engine rank that a message did not reach -> error message
    lost_destinations: dict[int, str] = field(default_factory=dict)
    # trainer rank from which a message did not arrive -> error message
    lost_sources: dict[int, str] = field(default_factory=dict)
    mismatch: str | None = None  # error message for the first parameter that differs from the trainer's values
    error: str | None = None  # error message if the rank's part failed
    # (bytes, seconds) of the dummy messages that measured the links' bandwidth; (0, 0.0) if it was not measured
    probe: tuple[Count, Seconds] = (0, 0.0)


class _Run(NamedTuple):
    """The settings of one refit, its deadline, and the outcome to which this rank's results are written."""

    order: RefitOrder
    deadline: Deadline
    outcome: ExchangeOutcome


class Exchange:
    """Sends and receives the messages of one rank in every refit that follows the same refit plan (the list of all
    messages of a refit).
    """

    def __init__(
        self,
        plan: RefitPlan,
        side: LocalSide,
        route: Route,
        *,
        dtype: torch.dtype,
        pulse: Callable[[int], Any] = lambda destination: None,
    ) -> None:
        """Prepares the messages of this rank.

        `route`: function that returns the transport between a trainer rank and an engine rank.
        `dtype`: the dtype in which weights are sent.
        `pulse`: function that takes an engine rank. It returns a value that changes as long as this engine rank is
        alive and waits for a message.
        """
        self._side, self._route, self._dtype, self._pulse = side, route, dtype, pulse
        width, sent = dtype.itemsize, [*enumerate(plan.buckets)]
        local = [(n, b) for n, b in enumerate(plan.local, len(plan.buckets))]
        inside = [(n, b) for n, b in local if b.source == side.source and b.destination == side.destination]
        self._inside = [messages.bucket_message(plan, n, b, width) for n, b in inside]
        between = [x for x in local if x not in inside]  # messages between different processes on the same device
        rounds = functools.partial(messages.rounds, plan, source=side.source, destination=side.destination, width=width)
        self._rounds = rounds(between) + rounds(sent)
        self._probed = rounds(sent[: messages.buckets_in_first_rounds(plan, PROBE_BYTES // width)])
        self._last: dict[int, tuple[int, Tensor]] = {}  # bucket index -> (version, values sent)

    def run(self, order: RefitOrder, deadline: Deadline, outcome: ExchangeOutcome) -> None:
        """Sends and receives the weights, and records the result in `outcome`.

        A rank that does not answer is recorded in `outcome` as lost, and the rank's remaining messages are skipped.
        """
        start = time.perf_counter()
        if not order.keeps_sent:
            self._last.clear()
        run, waiting = _Run(order, deadline, outcome), list[Callable[[], None]]()
        inside, copies_per_round = iter(self._inside), -(-len(self._inside) // max(1, len(self._rounds)))
        for sending, receiving in self._rounds:
            begun = self._start_round(sending, receiving, run)
            for message in itertools.islice(inside, copies_per_round):  # while messages are in flight
                self._copy_locally(message, run)
            _finish(waiting)
            waiting = begun
        for message in inside:  # the remaining messages within this process, which the loop above did not copy
            self._copy_locally(message, run)
        _finish(waiting)
        _synchronize(self._side.device)
        outcome.seconds = time.perf_counter() - start

    def probe(self, deadline: Deadline, outcome: ExchangeOutcome) -> None:
        """Measures the bandwidth of the links with dummy messages, which have the sizes of the plan's first messages.

        Records the result in `outcome.probe`. Records ranks that do not answer in `outcome.lost_sources` and
        `outcome.lost_destinations`.
        """
        total, waiting, start = 0, list[Callable[[], None]](), time.perf_counter()
        for sending, receiving in self._probed:
            begun = []
            for message, lost in ((receiving, outcome.lost_sources), (sending, outcome.lost_destinations)):
                if message is not None:
                    total += message.bucket.elements * self._dtype.itemsize
                    begun.append(self._start_probe(message, message is sending, lost, deadline))
            _finish(waiting)
            waiting = begun
        _finish(waiting)
        outcome.probe = total, time.perf_counter() - start

    def _start_probe(
        self, message: BucketMessage, sends: bool, lost: dict[int, str], deadline: Deadline
    ) -> Callable[[], None]:
        """Starts the transfer of a dummy message of the same size as `message`. Sends it if `sends` is True, otherwise
        receives it. Returns a function that waits for the end of the transfer.

        `lost`: rank of the other side -> error message. The returned function adds an entry if the transfer fails.
        """
        bucket, size = message.bucket, message.bucket.elements * self._dtype.itemsize
        transport, peer = self._route(bucket.source, bucket.destination)
        label = f"a first message, rank {bucket.source} to engine rank {bucket.destination},"
        if not sends:
            handle = transport.receive(peer, label, size, self._side.device)
            return _completion(handle, bucket.source, lost, deadline)
        handle = transport.send(peer, label, transport.buffer(size, self._side.device))
        return _completion(handle, bucket.destination, lost, self._patient(deadline, bucket))

    def _patient(self, deadline: Deadline, bucket: RefitBucket) -> Deadline:
        """Returns a deadline for sending a bucket (message), which is extended while the receiving engine rank is alive
        and itself waiting.
        """
        return replace(deadline, pulse=lambda: self._pulse(bucket.destination))

    def _copy_locally(self, message: BucketMessage, run: _Run) -> None:
        """Copies and verifies the slices of a message whose source and destination are both in this process."""
        sources, targets = self._side.sources, self._side.targets
        assert sources is not None and targets is not None
        quick = (sources, targets) if isinstance(sources, Tensors) and isinstance(targets, Tensors) else None
        for move in message.moves:
            target = quick[1].words(move.destination_name, move.destination, self._dtype) if quick else None
            source = quick[0].words(move.source_name, move.source, self._dtype) if quick else None
            if target is not None and source is not None:
                target[...] = source
            else:
                values = sources.read(move.source_name, move.source).to(self._dtype)
                targets.write(move.destination_name, move.destination, values)
        run.outcome.local += message.bucket.elements * self._dtype.itemsize
        checked = message.checked(run.order.verify, run.order.version)
        run.outcome.checked += len(checked)
        try:
            if checked:
                self._compare(checked, self._checksums(checked, run.order.sums_on), message.bucket, run.order.sums_on)
        except Mismatch as error:
            run.outcome.mismatch = run.outcome.mismatch or str(error)

    def _start_round(
        self, sending: BucketMessage | None, receiving: BucketMessage | None, run: _Run
    ) -> list[Callable[[], None]]:
        """Starts the transfers of this rank in one round of the plan: at most one message to send and one to receive.

        Returns one function per message, which waits until the message is transferred and completes it.
        """
        starts: list[tuple[int, Callable[[], Callable[[], None]]]] = []
        if sending is not None and sending.bucket.destination not in run.outcome.lost_destinations:
            starts.append((sending.bucket.source, lambda: self._send(sending, run)))
        if receiving is not None and receiving.bucket.source not in run.outcome.lost_sources:
            starts.append((receiving.bucket.source, lambda: self._receive(receiving, run)))
        # NCCL requires that both sides of a pair start their messages in the same order.
        begun = {start: start() for _, start in sorted(starts, key=lambda item: item[0])}
        # Receives are completed first, because the sender on the other side waits until its message is received.
        return [begun[start] for _, start in reversed(starts)]

    def _send(self, message: BucketMessage, run: _Run) -> Callable[[], None]:
        """Copies the values of a message into a buffer, and starts to send the message.

        Returns a function that waits until the message has been sent.
        """
        order, outcome, bucket, width = run.order, run.outcome, message.bucket, self._dtype.itemsize
        checked = message.checked(order.verify, order.version)
        base, sums = order.base.get(bucket.destination), CHECKSUM_BYTES * len(checked)
        head, size = delta.HEADER if base is not None else 0, bucket.elements * width
        try:
            transport, peer = self._route(bucket.source, bucket.destination)
            joined, alone = message.split(transport.takes_pieces and not head, width)
            buffer = transport.buffer(head + size + sums, self._side.device)
            end = head + elements_of(joined) * width
            values = self._pack(joined, buffer[head:end])
            begun = time.perf_counter()
            if head:  # sends a delta if this rank still has the values that the receiver has (version `base`)
                version, old = self._last.get(message.number, (None, None))
                end = delta.encode(values, old if version == base else None, buffer)
            if order.keeps_sent:
                kept = torch.empty(size, dtype=torch.uint8, device=values.device) if alone else None
                self._last[message.number] = (
                    order.version,
                    values.clone() if kept is None else self._pack(message.runs, kept),
                )
                outcome.delta_seconds += time.perf_counter() - begun
            if checked:
                buffer[end : end + sums].copy_(self._checksums(checked, order.sums_on))
            pieces = self._pieces(alone, buffer[end + sums :])
            handle = transport.send(peer, message.label(order.version), buffer[: end + sums], pieces=pieces)
        except TransportError as error:
            outcome.lost_destinations[bucket.destination] = str(error)
            return lambda: None
        outcome.full += size
        outcome.sent += end if head else size
        return _completion(handle, bucket.destination, outcome.lost_destinations, self._patient(run.deadline, bucket))

    def _receive(self, message: BucketMessage, run: _Run) -> Callable[[], None]:
        """Starts to receive a message.

        Returns a function that waits for the message and writes its values to the parameters.
        """
        order, outcome, bucket = run.order, run.outcome, message.bucket
        checked = message.checked(order.verify, order.version)
        size_known = order.base.get(bucket.destination) is None
        transport, peer = self._route(bucket.source, bucket.destination)
        joined, alone = message.split(transport.takes_pieces and size_known, self._dtype.itemsize)
        pieces, loose, targets = [], list[SliceRun](), self._side.targets
        for piece in alone:
            memory = targets.memory(piece.name, piece.part, self._dtype) if isinstance(targets, Tensors) else None
            pieces.append(piece.part.elements * self._dtype.itemsize if memory is None else memory)
            loose += [piece] if memory is None else []
        size = elements_of(joined + loose) * self._dtype.itemsize + CHECKSUM_BYTES * len(checked)
        handle = transport.receive(
            peer, message.label(order.version), size if size_known else None, self._side.device, pieces=pieces
        )

        def land(received: Tensor) -> None:
            try:
                self._land(message, joined, loose, received.to(self._side.device), run)
            except ValueError as error:
                raise TransportError(f"{message.label(order.version)} {error}") from error
            except Mismatch as error:
                outcome.mismatch = outcome.mismatch or str(error)
            # Wait until the values are written, because the sender may overwrite the message's memory after `release`.
            _synchronize(self._side.device)

        return _completion(handle, bucket.source, outcome.lost_sources, run.deadline, land)

    def _land(
        self, message: BucketMessage, joined: Sequence[SliceRun], loose: Sequence[SliceRun], received: Tensor, run: _Run
    ) -> None:
        """Writes a received message to the parameters and verifies its checksums.

        `joined`: runs of slices that the sender packed. `loose`: runs of slices that were sent as separate pieces, but
        that the transport could not write directly into the parameters. `received` holds the values of `joined`, then
        the checksums of the checked slices, then the values of `loose`. Raises Mismatch if a checksum is wrong, and
        ValueError if an encoded delta is invalid.
        """
        assert self._side.targets is not None
        checked, width = message.checked(run.order.verify, run.order.version), self._dtype.itemsize
        sums = CHECKSUM_BYTES * len(checked)
        if run.order.base.get(message.bucket.destination) is None:
            end, size = elements_of(joined) * width, message.bucket.elements * width
            values = received[:end].view(self._dtype)
        else:
            end = size = len(received) - sums
            begun = time.perf_counter()
            present = torch.empty(message.bucket.elements, dtype=self._dtype, device=self._side.device)
            _gather(self._side.targets, [(slice_run.name, slice_run.part) for slice_run in joined], present)
            values = delta.decode(received[:end], present.view(INTEGERS[width])).view(self._dtype)
            run.outcome.delta_seconds += time.perf_counter() - begun
        self._write(joined, values)
        self._write(loose, received[end + sums :].view(self._dtype) if loose else values)
        run.outcome.received += size
        run.outcome.checked += len(checked)
        if checked:
            self._compare(checked, received[end : end + sums], message.bucket, run.order.sums_on)

    def _write(self, runs: Sequence[SliceRun], values: Tensor) -> None:
        """Writes concatenated values to the destination parameters of the runs of slices, in order."""
        assert self._side.targets is not None
        place = 0
        for run in runs:
            part = values[place : place + run.part.elements]
            self._side.targets.write(run.name, run.part, part.view(run.part.rows, run.part.columns))
            place += run.part.elements

    def _pieces(self, runs: Sequence[SliceRun], buffer: Tensor) -> Iterator[Tensor]:
        """Yields the bytes of the runs of slices in order. Each run is copied only when the caller requests it.

        Yields views of the parameters' memory if the transport can read this memory directly. Otherwise, copies the run
        into `buffer` and yields the copied bytes.
        """
        for run in runs:
            size, views, sources = run.part.elements * self._dtype.itemsize, list[Tensor | None](), self._side.sources
            if isinstance(sources, Tensors) and (len(run.moves) == 1 or size >= ALONE_PART_BYTES * len(run.moves)):
                views = [sources.memory(*place, self._dtype) for place in run.sources]
            lying = [piece for piece in views if piece is not None]
            if len(lying) < len(run.moves):
                lying, buffer = [buffer[:size]], buffer[size:]
                self._pack([run], lying[0])
            yield from lying

    def _pack(self, runs: Sequence[SliceRun], buffer: Tensor) -> Tensor:
        """Concatenates the values of the runs of slices and returns the values, viewed as integers.

        The values are written to `buffer` if `buffer` is aligned for the dtype, otherwise to new memory.
        """
        assert self._side.sources is not None
        aligned = buffer.storage_offset() % self._dtype.itemsize == 0
        values = (
            buffer.view(self._dtype)
            if aligned
            else torch.empty(elements_of(runs), dtype=self._dtype, device=buffer.device)
        )
        _gather(self._side.sources, [place for run in runs for place in run.sources], values)
        return values.view(INTEGERS[self._dtype.itemsize])

    def _checksums(self, checked: Sequence[SliceMove], sums_on: Place) -> Tensor:
        """Returns the checksums of the source values of the `checked` slices, uint8 [8 * slices]."""
        sources = self._side.sources
        assert sources is not None
        values = (sources.read(move.source_name, move.source) for move in checked)
        return checksums(values, self._dtype, sums_on, self._side.device).view(torch.uint8)

    def _compare(self, checked: Sequence[SliceMove], expected: Tensor, bucket: RefitBucket, sums_on: Place) -> None:
        """Raises Mismatch unless the `checked` slices of this rank's parameters have the checksums `expected`.

        `expected`: uint8 [8 * slices].
        """
        targets = self._side.targets
        assert targets is not None
        actual = checksums(
            (targets.read(m.destination_name, m.destination) for m in checked), self._dtype, sums_on, self._side.device
        )
        both = torch.stack([actual, expected.clone().view(torch.int64).to(actual.device)]).tolist()
        for move, got, want in zip(checked, *both, strict=True):
            if got != want:
                part = move.destination
                raise Mismatch(
                    f"{move.destination_name} of engine rank {bucket.destination}, rows {part.row} to "
                    f"{part.row + part.rows}, is not {move.source_name} of trainer rank {bucket.source}: checksums "
                    f"{got:x} and {want:x} differ"
                )


def _gather(parameters: Readable, parts: Sequence[NamedPart], target: Tensor) -> None:
    """Concatenates the given parts of the parameters into `target` [elements], cast to the dtype of `target`."""
    words, place, dtype, width = as_words(target[None]), 0, target.dtype, target.element_size()
    cut = parameters.words if isinstance(parameters, Tensors) and words is not None else None
    for name, part in parts:
        end, source = place + part.rows * part.columns, None if cut is None else cut(name, part, dtype)
        if words is not None and source is not None and place * width % WORD_BYTES == 0:
            words[0, place * width // WORD_BYTES : end * width // WORD_BYTES].reshape(source.shape)[...] = source
        else:
            target[place:end].view(part.rows, part.columns).copy_(parameters.read(name, part))
        place = end


def _synchronize(device: torch.device) -> None:
    """Waits until all work on the current CUDA stream of `device` is done. A no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _completion(
    handle: Handle, rank: int, lost: dict[int, str], deadline: Deadline, land: Callable[[Tensor], None] = lambda _: None
) -> Callable[[], None]:
    """Returns a function that waits for a message, calls `land` with the message, and releases the message's memory.
    The function records a failure in `lost[rank]`, where `rank` is the rank of the other side. It is a no-op if `rank`
    is in `lost` already.
    """

    def complete() -> None:
        try:
            if rank not in lost:
                land(handle.wait(deadline))
                handle.release()
        except TransportError as error:
            lost[rank] = str(error)

    return complete


def _finish(waiting: Sequence[Callable[[], None]]) -> None:
    """Calls the functions in order. Each function waits until one message is transferred, and completes the message."""
    for finish in waiting:
        finish()
