"""Reads the data of one run for a report: metrics (in compact arrays), settings, refits, and the names of damaged
files."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.report.run_record import RunRecord
from megatron_rl.run.metrics import EVAL, SPEED, MetricsRow, unlearned
from megatron_rl.run.run_directory import flatten

PREFLIGHT, SFT = "preflight", "sft"  # scopes of metrics lines that are not names of roles; EVAL is another one
CELLS = ("tp", "fn", "tn", "fp")  # counts of a verifier's verdicts on correct (tp, fn) and wrong (tn, fp) solutions
MOST_ITERATIONS = 2**31 - 1  # a line with a larger iteration index is damaged
Key = tuple[str, str]  # (scope, name of the metric)
Columns = dict[str, dict[str, "Curve"]]


@dataclass(slots=True)
class Curve:
    """The values of one metric of a run over its iterations (see run.metrics.MetricsRow.place), in the order of
    metrics.jsonl. Values that are not finite are left out and counted."""

    iterations: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))
    broken: int = 0  # number of values that were NaN or infinite
    first_broken: int = -1  # iteration of the first value that was NaN or infinite

    @property
    def trouble(self) -> str:
        """Returns a sentence about values that are NaN or infinite, or "" if all values are finite."""
        if not self.broken:
            return ""
        return f"{self.broken} values are not finite, the first at iteration {self.first_broken + 1}"

    def add(self, iteration: int, value: float) -> None:
        """Appends a value, or counts it if it is not finite."""
        if math.isfinite(value):
            self.iterations.append(iteration)
            self.values.append(value)
        else:
            self.first_broken = self.first_broken if self.broken else iteration
            self.broken += 1


@dataclass(slots=True)
class Clock:
    """The iteration, the recipe's cycle (one item of its schedule), and the measured seconds of the run so far, for
    each line of metrics.jsonl."""

    iterations: array[int] = field(default_factory=lambda: array("i"))
    cycles: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))  # cumulative sum over the lines

    @property
    def total(self) -> float:
        return self.seconds[-1] if self.seconds else 0.0


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """The metrics and settings of one run for a report. Rollouts are read separately."""

    name: str
    record: RunRecord
    curves: dict[Key, Curve]  # metrics
    seconds: dict[Key, Curve]  # times by (scope, phase)
    clock: Clock
    # {scope: number of lines in metrics.jsonl}, without the scopes of evaluations and of the preflight
    updates: dict[str, int]
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]  # flat settings, such as {"run.seed": 1}
    config_text: str
    refits: dict[Key, Curve]  # metrics of refits by (role, name)
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that the run's sweep changed

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))

    @property
    def failed(self) -> str | None:
        """Returns the reason why the run's last start failed, or None if it did not fail."""
        return self.record.failed()

    @property
    def iterations(self) -> int:
        """Returns the number of iterations so far, which is the last iteration index in the lines of all roles, plus
        1."""
        own = (
            curve.iterations[-1]
            for (scope, _), curve in self.curves.items()
            if scope in self.updates and curve.iterations
        )
        return max(own, default=-1) + 1

    def unlearned(self) -> list[str]:
        """Returns a sentence for each trained role that had iterations but no update."""
        found = {role: curve.values[-1] for (role, name), curve in self.curves.items() if name == "update"}
        return unlearned(self.updates, found)

    def confusion(self, scope: str) -> list[Curve]:
        """Returns the curves of a verifier's counts CELLS in a scope, which have equal lengths; [] if there are
        none."""
        found = [self.curves.get((scope, f"confusion/{cell}"), Curve()) for cell in CELLS]
        lengths = {len(curve.values) for curve in found}
        return found if len(lengths) == 1 and lengths != {0} else []

    def evaluated(self) -> dict[str, Curve]:
        """Returns {name: curve} of the held-out metrics, such as `generator/accuracy_sampled`, without counts."""
        return {
            name: curve
            for (scope, name), curve in self.curves.items()
            if scope == EVAL and not name.rpartition("/")[2].startswith("num_") and curve.values
        }


def read_run(directory: Path, *, name: str | None = None) -> RunMetrics:
    """Reads a run directory. If it has no run, the result has no metrics. `name`: name of the run; None: the name of
    the directory."""
    record, columns = RunRecord(directory), _Columns()
    record.each_metric(columns.take)
    record.each_refit(columns.take_refit)
    return RunMetrics(
        name=name or record.directory.path.resolve().name,
        record=record,
        curves=_flat(columns.curves),
        seconds=_flat(columns.seconds),
        clock=columns.clock,
        updates=columns.updates,
        refits=_flat(columns.refits),
        summary=record.summary(),
        settings=flatten(record.config()),
        config_text=record.config_text(),
    )


def is_run(directory: Path) -> bool:
    """Returns whether the directory has metrics or the config of a run."""
    own = RunRecord(directory).directory
    return own.metrics.exists() or own.config.exists()


class _Columns:
    """Collects the lines of metrics.jsonl and refits.jsonl into columns {scope: {name of the metric: curve}}."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.updates: dict[str, int] = {}
        self.curves: Columns = defaultdict(lambda: defaultdict(Curve))
        self.seconds: Columns = defaultdict(lambda: defaultdict(Curve))
        self.refits: Columns = defaultdict(lambda: defaultdict(Curve))

    def take(self, row: MetricsRow) -> None:
        """Adds a line of metrics. Raises ValueError if its iteration or cycle is out of range."""
        if not (0 <= row.iteration <= MOST_ITERATIONS and abs(row.cycle) < 2**62):
            raise ValueError(f"iteration {row.iteration} and cycle {row.cycle} are out of range")
        iteration, cycle = row.place
        _add(self.curves[row.scope], iteration, row.metrics)
        _add(self.curves[row.scope], iteration, {f"{SPEED}{n}": v for n, v in row.speed.items()})
        _add(self.seconds[row.scope], iteration, row.time)
        spent = sum(value for value in row.time.values() if math.isfinite(value))
        self.clock.iterations.append(iteration)
        self.clock.cycles.append(cycle)
        self.clock.seconds.append(self.clock.total + spent)
        if row.scope not in (EVAL, PREFLIGHT):
            self.updates[row.scope] = self.updates.get(row.scope, 0) + 1

    def take_refit(self, line: Mapping[str, Any]) -> None:
        """Adds a line of refits.jsonl."""
        own = {name.removeprefix("refit/"): v for name, v in line.items() if name not in ("role", "version")}
        _add(self.refits[line["role"]], 0, own)


def _add(columns: dict[str, Curve], iteration: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        curve = columns[name]
        # The code of Curve.add is repeated here for speed, because there may be millions of values
        if math.isfinite(value):
            curve.iterations.append(iteration)
            curve.values.append(value)
        else:
            curve.add(iteration, value)


def _flat(by_scope: Columns) -> dict[Key, Curve]:
    return {(scope, name): curve for scope, own in by_scope.items() for name, curve in own.items()}
