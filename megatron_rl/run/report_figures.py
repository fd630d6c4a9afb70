"""Draws metrics and rollouts for the report, as SVG text that takes the page's colours, or as one PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.run.metrics import MetricsRow

PALETTE = ("#2f7ed8", "#e07b39", "#2ca25f", "#9467bd", "#d64550", "#17a2b8", "#b8860b", "#7f7f7f")
INK = "#010203"  # a mark for the page's text colour; it becomes `currentColor` in SVG
LEADING = ("accuracy", "reward", "loss", "kl_ref", "entropy", "length", "engine_gap")  # metrics that are drawn first
# Titles of metrics whose own names say too little on a page. Times and places on the page are counted in turns of the
# run; what a run of agents logs as `turns` are the answers of one episode.
TITLES = {
    "turns": "answers in an episode",
    "tool_calls": "calls of tools in an episode",
    "cuts": "cut transcripts in an episode",
    "episodes": "episodes that failed",
}
MAX_BARS = 60  # most bars in the chart of times by turn
FEW = 20  # a line with fewer points is not smoothed
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron_rl",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
Points = tuple[list[int], list[float]]  # x, y


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: lines to be drawn together over one axis."""

    title: str
    lines: Mapping[str, Points]  # name -> points over turns
    dots: bool = False  # every point is a measurement of its own (an evaluation), so that nothing is smoothed


def charts(rows: Sequence[MetricsRow]) -> list[Chart]:
    """Returns one chart for each metric, with a line for each role.

    The families `a/b` (reward/outcome, reward/format) get one chart for each role. Evaluations (see
    `evaluation_charts`), confusion counts, values that are not finite and metrics that are always 0 are left out.
    """
    families: dict[tuple[str, str], dict[str, Points]] = {}
    for row in rows:
        if row.scope == "eval":
            continue
        for name, value in row.metrics.items():
            family, _, member = name.partition("/")
            if family == "confusion" or not math.isfinite(value):
                continue
            named = TITLES.get(family, family)
            title = f"{row.scope}: {named}" if member else named
            xs, ys = families.setdefault((family, title), {}).setdefault(member or row.scope, ([], []))
            xs.append(row.turn)
            ys.append(value)
    drawn = {key: lines for key, lines in families.items() if any(any(ys) for _, ys in lines.values())}
    order = {name: place for place, name in enumerate(LEADING)}
    keys = sorted(drawn, key=lambda key: (order.get(key[0], len(order)), key))
    return [Chart(title=title, lines=drawn[family, title]) for family, title in keys]


def evaluation_charts(rows: Sequence[MetricsRow]) -> list[Chart]:
    """Returns one chart for each role with its held-out figures over turns.

    A role's `accuracy_sampled` is logged as `role/accuracy_sampled`. Counts (`role/num_problems`) are not drawn.
    """
    found: dict[str, dict[str, Points]] = {}
    for row in rows:
        if row.scope != "eval":
            continue
        for name, value in row.metrics.items():
            role, _, metric = name.rpartition("/")
            if math.isfinite(value) and not metric.startswith("num_"):
                xs, ys = found.setdefault(role or "model", {}).setdefault(metric, ([], []))
                xs.append(row.turn)
                ys.append(value)
    return [Chart(title=f"{role}: held-out problems", lines=lines, dots=True) for role, lines in sorted(found.items())]


def draw_lines(axes: Axes, chart: Chart) -> None:
    """Draws each line thin and pale as measured, with its running mean on top when there are enough points.

    `NAME_greedy` is a dashed line in the colour of NAME or NAME_sampled.
    """
    bases = list(dict.fromkeys(map(_base, chart.lines)))
    colors = dict(zip(bases, _colors(len(bases)), strict=True))
    for name, (xs, ys) in chart.lines.items():
        color, dashed = colors[_base(name)], "--" if name.endswith("_greedy") else "-"
        if chart.dots or len(xs) < FEW:
            axes.plot(xs, ys, color=color, linestyle=dashed, linewidth=1.4, marker="o", markersize=3.5, label=name)
        else:
            axes.plot(xs, ys, color=color, linewidth=0.7, alpha=0.35)
            axes.plot(xs, smooth(ys), color=color, linewidth=1.6, label=name)
    axes.set_title(chart.title)
    axes.set_xlabel("turn")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(True, linewidth=0.4, alpha=0.25)
    if len(chart.lines) > 5:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.legend(loc="best")


def draw_time(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    """Draws the seconds of each turn by phase, as stacked bars.

    When there are more than `MAX_BARS` turns, neighbouring ones share a bar, which shows their mean.
    """
    turns = sorted({row.turn for row in rows if row.time})
    phases = sorted({phase for row in rows for phase in row.time})
    if not turns:
        return
    width = max(1, math.ceil((turns[-1] - turns[0] + 1) / MAX_BARS))
    starts = list(range(turns[0], turns[-1] + 1, width))
    bottom = [0.0] * len(starts)
    for color, phase in zip(_colors(len(phases)), phases, strict=True):
        heights = [0.0] * len(starts)
        for row in rows:
            if phase in row.time:
                heights[(row.turn - turns[0]) // width] += row.time[phase] / width
        axes.bar(
            [start + width / 2 - 0.5 for start in starts], heights, width * 0.9, bottom=bottom, color=color, label=phase
        )
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_title("seconds per turn by phase")
    axes.set_xlabel("turn")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_time_by_role(axes: Axes, seconds: Mapping[str, Mapping[str, float]]) -> None:
    """Draws one horizontal bar for each role, divided by phase. `seconds[role][phase]`."""
    phases = sorted({phase for by_phase in seconds.values() for phase in by_phase})
    roles = list(seconds)
    left = [0.0] * len(roles)
    for color, phase in zip(_colors(len(phases)), phases, strict=True):
        widths = [seconds[role].get(phase, 0.0) for role in roles]
        axes.barh(roles, widths, left=left, color=color, label=phase, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_title("seconds in all, by role and phase")
    axes.set_xlabel("s")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_histograms(axes: Axes, title: str, early: Sequence[float], late: Sequence[float]) -> None:
    """Draws two distributions over the same bins, each as shares of its own rollouts."""
    values = [*early, *late]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = 20
    edges = [low + (high - low) * i / bins for i in range(bins)] + [high]
    for color, name, part in ((PALETTE[7], "first turns", early), (PALETTE[0], "last turns", late)):
        if part:
            weights = [1 / len(part)] * len(part)
            axes.hist(
                part,
                bins=edges,
                weights=weights,
                color=color,
                alpha=0.55,
                label=f"{name} (mean {sum(part) / len(part):.3g})",
            )
    axes.set_title(title)
    axes.set_ylabel("share")
    axes.legend(loc="best")


def svg(figure: Figure) -> str:
    """Returns the figure as an `<svg>` element for an HTML page. Text stays text and takes the page's colour."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.05, metadata={"Date": None}
        )
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def line_svg(chart: Chart) -> str:
    """Returns a chart as SVG."""
    figure, axes = _figure(4.6, 2.5)
    with matplotlib.rc_context(_STYLE):
        draw_lines(axes, chart)
    return svg(figure)


def time_svgs(rows: Sequence[MetricsRow], seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns two SVGs of measured times: by role, and by turn."""
    by_role, role_axes = _figure(5.2, 0.9 + 0.45 * len(seconds))
    by_turn, turn_axes = _figure(5.2, 2.5)
    with matplotlib.rc_context(_STYLE):
        draw_time_by_role(role_axes, seconds)
        draw_time(turn_axes, rows)
    return [svg(by_role), svg(by_turn)]


def histogram_svg(title: str, early: Sequence[float], late: Sequence[float]) -> str:
    """Returns the distributions in the first and the last turns as SVG."""
    figure, axes = _figure(4.6, 2.3)
    with matplotlib.rc_context(_STYLE):
        draw_histograms(axes, title, early, late)
    return svg(figure)


def draw_overview(rows: Sequence[MetricsRow], title: str, path: Path) -> None:
    """Draws the main curves on one white sheet: held-out figures, training curves (at most eight), and the times."""
    style = {**_STYLE, **{key: "#222222" for key, value in _STYLE.items() if value == INK}}
    chosen = evaluation_charts(rows)[:3]
    chosen += [chart for chart in charts(rows) if chart not in chosen][: 8 - len(chosen)]
    with matplotlib.rc_context(style):
        columns = 3
        figure = Figure(figsize=(13, 2.9 * math.ceil((len(chosen) + 1) / columns) + 0.4), layout="constrained")
        grid = figure.subplots(math.ceil((len(chosen) + 1) / columns), columns, squeeze=False).ravel()
        for axes, chart in zip(grid, chosen, strict=False):
            draw_lines(axes, chart)
        draw_time(grid[len(chosen)], rows)
        for axes in grid[len(chosen) + 1 :]:
            axes.set_visible(False)
        figure.suptitle(title, fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130, facecolor="white")


def smooth(values: Sequence[float]) -> list[float]:
    """Returns running means over a centred window of about a tenth of the line.

    The window is narrower toward the ends, so that nothing is shifted.
    """
    half = max(1, len(values) // 20)
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        return figure, figure.add_subplot()


def _base(name: str) -> str:
    return name.removesuffix("_greedy").removesuffix("_sampled")


def _colors(count: int) -> Iterable[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]
