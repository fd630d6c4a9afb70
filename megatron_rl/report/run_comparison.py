"""Compares runs in a report: their settings, their last metrics, and means over runs that differ only in the seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_rl.report.html_page import show
from megatron_rl.report.reading import RunMetrics, read_run
from megatron_rl.report.run_sections import HAS_DIRECTION, LOWER_IS_BETTER
from megatron_rl.run.run_directory import FREE_KEYS, SWEEP
from megatron_rl.session import run_record

SEED = "run.seed"  # means are taken over runs that differ only in this setting
# Maximum number of characters of the label of an arm (group of runs that differ only in the seed).
# An arm with a longer label is shown under the name of its first run.
MAX_LABEL = 60
MAX_COLUMNS = 12  # maximum number of runs in the table of settings, which has one column per run
# The 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom.
# For more degrees of freedom, NORMAL is used: the quantile of the normal distribution.
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.960


@dataclass(frozen=True, slots=True)
class Arm:
    """A group of runs that differ only in their seed."""

    label: str
    runs: Sequence[int]  # indices of the runs


def read_runs(paths: Sequence[Path]) -> list[RunMetrics]:
    """Reads run directories, and all runs of sweeps in the order of sweep.json. A sweep's run that has not begun is
    included without metrics. Raises ConfigError if a sweep.json is damaged."""
    runs: list[RunMetrics] = []
    for path in paths:
        if not (path / SWEEP).exists():
            runs.append(read_run(path))
            continue
        for entry in run_record.read_points(path / SWEEP):
            run = read_run(path / entry["run"], name=entry["run"])
            run.changes = entry["changes"]
            runs.append(run)
    names = [run.name for run in runs]
    for run in runs:  # runs with equal names get the names of their parent directories as prefixes
        if names.count(run.name) > 1:
            run.name = f"{run.record.directory.path.resolve().parent.name}/{run.name}"
    return runs


def differences(runs: Sequence[RunMetrics]) -> dict[str, list[Any]]:
    """Returns the settings that differ between runs, as {setting: [value in each run, or None if not set]}. Settings
    that do not affect results, such as the run's name, are left out."""
    settings = [{**run.settings, **run.changes} for run in runs]
    recorded = [flat for flat in settings if flat]
    if len(recorded) < 2:
        return {}
    names = dict.fromkeys(name for flat in recorded for name in flat)
    free = tuple(f"{key}." for key in FREE_KEYS)
    return {
        name: [flat.get(name) for flat in settings]
        for name in sorted(names)
        if not f"{name}.".startswith(free) and len({repr(flat.get(name)) for flat in recorded}) > 1
    }


def arms(runs: Sequence[RunMetrics]) -> list[Arm]:
    """Groups the runs into arms: groups of runs whose settings are equal except for the seed. The label of an arm
    consists of the settings that distinguish it from other arms."""
    changed = {name: values for name, values in differences(runs).items() if name != SEED}
    grouped: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        if run.changes:
            changes = {name: value for name, value in run.changes.items() if name != SEED}
        else:
            changes = {name: values[place] for name, values in changed.items() if values[place] is not None}
        label = ", ".join(f"{name.rpartition('.')[2]}={show(value)}" for name, value in changes.items())
        grouped.setdefault(label, []).append(place)
    if len(grouped) == 1:
        return [Arm("all", [*range(len(runs))])]
    return [
        Arm(label if 0 < len(label) <= MAX_LABEL else runs[places[0]].name, places) for label, places in grouped.items()
    ]


def ends(run: RunMetrics) -> dict[str, float]:
    """Returns the last value of every held-out metric, or of every training metric if there was no evaluation."""
    evaluated = run.evaluated()
    if evaluated:
        return {name: curve.values[-1] for name, curve in evaluated.items()}
    return {f"{scope}/{name}": curve.values[-1] for (scope, name), curve in run.curves.items() if curve.values}


def interval(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % confidence interval of a mean (Student's t), or None if there are fewer than
    two values."""
    if len(values) < 2:
        return None
    quantile = T[len(values) - 2] if len(values) - 2 < len(T) else NORMAL
    return quantile * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page: the names of its columns, and its rows in the template's format."""

    heads: Sequence[str]
    rows: Sequence[Any]


def runs_table(runs: Sequence[RunMetrics], run_arms: Sequence[Arm]) -> Table:
    """Returns a table of the state and the last metrics of each run. A row is (name of the run, cells, [(last value of
    a metric, whether this value is the best)])."""
    names, rows, best = _names(runs), [], _best(runs)
    arm_of = {place: arm.label for arm in run_arms for place in arm.runs}
    for place, run in enumerate(runs):
        last, iterations = ends(run), run.iterations
        state = "finished" if run.finished else f"{iterations} iterations so far" if iterations else "not begun"
        state = f"failed after {iterations} iterations" if run.failed else state
        seed = {**run.settings, **run.changes}.get(SEED, "")
        values = [(last.get(name), name in last and last[name] == best.get(name)) for name in names]
        rows.append((run.name, [arm_of[place], str(seed), state], values))
    return Table(["run", "settings", "seed", "", *names], rows)


def _best(runs: Sequence[RunMetrics]) -> dict[str, float]:
    """Returns {metric: best last value} of the held-out metrics that differ among the runs, and for which it is known
    whether higher or lower is better."""
    last_values: dict[str, list[float]] = {}
    for run in runs:
        for name, curve in run.evaluated().items():
            if HAS_DIRECTION.search(name):
                last_values.setdefault(name, []).append(curve.values[-1])
    best = {name: min(values) if LOWER_IS_BETTER.search(name) else max(values) for name, values in last_values.items()}
    return {name: value for name, value in best.items() if len(set(last_values[name])) > 1}


def means_table(runs: Sequence[RunMetrics], run_arms: Sequence[Arm]) -> Table | None:
    """Returns a table of means with 95 % intervals over the runs of each arm; None if every arm has only one run.

    Each mean is over the runs of an arm that have the metric. If some runs of the arm have begun and lack the metric,
    the cell also shows how many runs the mean is over.
    """
    if all(len(arm.runs) < 2 for arm in run_arms):
        return None
    names, rows = _names(runs), []
    for arm in run_arms:
        begun = [last for last in (ends(runs[place]) for place in arm.runs) if last]
        seeds = str(len(begun)) if len(begun) == len(arm.runs) else f"{len(begun)} of {len(arm.runs)}"
        rows.append([arm.label, seeds, *(_mean([o[name] for o in begun if name in o], len(begun)) for name in names)])
    return Table(["settings", "seeds", *names], rows)


def differences_table(runs: Sequence[RunMetrics]) -> Table:
    """Returns a table of the settings that differ, with rows (setting, cells)."""
    rows, wide = [], len(runs) > MAX_COLUMNS
    for name, values in differences(runs).items():
        texts = ["" if value is None else show(value) for value in values]
        counts = Counter(text or "not set" for text in texts)
        cells = [", ".join(f"{text} ({count} runs)" for text, count in counts.items())] if wide else texts
        rows.append((name, [cell[:300] for cell in cells]))
    return Table(["setting", *(["values"] if wide else [run.name for run in runs])], rows)


def _names(runs: Sequence[RunMetrics]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in ends(run) if "num_" not in name))


def _mean(values: Sequence[float], runs: int) -> str:
    """Returns a mean and its interval as text, with the number of values if it is less than `runs`."""
    if not values:
        return ""
    half = interval(values)
    spread = f" ± {half:.2g}" if half is not None else ""
    return f"{fmean(values):.4g}{spread}" + (f" ({len(values)} runs)" if len(values) < runs else "")
