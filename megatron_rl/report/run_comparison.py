"""Compares runs in a report: their settings, their last figures, and means over runs that differ in the seed alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_rl.report import record
from megatron_rl.report.html_page import show, table
from megatron_rl.report.reading import RunFigures, read_run
from megatron_rl.report.run_sections import HAS_DIRECTION, LOWER_IS_BETTER
from megatron_rl.run.directory import FREE_KEYS, SWEEP

SEED = "run.seed"  # the setting that distinguishes runs of which a mean is taken
MAX_LABEL = 60  # characters; an arm with more settings of its own has the name of its first run
MAX_COLUMNS = 12  # runs that have a column each in the table of settings
# The 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; beyond the last, that of the normal.
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.960


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs that differ in their seed alone."""

    label: str
    runs: Sequence[int]  # places of them


def read_runs(paths: Sequence[Path]) -> list[RunFigures]:
    """Reads run directories, and all runs of sweeps in the order of the sweep's file. A run of a sweep that has not
    begun has no figures. Raises ConfigError without a whole sweep.json."""
    found: list[RunFigures] = []
    for path in paths:
        if not (path / SWEEP).exists():
            found.append(read_run(path))
            continue
        for entry in record.read_points(path / SWEEP):
            run = read_run(path / entry["run"], name=entry["run"])
            run.changes = entry["changes"]
            found.append(run)
    names = [run.name for run in found]
    for run in found:  # two runs of one name are told apart by their places
        if names.count(run.name) > 1:
            run.name = f"{run.record.directory.path.resolve().parent.name}/{run.name}"
    return found


def differences(runs: Sequence[RunFigures]) -> dict[str, list[Any]]:
    """Returns the settings that differ, each with its value in every run (None: it is not set there). Settings that
    touch no number, such as the run's name, are left out."""
    settings = [{**run.settings, **run.changes} for run in runs]
    known = [own for own in settings if own]
    if len(known) < 2:
        return {}
    names = dict.fromkeys(name for own in known for name in own)
    free = tuple(f"{key}." for key in FREE_KEYS)
    return {
        name: [own.get(name) for own in settings]
        for name in sorted(names)
        if not f"{name}.".startswith(free) and len({repr(own.get(name)) for own in known}) > 1
    }


def arms(runs: Sequence[RunFigures]) -> list[Arm]:
    """Returns the runs by their settings, the seed aside. An arm is called by what distinguishes it."""
    changed = {name: values for name, values in differences(runs).items() if name != SEED}
    found: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        if run.changes:
            own = {name: value for name, value in run.changes.items() if name != SEED}
        else:
            own = {name: values[place] for name, values in changed.items() if values[place] is not None}
        label = ", ".join(f"{name.rpartition('.')[2]}={show(value)}" for name, value in own.items())
        found.setdefault(label, []).append(place)
    if len(found) == 1:
        return [Arm("all", [*range(len(runs))])]
    return [
        Arm(label if 0 < len(label) <= MAX_LABEL else runs[places[0]].name, places) for label, places in found.items()
    ]


def ends(run: RunFigures) -> dict[str, float]:
    """Returns the last value of every evaluated figure; of training figures if nothing was evaluated."""
    evaluated = run.evaluated()
    if evaluated:
        return {name: curve.values[-1] for name, curve in evaluated.items()}
    return {f"{scope}/{name}": curve.values[-1] for (scope, name), curve in run.curves.items() if curve.values}


def interval(values: Sequence[float]) -> float | None:
    """Returns the half width of the 95 % interval of a mean by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    quantile = T[len(values) - 2] if len(values) - 2 < len(T) else NORMAL
    return quantile * stdev(values) / math.sqrt(len(values))


def runs_table(runs: Sequence[RunFigures], found: Sequence[Arm]) -> str:
    """Returns a table of the runs' states and last figures."""
    names, lines, best = _names(runs), [], _best(runs)
    arm_of = {place: arm.label for arm in found for place in arm.runs}
    for place, run in enumerate(runs):
        own = ends(run)
        turns = run.turns
        state = "finished" if run.finished else f"{turns} turns so far" if turns else "not begun"
        state = f"failed after {turns} turns" if run.failed else state
        seed = {**run.settings, **run.changes}.get(SEED, "")
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (arm_of[place], str(seed), state))
        cells += "".join(_end_cell(own.get(name), best.get(name)) for name in names)
        lines.append(f'<tr><th scope="row">{escape(run.name)}</th>{cells}</tr>')
    return table(("run", "settings", "seed", "", *names), "".join(lines))


def _end_cell(value: float | None, best: float | None) -> str:
    kind = ' class="best"' if value is not None and value == best else ""
    return f"<td{kind}>{'' if value is None else show(value)}</td>"


def _best(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Returns the best last value of each evaluated figure that differs among the runs and has a better way."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, curve in run.evaluated().items():
            if HAS_DIRECTION.search(name):
                found.setdefault(name, []).append(curve.values[-1])
    best = {name: min(own) if LOWER_IS_BETTER.search(name) else max(own) for name, own in found.items()}
    return {name: value for name, value in best.items() if len(set(found[name])) > 1}


def means_table(runs: Sequence[RunFigures], found: Sequence[Arm]) -> str:
    """Returns a table of means over the runs of each arm with their 95 % intervals; nothing without several seeds.

    A mean is over the runs that have the figure; where these are not all that have begun it says how many they are.
    """
    if all(len(arm.runs) < 2 for arm in found):
        return ""
    names, lines = _names(runs), []
    for arm in found:
        begun = [own for own in (ends(runs[place]) for place in arm.runs) if own]
        seeds = str(len(begun)) if len(begun) == len(arm.runs) else f"{len(begun)} of {len(arm.runs)}"
        cells = [arm.label, seeds, *(_mean([o[name] for o in begun if name in o], len(begun)) for name in names)]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    note = "± is half of the 95 % interval of the mean over seeds, by Student's t."
    return table(("settings", "seeds", *names), "".join(lines)) + f'<p class="meta">{note}</p>'


def differences_table(runs: Sequence[RunFigures]) -> str:
    """Returns a table of the settings that differ; nothing where none do."""
    found, lines = differences(runs), []
    for name, values in found.items():
        if len(runs) <= MAX_COLUMNS:
            cells = ["" if value is None else show(value) for value in values]
        else:
            counts: dict[str, int] = {}
            for value in values:
                text = "not set" if value is None else show(value)
                counts[text] = counts.get(text, 0) + 1
            cells = [", ".join(f"{text} ({count} runs)" for text, count in counts.items())]
        row = "".join(f"<td>{escape(cell[:300])}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{row}</tr>')
    heads = [run.name for run in runs] if len(runs) <= MAX_COLUMNS else ["values"]
    return table(("setting", *heads), "".join(lines)) if lines else ""


def _names(runs: Sequence[RunFigures]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in ends(run) if "num_" not in name))


def _mean(values: Sequence[float], runs: int) -> str:
    """Returns a mean and its interval as text, with the number of values where not all `runs` have one."""
    if not values:
        return ""
    half = interval(values)
    spread = f" ± {half:.2g}" if half is not None else ""
    return f"{fmean(values):.4g}{spread}" + (f" ({len(values)} runs)" if len(values) < runs else "")


def arm_places(found: Sequence[Arm], count: int) -> list[int]:
    """Returns for each of `count` runs the place of its arm."""
    places: Mapping[int, int] = {run: number for number, arm in enumerate(found) for run in arm.runs}
    return [places[run] for run in range(count)]
