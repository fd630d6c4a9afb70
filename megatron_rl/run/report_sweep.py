"""Writes one HTML page about a sweep: the last figures of each run, means over seeds, and the curves of all runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_rl.run import record
from megatron_rl.run import report_figures as figures
from megatron_rl.run.directory import SWEEP
from megatron_rl.run.metrics import MetricsRow
from megatron_rl.run.report import damage, grid, page, show, table, warn

SEED = "run.seed"  # the setting that distinguishes runs of which a mean is taken
MAX_CHARTS = 24


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    run: str  # name of the run's directory inside the sweep's
    changes: Mapping[str, Any]  # its settings that differ from the sweep's config
    rows: Sequence[MetricsRow]
    finished: bool
    damage: Sequence[str] = ()  # sentences about files that could not be read

    @property
    def label(self) -> str:
        """Returns the run's changed settings as a short text."""
        return ", ".join(f"{name.rpartition('.')[2]}={show(value)}" for name, value in self.changes.items()) or self.run

    def ends(self) -> dict[str, float]:
        """Returns the last finite value of every evaluated figure; of training metrics if nothing was evaluated."""
        evaluated = any(row.scope == "eval" for row in self.rows)
        found: dict[str, float] = {}
        for row in self.rows:
            if (row.scope == "eval") == evaluated:
                own = (
                    row.metrics if evaluated else {f"{row.scope}/{name}": value for name, value in row.metrics.items()}
                )
                found |= {name: value for name, value in own.items() if math.isfinite(value)}
        return found


def read_points(directory: Path) -> list[Point]:
    """Reads the runs of a sweep, in the order of the sweep file. A run that has not begun has no rows."""
    out = []
    for entry in record.read_points(directory / SWEEP):
        run = record.RunRecord(directory / entry["run"])
        rows = [row for row in run.metrics() if row.scope != "gate"]
        finished = bool(run.summary().get("finished"))
        out.append(Point(entry["run"], entry["changes"], rows, finished, run.damage))
    return out


def write_sweep_report(directory: Path) -> Path:
    """Writes DIRECTORY/report.html and returns its path. Raises ConfigError without a whole sweep.json. Damage
    of the runs is said by the page and a warning."""
    points = read_points(directory)
    left_out = [line for point in points for line in point.damage]
    sections = [
        ("Damage", damage(left_out)),
        ("Runs", _runs(points)),
        ("Means over seeds", _means(points)),
        ("Curves", grid(figures.line_svg(chart) for chart in _charts(points))),
    ]
    done = sum(point.finished for point in points)
    path = directory / "report.html"
    path.write_text(
        page(directory.resolve().name, f"{done} of {len(points)} runs are finished", sections), encoding="utf-8"
    )
    warn(left_out, path)
    return path


def _names(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(name for point in points for name in point.ends() if "num_" not in name))


def _runs(points: Sequence[Point]) -> str:
    names, lines = _names(points), []
    for point in points:
        ends, state = (
            point.ends(),
            "finished" if point.finished else f"{len(point.rows)} lines so far" if point.rows else "not begun",
        )
        cells = [point.run, point.label, state, *(show(ends[name]) if name in ends else "" for name in names)]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return table(("run", "settings", "", *names), "".join(lines))


def _means(points: Sequence[Point]) -> str:
    """Returns a table of means over runs that differ in their seed alone; nothing when no run changes the seed.

    A mean is over the runs that have the figure; where these are not all of the group's it says how many they are.
    """
    if not any(SEED in point.changes for point in points):
        return ""
    groups: dict[str, list[Point]] = {}
    for point in points:
        rest = {name: value for name, value in point.changes.items() if name != SEED}
        groups.setdefault(Point(point.run, rest, (), False).label if rest else "all", []).append(point)
    names, lines = _names(points), []
    for label, group in groups.items():
        begun = [ends for ends in (point.ends() for point in group) if ends]
        cells = [label, str(len(begun)) if len(begun) == len(group) else f"{len(begun)} of {len(group)}"]
        cells += [_mean([ends[name] for ends in begun if name in ends], len(begun)) for name in names]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return table(("settings", "seeds", *names), "".join(lines)) + "<p>± is the standard deviation over seeds.</p>"


def _mean(values: Sequence[float], runs: int) -> str:
    """Returns mean and standard deviation as text, with the number of values where not all `runs` have one."""
    if not values:
        return ""
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    return f"{fmean(values):.4g}{spread}" + (f" ({len(values)} runs)" if len(values) < runs else "")


def _charts(points: Sequence[Point]) -> list[figures.Chart]:
    """Returns one chart for each figure, with a line for each run."""
    found: dict[str, dict[str, figures.Points]] = {}
    for point in points:
        for row in point.rows:
            for name, value in row.metrics.items():
                if math.isfinite(value) and "num_" not in name and "confusion" not in name:
                    title = name if row.scope == "eval" else f"{row.scope}: {name}"
                    xs, ys = found.setdefault(title, {}).setdefault(point.label, ([], []))
                    xs.append(row.turn)
                    ys.append(value)
    charts = [
        figures.Chart(title=title, lines=lines)
        for title, lines in found.items()
        if any(any(ys) for _, ys in lines.values())
    ]
    order = {name: place for place, name in enumerate(figures.LEADING)}
    key = [next((place for name, place in order.items() if name in chart.title), len(order)) for chart in charts]
    return [chart for _, chart in sorted(zip(key, charts, strict=True), key=lambda pair: pair[0])][:MAX_CHARTS]
