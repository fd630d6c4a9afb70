"""Records what a run measures in metrics.jsonl and in optional further sinks.

Everything in metrics.jsonl but times and speeds is reproducible bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.run.json_lines import UNREADABLE, append, each

SECONDS = "seconds/"  # metrics with this prefix are times, which are written apart
SPEED = "speed/"  # and so are those that say how fast an update was
FILE_NAME = "metrics.jsonl"
EVAL = "eval"  # scope of the lines of evaluations
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """One line of metrics.jsonl."""

    # number of the iteration, over all roles, from 0 (SFT: optimizer steps); of an evaluation, iterations done
    iteration: int
    cycle: int  # number of the recipe's cycle, from 0 (SFT: optimizer steps); of an evaluation, cycles begun
    scope: str  # origin of the metrics: a role, "eval", "sft", ...
    time: Mapping[str, float]  # seconds by phase
    metrics: Mapping[str, float]
    speed: Mapping[str, float] = field(default_factory=dict)  # of the update: rates, and seconds of its parts

    @property
    def place(self) -> tuple[int, int]:
        """The last iteration and the last cycle, from 0, that the metrics know of. An evaluation's line counts the
        iterations that were done and the cycles that were begun before it, so that these are one less: -1 for the model
        as it was given."""
        before = self.scope == EVAL
        return self.iteration - before, self.cycle - before


def unlearned(iterations: Mapping[str, int], updates: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each role that had iterations and no update. `updates`: by role, the metric `update` of
    its last line; a role without it is no trained one."""
    return [
        f"{role} never learned: {iterations[role]} iterations and no update."
        for role, done in updates.items()
        if not done > 0
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout as a person reads it."""

    group: str
    prompt: str
    response: str
    rewards: Mapping[str, float]
    length: int  # tokens that models wrote


class Sink:
    """A further destination of every metrics line. A subclass overrides the methods that it needs. Each method may
    raise.

    `open` is called before the first `log`.
    """

    name: str
    num_samples: int = 0  # rollouts of each role and iteration that the sink shows

    def open(self) -> None: ...

    def log(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...

    def show(self, iteration: int, scope: str, samples: Sequence[Sample]) -> None:
        """Shows rollouts of an iteration."""

    def keep_model(self, role: str, directory: Path) -> None:
        """Records a model that the run has written."""

    def watch(self, loads: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Takes a function that returns what each engine server does."""


class Tracker:
    """The writer of metrics.jsonl, which also feeds the sinks. It exists on the driver rank alone.

    `failures` counts the lines that each sink lost. The first loss of each sink is logged as a warning, and none stops
    the run. Every line is on disk when `log` returns. All that belongs to an iteration is logged before that
    iteration's checkpoint is committed.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = path
        self.failures: dict[str, int] = {sink.name: 0 for sink in sinks}
        self._sinks = list(sinks)
        self._opened: set[str] = set()
        self._broken: set[str] = set()  # sinks that could not be opened
        self._warned: set[str] = set()  # metrics of which a warning said that they were not finite
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, cycle: int, scope: str, metrics: Mapping[str, float], *, iteration: int) -> None:
        """Appends one line. Keys that start with `seconds/` become its times, with `speed/` its speeds.

        Raises TypeError for a value that is no number, and DiskError when the disk does not take the line.
        """
        values: dict[str, float] = {}
        for name, value in sorted(metrics.items()):
            try:
                values[name] = float(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"metric {name!r} is {value!r}: log a number") from error
        row = MetricsRow(
            iteration=iteration,
            cycle=cycle,
            scope=scope,
            time=_below(SECONDS, values),
            metrics={name: value for name, value in values.items() if not name.startswith((SECONDS, SPEED))},
            speed=_below(SPEED, values),
        )
        self._warn_not_finite(row)
        append(self.path, _encode(row))
        for sink in self._sinks:
            self._send(sink, row)

    @property
    def num_samples(self) -> int:
        """Returns how many rollouts of each role and iteration some sink shows."""
        return max((sink.num_samples for sink in self._sinks), default=0)

    def show(self, iteration: int, scope: str, samples: Sequence[Sample]) -> None:
        """Gives rollouts of an iteration to the open sinks. A sink that fails is told like one that loses a line."""
        for sink in self._sinks:
            if sink.name in self._opened:
                self._guarded(sink, partial(sink.show, iteration, scope, samples))

    def watch(self, loads: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Gives sinks a function that returns what each engine server does. Sinks call it from any thread."""
        for sink in self._sinks:
            sink.watch(loads)

    def keep_model(self, role: str, directory: Path) -> None:
        """Tells the open sinks of a model that the run has written."""
        for sink in self._sinks:
            if sink.name in self._opened:
                self._guarded(sink, partial(sink.keep_model, role, directory))

    def truncate(self, iteration: int) -> int:
        """Drops the lines of `iteration` and later ones, and damaged ones with a warning, to resume at `iteration`.

        Returns how many lines it dropped.
        """
        if not self.path.exists():
            return 0
        found = self.path.read_bytes().splitlines(keepends=True)
        rows: list[MetricsRow | None] = [None] * len(found)  # None: the line is damaged or not whole
        for place, line in enumerate(found):
            with suppress(*UNREADABLE):
                rows[place] = _decode(json.loads(line)) if line.endswith(b"\n") else None
        kept = [line for line, row in zip(found, rows, strict=True) if row is not None and row.iteration < iteration]
        if None in rows[:-1]:  # a half-written last line is what every killed process may leave
            _log.warning(
                "%s: %d damaged lines are removed; their metrics are lost where their iterations are not collected "
                "again",
                self.path, rows[:-1].count(None),
            )  # fmt: skip
        if len(kept) < len(found):
            temporary = self.path.with_name(f".{self.path.name}.tmp")
            with temporary.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        return len(found) - len(kept)

    def close(self) -> None:
        """Closes the sinks that were opened."""
        for sink in self._sinks:
            if sink.name in self._opened:
                self._guarded(sink, sink.close)
        self._opened.clear()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, sink: Sink, row: MetricsRow) -> None:
        if sink.name in self._broken:
            self.failures[sink.name] += 1
            return
        if sink.name not in self._opened:
            if not self._guarded(sink, sink.open):
                self._broken.add(sink.name)
                return
            self._opened.add(sink.name)
        self._guarded(sink, lambda: sink.log(row))

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Calls a sink and returns whether it worked.

        This is the border to sinks: all that they raise is counted, told once.
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

    def _warn_not_finite(self, row: MetricsRow) -> None:
        for name, value in (*row.metrics.items(), *row.time.items(), *row.speed.items()):
            if not math.isfinite(value) and f"{row.scope}/{name}" not in self._warned:
                self._warned.add(f"{row.scope}/{name}")
                _log.warning(
                    "%s %s is %s at iteration %d (told once per metric)", row.scope, name, value, row.iteration
                )


class Stopwatch:
    """A stopwatch of wall-clock seconds by name: `with watch("rollout"): ...`. Names may nest; repeats add up."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        """Takes `beat`, a function to call whenever the run makes progress.

        The watch calls it when a measured part ends.
        """
        self.beat = beat
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to a name."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self.beat()

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last call, as {"seconds/rollout": ...}, and starts again from zero."""
        taken = {f"{SECONDS}{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Reads RUN/metrics.jsonl in order; no lines when there is no such file. A warning counts damaged lines, which are
    left out."""
    rows: list[MetricsRow] = []
    damage = each_metric(run_dir, rows.append)
    if damage is not None:
        _log.warning("%s", damage)
    return rows


def each_metric(run_dir: Path, take: Callable[[MetricsRow], object]) -> str | None:
    """Passes each line of RUN/metrics.jsonl to `take`, in order, with one line in memory at a time.

    Returns a sentence about the lines that are damaged or that `take` refused by a ValueError; None when there are
    none.
    """
    return each(Path(run_dir) / FILE_NAME, lambda raw: take(_decode(raw)))


def _below(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values whose names begin with a prefix, under their names without the prefix."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _encode(row: MetricsRow) -> bytes:
    """Returns a row as a line of JSON. Floats are written as the shortest text that reads back to the same bits.

    NaN and infinities, which JSON does not have, become strings.
    """
    line: dict[str, Any] = {"iteration": row.iteration, "cycle": row.cycle, "scope": row.scope}
    for name, values in {"time": row.time, "metrics": row.metrics, "speed": row.speed}.items():
        if values or name != "speed":
            line[name] = {key: value if math.isfinite(value) else repr(value) for key, value in values.items()}
    return json.dumps(line, allow_nan=False).encode()


def _decode(raw: Any) -> MetricsRow:
    """Returns the row of a parsed line. Raises KeyError, TypeError, ValueError or AttributeError for a value that is no
    metrics line."""
    iteration, cycle, scope = raw["iteration"], raw["cycle"], raw["scope"]
    if type(iteration) is not int or type(cycle) is not int or not isinstance(scope, str):
        raise TypeError("iteration and cycle are whole numbers, scope is a text")
    return MetricsRow(
        iteration=iteration,
        cycle=cycle,
        scope=scope,
        time={name: float(value) for name, value in raw["time"].items()},
        metrics={name: float(value) for name, value in raw["metrics"].items()},
        speed={name: float(value) for name, value in raw.get("speed", {}).items()},
    )


def flat(row: MetricsRow) -> dict[str, float]:
    """Returns a row's metrics, times and speeds as {scope/name: value}."""
    times = {f"{row.scope}/{SECONDS}{name}": value for name, value in row.time.items()}
    speeds = {f"{row.scope}/{SPEED}{name}": value for name, value in row.speed.items()}
    return {**{f"{row.scope}/{name}": value for name, value in row.metrics.items()}, **times, **speeds}
