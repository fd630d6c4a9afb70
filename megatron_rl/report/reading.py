"""Reads what a report shows of one run, in little memory: metrics as columns of numbers, settings, refits, damage."""

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

PREFLIGHT, SFT = "preflight", "sft"  # with EVAL, the scopes of metrics lines that are no roles
CELLS = ("tp", "fn", "tn", "fp")  # of a verifier's verdicts: what it said of correct, and of wrong solutions
MOST_ITERATIONS = 2**31 - 1  # a larger number of an iteration is damage
Key = tuple[str, str]  # (scope, name of the metric)
Columns = dict[str, dict[str, "Curve"]]


@dataclass(slots=True)
class Curve:
    """One metric of a run over its iterations (metrics.MetricsRow.place), in the order of the file. Values that are not
    finite are counted instead."""

    iterations: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))
    broken: int = 0  # values that were NaN or infinite
    first_broken: int = -1  # iteration of the first of them

    @property
    def trouble(self) -> str:
        """Returns a sentence about values that are not finite; nothing where all are finite."""
        if not self.broken:
            return ""
        return f"{self.broken} values are not finite, the first at iteration {self.first_broken + 1}"

    def add(self, iteration: int, value: float) -> None:
        """Appends a value."""
        if math.isfinite(value):
            self.iterations.append(iteration)
            self.values.append(value)
        else:
            self.first_broken = self.first_broken if self.broken else iteration
            self.broken += 1


@dataclass(slots=True)
class Clock:
    """The cycles of the recipe and the measured seconds that had passed at each line of the metrics."""

    iterations: array[int] = field(default_factory=lambda: array("i"))
    cycles: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))  # summed over the lines so far

    @property
    def total(self) -> float:
        return self.seconds[-1] if self.seconds else 0.0


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """The metrics that a report shows of one run. Its rollouts are read apart."""

    name: str
    record: RunRecord
    curves: dict[Key, Curve]  # metrics
    seconds: dict[Key, Curve]  # times; the name is that of the phase
    clock: Clock
    updates: dict[str, int]  # lines by scope, evaluations and preflight aside
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]  # {"run.seed": 1}
    config_text: str
    refits: dict[Key, Curve]  # metrics of refits by (role, name)
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that a sweep gave it

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))

    @property
    def failed(self) -> str | None:
        """Returns why the run's last start failed; None where it did not."""
        return self.record.failed()

    @property
    def iterations(self) -> int:
        """Returns how many iterations have a line; evaluations and preflight are none."""
        own = (
            curve.iterations[-1]
            for (scope, _), curve in self.curves.items()
            if scope in self.updates and curve.iterations
        )
        return max(own, default=-1) + 1

    def unlearned(self) -> list[str]:
        """Returns a sentence for each role that had iterations and no update."""
        found = {role: curve.values[-1] for (role, name), curve in self.curves.items() if name == "update"}
        return unlearned(self.updates, found)

    def confusion(self, scope: str) -> list[Curve]:
        """Returns a verifier's counts CELLS of a scope, equally long; an empty list where the scope has none."""
        found = [self.curves.get((scope, f"confusion/{cell}"), Curve()) for cell in CELLS]
        lengths = {len(curve.values) for curve in found}
        return found if len(lengths) == 1 and lengths != {0} else []

    def evaluated(self) -> dict[str, Curve]:
        """Returns the held-out metrics by name, such as `generator/accuracy_sampled`, counts aside."""
        return {
            name: curve
            for (scope, name), curve in self.curves.items()
            if scope == EVAL and not name.rpartition("/")[2].startswith("num_") and curve.values
        }


def read_run(directory: Path, *, name: str | None = None) -> RunMetrics:
    """Reads a run directory. A directory without a run in it gives no metrics."""
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
    """Returns whether a run has left something in the directory."""
    own = RunRecord(directory).directory
    return own.metrics.exists() or own.config.exists()


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a tree of mappings as {"run.seed": 1}; empty mappings vanish."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flatten(inner, f"{prefix}{key}.") if isinstance(inner, Mapping) else {f"{prefix}{key}": inner}
    return found


class _Columns:
    """The columns that lines of metrics and refits are sorted into, by scope and then by name."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.updates: dict[str, int] = {}
        self.curves: Columns = defaultdict(lambda: defaultdict(Curve))
        self.seconds: Columns = defaultdict(lambda: defaultdict(Curve))
        self.refits: Columns = defaultdict(lambda: defaultdict(Curve))

    def take(self, row: MetricsRow) -> None:
        """Adds a line of metrics. Raises ValueError for a line whose iteration or cycle cannot be."""
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
        """Adds a line of refits."""
        own = {name.removeprefix("refit/"): v for name, v in line.items() if name not in ("role", "version")}
        _add(self.refits[line["role"]], 0, own)


def _add(columns: dict[str, Curve], iteration: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        curve = columns[name]
        if math.isfinite(value):  # as Curve.add does; a call for each of millions of values would take seconds
            curve.iterations.append(iteration)
            curve.values.append(value)
        else:
            curve.add(iteration, value)


def _flat(by_scope: Columns) -> dict[Key, Curve]:
    return {(scope, name): curve for scope, own in by_scope.items() for name, curve in own.items()}
