"""Records the metrics of a run in metrics.jsonl and in optional further sinks.

All values in metrics.jsonl are bitwise reproducible, except times and speeds.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer, StrictInt, StrictStr, TypeAdapter

from megatron_rl.lib.regular_files import read_bytes
from megatron_rl.lib.timing import named_range
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.json_lines import append, each
from megatron_rl.types import CUT_OFF

SECONDS = "seconds/"  # prefix of metrics that are times; these metrics are written to the separate field `time`
# Prefix of metrics that are rates or times of an update; these metrics are written to the separate field `speed`
SPEED = "speed/"
# Prefix of metrics that count the replaced samples of an iteration by the reason of their failure
REPLACED = "replaced/"
FILE_NAME = "metrics.jsonl"
EVAL = "eval"  # scope of evaluations
_log = logging.getLogger(__name__)
# JSON has no NaN and no infinities: they are written as the strings "nan", "inf" and "-inf"
Value = Annotated[float, PlainSerializer(lambda value: value if math.isfinite(value) else repr(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """One line of metrics.jsonl."""

    # Index of the iteration, from 0, counted over all roles. In SFT: index of the optimizer step.
    # In a line of an evaluation: number of completed iterations.
    iteration: StrictInt
    # Index of the recipe's cycle, from 0. In SFT: index of the optimizer step.
    # In a line of an evaluation: number of cycles that have begun.
    cycle: StrictInt
    scope: StrictStr  # origin of the metrics: a role, "eval", "sft", ...
    time: dict[str, Value]  # {phase: seconds}
    metrics: dict[str, Value]
    speed: dict[str, Value] = field(default_factory=dict)  # rates of the update, and seconds of its parts

    @property
    def place(self) -> tuple[int, int]:
        """Returns the indices of the last iteration and the last cycle, from 0, that the metrics depend on.

        For an evaluation, `iteration` and `cycle` are counts, and the indices are one less: -1 for the initial model.
        """
        is_eval = self.scope == EVAL
        return self.iteration - is_eval, self.cycle - is_eval

    @property
    def flat(self) -> dict[str, float]:
        """Returns the row's metrics, times and speeds as {scope/name: value}."""
        parts = {"": self.metrics, SECONDS: self.time, SPEED: self.speed}
        return {f"{self.scope}/{prefix}{name}": v for prefix, values in parts.items() for name, v in values.items()}


_ROW = TypeAdapter(MetricsRow)


def unlearned(iterations: Mapping[str, int], updates: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each trained role that had iterations but no update.

    `iterations`: {role: number of iterations}. `updates`: {trained role: value of the metric `update` in the role's
    last line}.
    """
    return [
        f"{role} never learned: {iterations[role]} iterations and no update."
        for role, done in updates.items()
        if not done > 0
    ]


def failures_text(metrics: Mapping[str, float]) -> str:
    """Returns the numbers of samples that were replaced and of gradings that were cut off, such as "3 samples replaced
    (2 timeout, 1 tool), 1 grading cut off"; "" if both are 0. `metrics`: metrics of an iteration or of an evaluation.
    """
    counts = {name.removeprefix(REPLACED): int(count) for name, count in metrics.items() if name.startswith(REPLACED)}
    reasons = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda kv: (-kv[1], kv[0])))
    replaced, cut_off = sum(counts.values()), cut_off_count(metrics)
    parts = [f"{replaced} sample{'s' * (replaced > 1)} replaced ({reasons})"] if replaced else []
    parts += [f"{cut_off} grading{'s' * (cut_off > 1)} cut off"] if cut_off else []
    return ", ".join(parts)


def cut_off_count(metrics: Mapping[str, float]) -> int:
    """Returns the number of gradings that were cut off: of an iteration (graded/cut_off) or an evaluation
    (ROLE/cut_off)."""
    return int(sum(count for name, count in metrics.items() if name.partition("/")[2] == CUT_OFF))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout as texts, for display."""

    group: str
    prompt: str
    response: str
    rewards: Mapping[str, float]
    length: int  # number of tokens that models generated

    @property
    def told_rewards(self) -> str:
        """Returns the rewards as text, such as `outcome 1, format 0.5`."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.rewards.items())


class Sink:
    """Base class of further destinations of the metrics. A subclass overrides the methods that it needs. Each method
    may raise any exception.

    `open` is called before the first `log`.
    """

    name: str
    num_samples: int = 0  # number of rollouts of each role and iteration that the sink shows

    def open(self) -> None: ...

    def log(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...

    def show(self, iteration: int, scope: str, samples: Sequence[Sample]) -> None:
        """Shows sample rollouts of an iteration."""

    def keep_model(self, role: str, directory: Path) -> None:
        """Records a trained model that the run has saved."""

    def watch(self, loads: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Sets the function that returns the state of each engine server, {server: {name: value}}."""


class Tracker:
    """Writes metrics.jsonl and forwards every line to the sinks. A Tracker is used on the driver rank only.

    `failures`: number of failed calls of each sink. The first failure of each sink is logged as a warning; failures do
    not stop the run. A sink that cannot be opened is not called again. Every line is flushed to the disk when `log`
    returns. All lines of an iteration are logged before the iteration's checkpoint is committed.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = path
        self.failures: dict[str, int] = {sink.name: 0 for sink in sinks}
        self._sinks = list(sinks)
        self._opened: list[Sink] | None = None  # None until the first line opens the sinks
        self._warned: set[str] = set()  # metrics for which a warning about a non-finite value was logged
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, cycle: int, scope: str, metrics: Mapping[str, float], *, iteration: int) -> None:
        """Appends one line. Metrics with the prefix `seconds/` go into the line's field `time`, and metrics with the
        prefix `speed/` into the field `speed`.

        Raises TypeError if a value is not a number, and DiskError if the line cannot be written.
        """
        parts: dict[str, dict[str, float]] = {SECONDS: {}, SPEED: {}, "": {}}
        for name, value in sorted(metrics.items()):
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"metric {name!r} is {value!r}: log a number") from error
            prefix = next(prefix for prefix in parts if name.startswith(prefix))
            parts[prefix][name.removeprefix(prefix)] = number
            if not math.isfinite(number) and f"{scope}/{name}" not in self._warned:
                self._warned.add(f"{scope}/{name}")
                _log.warning("%s %s is %s at iteration %d (told once per metric)", scope, name, number, iteration)
        row = MetricsRow(
            iteration=iteration, cycle=cycle, scope=scope,
            time=parts[SECONDS], metrics=parts[""], speed=parts[SPEED],
        )  # fmt: skip
        append(self.path, _ROW.dump_json(row, exclude_defaults=True))
        if self._opened is None:
            self._opened = [sink for sink in self._sinks if self._guarded(sink, sink.open)]
        self._each(lambda sink: sink.log(row))

    @property
    def num_samples(self) -> int:
        """Returns the maximum number of rollouts of each role and iteration that a sink shows."""
        return max((sink.num_samples for sink in self._sinks), default=0)

    def show(self, iteration: int, scope: str, samples: Sequence[Sample]) -> None:
        """Passes sample rollouts of an iteration to the open sinks."""
        self._each(lambda sink: sink.show(iteration, scope, samples))

    def watch(self, loads: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Passes the function `loads` to the sinks. It returns the state of each engine server, as
        {server: {name: value}}. A sink may call it from any thread."""
        for sink in self._sinks:
            sink.watch(loads)

    def keep_model(self, role: str, directory: Path) -> None:
        """Passes a trained model that the run has saved to the open sinks."""
        self._each(lambda sink: sink.keep_model(role, directory))

    def truncate(self, iteration: int) -> int:
        """Removes the lines of `iteration` and later iterations, before the run resumes at `iteration`.

        Damaged lines are also removed, and a warning is logged. Returns the number of removed lines.
        """
        lines = read_bytes(self.path).splitlines(keepends=True) if self.path.exists() else []
        kept, damaged = list[bytes](), 0
        for line in lines:
            try:
                if not line.endswith(b"\n"):  # a partial last line is normal after the process was killed
                    continue
                row = _ROW.validate_json(line)
            except ValueError:
                damaged += 1
                continue
            if row.iteration < iteration:
                kept.append(line)
        if damaged:
            _log.warning(
                "%s: %d damaged lines are removed; their metrics are lost where their iterations are not collected "
                "again",
                self.path, damaged,
            )  # fmt: skip
        if len(kept) < len(lines):
            write_text(self.path, b"".join(kept).decode())
        return len(lines) - len(kept)

    def close(self) -> None:
        """Closes the sinks that were opened."""
        self._each(lambda sink: sink.close())
        self._opened = []

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in self._opened or ():
            self._guarded(sink, lambda sink=sink: call(sink))

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Calls a method of a sink, and returns whether the call raised no exception.

        Any exception of a sink is caught here and counted; a warning is logged for the first exception of the sink.
        """
        try:
            call()
        except Exception as error:
            if not self.failures[sink.name]:
                _log.warning(
                    "metric sink %s failed (%s: %s); the run goes on without it", sink.name, type(error).__name__, error
                )
            self.failures[sink.name] += 1
            return False
        return True


class Stopwatch:
    """Measures wall-clock seconds by name: `with watch("rollout"): ...`. Blocks may be nested. The seconds of blocks
    with the same name are added."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        """`beat`: function that is called at the end of each measured block, to report that the run makes progress."""
        self.beat = beat
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with named_range(name):
                yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to the total of a name, and calls `beat` to report progress."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self.beat()

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last call as {"seconds/rollout": ...}, and resets the totals to zero."""
        taken = {f"{SECONDS}{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Returns the rows of RUN/metrics.jsonl in order; [] if there is no such file. Damaged lines are skipped, and their
    number is logged as a warning."""
    rows: list[MetricsRow] = []
    damage = each_metric(run_dir, rows.append)
    if damage is not None:
        _log.warning("%s", damage)
    return rows


def each_metric(run_dir: Path, take: Callable[[MetricsRow], object]) -> str | None:
    """Calls the function `take` once for each row of RUN/metrics.jsonl, in order. Only one line is in memory at a time.

    A line is skipped if it is damaged or if `take` raises ValueError. Returns a message about the skipped lines, or
    None if no line was skipped.
    """
    return each(Path(run_dir) / FILE_NAME, lambda raw: take(_ROW.validate_python(raw)))
