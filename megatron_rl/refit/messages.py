"""Divides the messages (buckets) of a refit plan into slices of parameters. Decides which slices are packed together,
and which slices carry a checksum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_rl.refit.transport import ParameterPart
from megatron_rl.weights.refit_plan import RefitBucket, RefitPlan

Verify = Literal["off", "sample", "full"]
NamedPart = tuple[str, ParameterPart]  # (name of a parameter, 2-D block of the parameter)
SAMPLE_EVERY = 16  # one in this many slices carries a checksum if verify is "sample"
CHECKSUM_BYTES = 8
# A run of slices of at least this many bytes may be sent separately from the packed message, which saves a copy.
ALONE_BYTES = 1 << 20


class SliceMove(NamedTuple):
    """One slice: a part of a source parameter, and the part of a destination parameter that it is copied to."""

    source_name: str
    source: ParameterPart
    destination_name: str
    destination: ParameterPart


class SliceRun(NamedTuple):
    """A run: slices whose destinations are consecutive rows of one destination parameter."""

    moves: list[SliceMove]
    name: str
    part: ParameterPart  # the part of the destination parameter that the whole run covers

    @property
    def sources(self) -> list[NamedPart]:
        """Returns a list with (source parameter name, part of the source parameter) for each slice."""
        return [(move.source_name, move.source) for move in self.moves]


class BucketMessage(NamedTuple):
    """A message of the refit plan, called a bucket, with the slices that it carries."""

    number: int  # index of the bucket in the plan
    bucket: RefitBucket
    moves: list[SliceMove]
    runs: list[SliceRun]

    def split(self, pieces: bool, width: int) -> tuple[list[SliceRun], list[SliceRun]]:
        """Divides the runs of slices. Returns (runs that are packed into one message, runs that are sent as separate
        pieces). The sender and the receiver of a message compute the same result.

        `pieces`: whether the transport can send separate pieces. If not, all runs are packed into one message.
        `width`: size of an element in bytes.
        """
        alone = [run.part.elements * width >= ALONE_BYTES for run in self.runs] if pieces else [False] * len(self.runs)
        joined = [run for run, by_itself in zip(self.runs, alone, strict=True) if not by_itself]
        return joined, [*itertools.compress(self.runs, alone)]

    def checked(self, verify: Verify, version: int) -> list[SliceMove]:
        """Returns the slices that carry a checksum in the refit to weight version `version`.

        If `verify` is "sample", the selected slices differ from version to version.
        """
        if verify == "off":
            return []
        if verify == "full":
            return self.moves
        return self.moves[(version + self.number) % min(SAMPLE_EVERY, len(self.moves)) :: SAMPLE_EVERY]

    def label(self, version: int) -> str:
        """Returns the name of this message in errors."""
        source, destination = self.bucket.source, self.bucket.destination
        return f"bucket {self.number} of refit {version}, rank {source} to engine rank {destination},"


def elements_of(runs: Sequence[SliceRun]) -> int:
    """Returns the total number of elements in the runs of slices."""
    return sum(run.part.elements for run in runs)


def rounds(
    plan: RefitPlan,
    buckets: Sequence[tuple[int, RefitBucket]],
    *,
    source: int | None,
    destination: int | None,
    width: int,
) -> list[tuple[BucketMessage | None, BucketMessage | None]]:
    """Returns (message to send, message to receive) for each round of the plan in which this process sends or receives.
    A process sends and receives at most one message in a round.

    `buckets`: list of (index in the plan, bucket).
    `source`: trainer rank of this process, or None.
    `destination`: engine rank of this process, or None.
    `width`: size of an element in bytes.
    """
    messages: dict[int, list[BucketMessage | None]] = {}
    for number, bucket in buckets:
        for side, mine in enumerate((bucket.source == source, bucket.destination == destination)):
            if mine:
                message = bucket_message(plan, number, bucket, width)
                messages.setdefault(bucket.round_number, [None, None])[side] = message
    return [(messages[number][0], messages[number][1]) for number in sorted(messages)]


def buckets_in_first_rounds(plan: RefitPlan, elements: int) -> int:
    """Returns the number of buckets (messages of the plan) in the first rounds, up to and including the round in which
    the total number of elements exceeds `elements`.
    """
    total = 0
    for number, bucket in enumerate(plan.buckets):
        if total > elements and bucket.round_number != plan.buckets[number - 1].round_number:
            return number
        total += bucket.elements
    return len(plan.buckets)


def bucket_message(plan: RefitPlan, number: int, bucket: RefitBucket, width: int) -> BucketMessage:
    """Returns the bucket (message of the refit plan) with index `number` and its slices, grouped into runs.

    `width`: size of an element in bytes.
    """
    s, part = plan.slices, slice(bucket.first, bucket.last)
    columns = (
        *(s.source_parameter, s.source_row, s.source_column),
        *(s.destination_parameter, s.row, s.column, s.rows, s.columns),
    )
    moves = []
    for source, source_row, source_column, destination, row, column, rows, wide in zip(
        *(c[part].tolist() for c in columns), strict=True
    ):
        read_from = ParameterPart(source_row, source_column, rows, wide)
        write_to = ParameterPart(row, column, rows, wide)
        moves.append(SliceMove(s.source_names[source], read_from, s.destination_names[destination], write_to))
    runs = _runs(moves, ALONE_BYTES // width)
    return BucketMessage(number, bucket, [move for run in runs for move in run.moves], runs)


def _runs(moves: Sequence[SliceMove], long: int) -> list[SliceRun]:
    """Groups slices with consecutive destination rows into runs. Only slices of fewer than `long` elements are joined.

    A longer slice is a run by itself, because it may be contiguous in the source too and then needs no copy.
    """
    runs: list[SliceRun] = []
    last: dict[str, int] = {}  # name of the destination parameter -> index of its latest run in `runs`
    for move in moves:
        part, at = move.destination, last.get(move.destination_name)
        if at is not None and max(part.elements, runs[at].moves[0].destination.elements) < long:
            joined = runs[at].part
            if (joined.row + joined.rows, joined.column, joined.columns) == (part.row, part.column, part.columns):
                runs[at].moves.append(move)
                runs[at] = runs[at]._replace(part=joined._replace(rows=joined.rows + part.rows))
                continue
        last[move.destination_name] = len(runs)
        runs.append(SliceRun([move], move.destination_name, part))
    return runs
