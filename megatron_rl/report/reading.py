"""Reads the data of one run for a report: metrics (in compact arrays), settings, refits, and the names of damaged
files."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.run.metrics import EVAL, SPEED, MetricsRow, unlearned
from megatron_rl.run.run_directory import flatten
from megatron_rl.session.run_record import RunRecord

# How reports show metrics: questions, units, descriptions, and which metrics are shown first
METRICS: Mapping[str, Any] = yaml.load((Path(__file__).parent / "page/metrics.yaml").read_bytes(), yaml.CSafeLoader)
PREFLIGHT, SFT = "preflight", "sft"  # names of scopes of metrics lines that are not roles, in addition to EVAL
CELLS = ("tp", "fn", "tn", "fp")  # counts of a verifier's verdicts on correct (tp, fn) and wrong (tn, fp) solutions
MOST_ITERATIONS = 2**31 - 1  # a metrics line with a larger iteration index counts as damaged
# Reports show means over the first and over the last iterations of a run, each a fraction WINDOW of all iterations.
WINDOW = 0.2
Key = tuple[str, str]  # (scope, name of the metric)


@dataclass(slots=True)
class Curve:
    """The values of one metric of a run over its iterations (see run.metrics.MetricsRow.place), in the order of
    metrics.jsonl. Values that are not finite are left out and counted."""

    iterations: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))
    broken: int = 0  # number of values that were NaN or infinite
    first_broken: int = -1  # iteration of the first value that was NaN or infinite

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the mean of the first values and the mean of the last values. Each mean is over a fraction WINDOW of
        all values. Returns zeros if there are no values."""
        count = max(1, int(WINDOW * len(self.values)))
        return mean(self.values[:count]), mean(self.values[-count:])

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
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]  # flat settings, such as {"run.seed": 1}
    config_text: str
    curves: dict[Key, Curve] = field(default_factory=lambda: defaultdict(Curve))  # metrics by (scope, name)
    seconds: dict[Key, Curve] = field(default_factory=lambda: defaultdict(Curve))  # times by (scope, phase)
    refits: dict[Key, Curve] = field(default_factory=lambda: defaultdict(Curve))  # metrics of refits by (role, name)
    clock: Clock = field(default_factory=Clock)
    # {scope: number of lines in metrics.jsonl}, without the scopes of evaluations and of the preflight
    updates: dict[str, int] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that the run's sweep changed

    def take(self, row: MetricsRow) -> None:
        """Adds a line of metrics. Raises ValueError if its iteration or cycle is out of range."""
        if not (0 <= row.iteration <= MOST_ITERATIONS and abs(row.cycle) < 2**62):
            raise ValueError(f"iteration {row.iteration} and cycle {row.cycle} are out of range")
        iteration, cycle = row.place
        for name, value in row.metrics.items():
            self.curves[row.scope, name].add(iteration, value)
        for name, value in row.speed.items():
            self.curves[row.scope, f"{SPEED}{name}"].add(iteration, value)
        for name, value in row.time.items():
            self.seconds[row.scope, name].add(iteration, value)
        spent = sum(value for value in row.time.values() if math.isfinite(value))
        self.clock.iterations.append(iteration)
        self.clock.cycles.append(cycle)
        self.clock.seconds.append(self.clock.total + spent)
        if row.scope not in (EVAL, PREFLIGHT):
            self.updates[row.scope] = self.updates.get(row.scope, 0) + 1

    def take_refit(self, line: Mapping[str, Any]) -> None:
        """Adds a line of refits.jsonl."""
        for name, value in line.items():
            if name not in ("role", "version"):
                self.refits[line["role"], name.removeprefix("refit/")].add(0, value)

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))

    @property
    def failed(self) -> str | None:
        """Returns the reason why the run's last start failed, or None if it did not fail."""
        return self.record.failed()

    @property
    def iterations(self) -> int:
        """Returns the number of iterations so far: the largest iteration index in the lines of any role, plus 1."""
        last_iterations = (
            curve.iterations[-1]
            for (scope, _), curve in self.curves.items()
            if scope in self.updates and curve.iterations
        )
        return max(last_iterations, default=-1) + 1

    def unlearned(self) -> list[str]:
        """Returns a sentence for each trained role that had iterations but no update."""
        num_updates = {role: curve.values[-1] for (role, name), curve in self.curves.items() if name == "update"}
        return unlearned(self.updates, num_updates)

    def confusion(self, scope: str) -> list[Curve]:
        """Returns a curve for each of CELLS, the counts of a verifier's verdicts in a scope. The curves have equal
        lengths. Returns [] if the scope has no such counts."""
        counts = [self.curves.get((scope, f"confusion/{cell}"), Curve()) for cell in CELLS]
        lengths = {len(curve.values) for curve in counts}
        return counts if len(lengths) == 1 and lengths != {0} else []

    def evaluated(self) -> dict[str, Curve]:
        """Returns {name: curve} of the held-out metrics, such as `generator/accuracy`, without counts."""
        return {
            name: curve
            for (scope, name), curve in self.curves.items()
            if scope == EVAL and not name.rpartition("/")[2].startswith("num_") and curve.values
        }


def metric_of(name: str, names: Collection[str]) -> str:
    """Returns a held-out metric's name without the role and the set.

    If `names` has the metric for both sampled and greedy answers, the result has a prefix: `sampled accuracy` for
    `math/accuracy`, and `greedy accuracy` for `math/accuracy_greedy`.
    """
    plain, metric = name.removesuffix("_greedy"), name.rpartition("/")[2]
    if {plain, f"{plain}_greedy"} - {*names}:
        return metric
    return f"{'sampled' if plain == name else 'greedy'} {metric.removesuffix('_greedy')}"


def mean(values: Sequence[float]) -> float:
    """Returns the mean of values; 0 if there are none. The values are divided before they are added, so that the sum
    of very large values does not overflow."""
    return sum(value / len(values) for value in values)


def read_run(directory: Path, *, name: str | None = None) -> RunMetrics:
    """Reads a run directory. If the directory has no run, the result has no metrics. `name`: name of the run;
    None: the name of the directory."""
    record = RunRecord(directory)
    run = RunMetrics(
        name=name or record.directory.path.resolve().name, record=record, summary=record.summary(),
        settings=flatten(record.config()), config_text=record.config_text(),
    )  # fmt: skip
    record.each_metric(run.take)
    record.each_refit(run.take_refit)
    return run


def is_run(directory: Path) -> bool:
    """Returns whether the directory has metrics or the config of a run."""
    run_directory = RunRecord(directory).directory
    return run_directory.metrics.exists() or run_directory.config.exists()
