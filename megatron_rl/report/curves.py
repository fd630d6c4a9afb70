"""Groups the metrics of runs into charts, sorted by questions such as whether the run learned, and downsamples the
charts for the HTML page."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.report.reading import METRICS, PREFLIGHT, SFT, Clock, Curve, Key, RunMetrics, metric_of
from megatron_rl.run.metrics import EVAL

# Maximum number of values of one line of a chart.
# A downsampled line has two values for each bucket of iterations: the minimum and the maximum.
MAX_POINTS = 2000
PAGE_POINTS = 400_000  # maximum number of values of all lines of an HTML page together
FEWEST = 100  # lower bound of the maximum number of values per line, which is reduced on pages with many lines
LEARN, UPDATE, REST = "learn", "update", "rest"  # keys of METRICS["questions"]
PALETTE = ("#2f7ed8", "#e07b39", "#2ca25f", "#9467bd", "#d64550", "#17a2b8", "#b8860b", "#7f7f7f")


@dataclass(slots=True, kw_only=True)
class Chart:
    """A chart: lines that are drawn in one coordinate system."""

    question: str
    title: str
    unit: str = ""  # unit of all lines; "" if it is unknown
    about: str = ""
    dots: bool = False  # whether the points are separate measurements (evaluations), which are not smoothed
    lines: list[tuple[int, str, Curve]] = field(default_factory=list)  # (index of the run, name of the line, values)

    @property
    def trouble(self) -> str:
        """Returns sentences about values that are NaN or infinite, or "" if all values are finite."""
        return "; ".join(curve.trouble for _, _, curve in self.lines if curve.trouble)


@dataclass(slots=True)
class Sorted:
    """The metrics of runs, sorted: charts of the metrics that change, and {question: texts} about the metrics that
    never change."""

    charts: list[Chart]
    constants: dict[str, list[str]]


def sort_curves(runs: Sequence[RunMetrics]) -> Sorted:
    """Distributes the metrics of one or several runs over charts. A metric that never changes gets no chart and is
    returned as text.

    With one run, a chart shows one metric, with a line for each role. But metrics whose names have the same part before
    the slash (reward/outcome, reward/format) share a chart, which then shows one role and one unit. With several runs,
    a chart shows one metric of one role, with a line for each run.
    """
    charts: dict[tuple[str, ...], Chart] = {}
    constants: dict[str, dict[str, list[str]]] = {}  # {question: {"name = value": scopes}}
    drawn = [_drawn(run) for run in runs]
    evaluated = {name for curves in drawn for scope, name in curves if scope == EVAL}
    for key in dict.fromkeys(key for curves in drawn for key in curves):
        lines = [(place, curves[key]) for place, curves in enumerate(drawn) if key in curves and curves[key].values]
        if not lines:
            continue
        question = question_of(*key)
        values = [np.frombuffer(curve.values, np.float64) for _, curve in lines]
        least = min(float(array.min()) for array in values)
        if key[0] != EVAL and all(float(array.max()) == least for array in values):
            constants.setdefault(question, {}).setdefault(f"{key[1]} = {least:.4g}", []).append(key[0])
            continue
        title, name = _place(key, evaluated, alone=len(runs) == 1)
        unit = next((unit for unit, pattern in METRICS["units"] if re.search(pattern, key[1])), "")
        own_chart = Chart(question=question, title=title, unit=unit, dots=key[0] == EVAL)
        chart = charts.setdefault((question, title, unit), own_chart)
        about = METRICS["meanings"].get(key[1], METRICS["meanings"].get(key[1].partition("/")[0], ""))
        chart.about = chart.about or ("" if chart.dots else about)
        for place, curve in lines:
            same = [i for i, (index, _, drawn) in enumerate(chart.lines) if index == place and drawn == curve]
            if same:  # draw two lines of the run with equal values as one line with both names
                chart.lines[same[0]] = (place, f"{chart.lines[same[0]][1]} = {name}", curve)
            else:
                chart.lines.append((place, name, curve))
    texts = {q: [f"{', '.join(scopes)}: {text}" for text, scopes in facts.items()] for q, facts in constants.items()}

    def rank(chart: Chart) -> tuple[int, bool, int, str]:
        place = next((i for i, word in enumerate(METRICS["first"]) if word in chart.title), len(METRICS["first"]))
        return list(METRICS["questions"]).index(chart.question), not chart.dots, place, chart.title

    return Sorted(sorted(charts.values(), key=rank), texts)


def question_of(scope: str, name: str) -> str:
    """Returns the key in METRICS["questions"] of the question that a metric answers, such as "learn". The page groups
    charts by these questions."""
    last = name.rpartition("/")[2]
    if scope == PREFLIGHT:
        return UPDATE
    if scope == SFT and last in ("loss", "validation_loss"):
        return LEARN
    for question, pattern in METRICS["sorted"]:
        if re.search(pattern, name if scope != EVAL else last):
            return question
    return LEARN if scope == EVAL else REST


def plain_charts(sorted_charts: Sorted) -> list[dict[str, Any]]:
    """Returns the charts, downsampled, in the format of the page's scripts."""
    width = bucket_width(sorted_charts.charts)
    return [
        {
            "question": chart.question,
            "title": chart.title,
            "dots": chart.dots,
            "lines": [
                {"run": place, "name": name, "broken": curve.trouble, **thin(curve, width)}
                for place, name, curve in chart.lines
            ],
        }
        for chart in sorted_charts.charts
    ]


def bucket_width(charts: Iterable[Chart]) -> int:
    """Returns the number of iterations per bucket; 1 if no line needs downsampling. The number is the same for all
    lines of a page, so that all runs have points at the same iterations."""
    curves = [curve for chart in charts for _, _, curve in chart.lines]
    if not curves:
        return 1
    most = min(MAX_POINTS, max(FEWEST, PAGE_POINTS // len(curves)))
    if max(len(curve.values) for curve in curves) <= most:
        return 1
    iterations = max(max(curve.iterations) for curve in curves) + 1
    return -(-iterations // (most // 2))


def thin(curve: Curve, width: int) -> dict[str, list[Any]]:
    """Downsamples a curve to buckets of `width` iterations. If `width` is 1, all points are kept.

    Returns lists in the format of the page's scripts. `x` has the first iteration of each bucket, and `y` the mean of
    the values in each bucket. Unless `width` is 1, `low` and `high` have the minimum and maximum of each bucket.
    """
    iterations, values = np.frombuffer(curve.iterations, np.intc), np.frombuffer(curve.values, np.float64)
    if width == 1:
        return {"x": iterations.tolist(), "y": rounded(values)}
    buckets = iterations // width
    if (np.diff(buckets) < 0).any():
        order = np.argsort(buckets, kind="stable")
        buckets, values = buckets[order], values[order]
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
    counts = np.diff(starts, append=len(values))
    # The values are divided before they are added, so that the sums do not overflow
    means = np.add.reduceat(values / np.repeat(counts, counts), starts)
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    first = np.maximum(buckets[starts] * width, -1).tolist()
    return {"x": first, "y": rounded(means), "low": rounded(low), "high": rounded(high)}


def thin_clock(clock: Clock, most: int = MAX_POINTS // 2) -> dict[str, Any]:
    """Returns the cycles (from 1) and elapsed hours at up to `most` iterations. The page interpolates between them."""
    if not clock.iterations:
        return {"iteration": [], "cycle": [], "hours": []}
    iterations = np.frombuffer(clock.iterations, np.intc)
    last = np.flatnonzero(np.diff(iterations, append=iterations[-1] + 1))  # the last line of each iteration
    if len(last) > most:
        last = last[np.linspace(0, len(last) - 1, most).astype(int)]
    cycles, seconds = np.frombuffer(clock.cycles, np.int64), np.frombuffer(clock.seconds, np.float64)
    return {
        "iteration": iterations[last].tolist(),
        "cycle": (cycles[last] + 1).tolist(),
        "hours": rounded(np.nan_to_num(seconds[last] / 3600)),
    }


def rounded(values: np.ndarray) -> list[float]:
    """Returns the values rounded to six significant digits, which is more than a chart can show."""
    return [rounded_float(value) for value in values.tolist()]


def rounded_float(value: float) -> float:
    """Returns a float rounded to six significant digits."""
    return float(f"{value:.6g}")


def _drawn(run: RunMetrics) -> Mapping[Key, Curve]:
    """Returns the curves to draw: the logged metrics, with the counts of a verifier's verdicts replaced by the
    verifier's two accuracies, and the seconds of each phase."""
    curves = {
        key: curve
        for key, curve in run.curves.items()
        if not key[1].startswith("confusion/") and not key[1].rpartition("/")[2].startswith("num_")
    }
    for scope in run.updates:
        curves |= {(scope, name): curve for name, curve in class_accuracies(run, scope).items()}
    times = {
        (scope, f"seconds/{phase}"): curve for (scope, phase), curve in run.seconds.items() if scope in run.updates
    }
    return curves | times


def class_accuracies(run: RunMetrics, scope: str) -> dict[str, Curve]:
    """Returns the curves of a verifier's accuracies on correct and on wrong solutions, computed from the counts
    of verdicts. Returns {} if the scope has no such counts."""
    counts = run.confusion(scope)
    if not counts:
        return {}
    accuracies = {}
    for name, (good, bad) in (("says_correct_of_correct", counts[:2]), ("says_wrong_of_wrong", counts[2:])):
        curve = accuracies[name] = Curve()
        for iteration, correct, wrong in zip(good.iterations, good.values, bad.values, strict=True):
            if correct + wrong > 0:
                curve.add(iteration, correct / (correct + wrong))
    return accuracies


def _place(key: Key, evaluated: Collection[str], *, alone: bool) -> tuple[str, str]:
    """Returns (title of a metric's chart, name of its line). `evaluated`: names of all held-out metrics. `alone`:
    whether there is only one run."""
    scope, name = key
    if scope == EVAL:
        role = name.rpartition("/")[0]
        title = f"{role}: held out" if role else "held out"
        metric = metric_of(name, evaluated)
        return (title, metric) if alone else (f"{title}: {metric}", "")
    family, _, member = name.partition("/")
    if not alone:
        return f"{scope}: {name}", ""
    return (f"{scope}: {family}", member) if member else (name, scope)
