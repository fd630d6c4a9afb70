"""Draws the main curves of a run into one PNG image, for a README or a slide. The HTML report does not use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.report.curves import PALETTE, Chart, bucket_width, sort_curves, thin
from megatron_rl.report.reading import RunMetrics

INK = "#222222"
MOST = 9  # maximum number of charts
COLUMNS = 3  # charts per row
FEW = 20  # lines with fewer points are not smoothed
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw_overview(run: RunMetrics, path: Path) -> Path:
    """Draws up to MOST charts of a run into a PNG image, first the held-out metrics, then training metrics. Returns the
    path of the image."""
    charts = sorted(sort_curves([run]).charts, key=lambda chart: not chart.dots)[:MOST]
    rows = max(1, math.ceil(len(charts) / COLUMNS))
    width = bucket_width(charts)
    with rc_context(_STYLE):
        figure = Figure(figsize=(13, 2.9 * rows + 0.4), layout="constrained")
        grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for axes, chart in zip(grid, charts, strict=False):
            _draw(axes, chart, width)
        for axes in grid[len(charts) :]:
            axes.set_visible(False)
        figure.suptitle(run.name.replace("$", r"\$"), fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130, facecolor="white")
    return path


def _draw(axes: Axes, chart: Chart, width: int) -> None:
    """Draws a chart. A line with enough points is drawn thin and pale, with its running mean on top. `width`:
    iterations per bucket."""
    for place, (_, name, curve) in enumerate(chart.lines):
        thinned, color = thin(curve, width), PALETTE[place % len(PALETTE)]
        x, y = thinned["x"], thinned["y"]
        label = name.replace("$", r"\$")
        if chart.dots or len(x) < FEW:
            axes.plot(x, y, color=color, linewidth=1.4, marker="o", markersize=3.5, label=label)
        else:
            axes.plot(x, y, color=color, linewidth=0.7, alpha=0.35)
            axes.plot(x, smooth(y), color=color, linewidth=1.6, label=label)
    axes.set_title(chart.title.replace("$", r"\$"))
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(True, linewidth=0.4, alpha=0.25)
    axes.legend(loc="best")


def smooth(values: Sequence[float]) -> list[float]:
    """Returns running means of a line's values over a centered window of about a tenth of the line.

    The window is narrower near the ends, so that it stays centered.
    """
    half = max(1, len(values) // 20)
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(value / len(window) for value in window))
    return means
