"""Groups the metrics of runs into charts, sorted by questions such as whether the run learned, and downsamples the
charts for the HTML page."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.report.reading import PREFLIGHT, SFT, Clock, Curve, Key, RunMetrics, metric_of
from megatron_rl.run.metrics import EVAL

# Maximum number of values of one line of a chart; a downsampled line has two values, minimum and maximum, for each
# bucket
MAX_POINTS = 2000
PAGE_POINTS = 400_000  # maximum number of values of all lines of an HTML page together
FEWEST = 100  # on a page with many lines, the limit of values per line is not lowered below this number
LEARN, VERIFY, UPDATE, TIME, REST = "learn", "verify", "update", "time", "rest"
QUESTIONS = {
    LEARN: "Does it learn?",
    VERIFY: "Is the verifier correct?",
    UPDATE: "Is the update sane?",
    TIME: "Where does the time go?",
    REST: "Other metrics",
}
# [(question, pattern)]: a metric belongs to the question of the first pattern that matches the metric's name.
_SORTED = (
    (TIME, r"^seconds|^speed"),
    (
        LEARN,
        r"^reward|^answers|^tool_calls|^cuts|^episodes|^groups_without_signal|^finished|^graded|^steps_per_solution"
        r"|^length",
    ),
    (VERIFY, r"confusion|f1|aligned|predicted_positive|verdict|agree|review|judge|^says_|^rests$|^signal$"),
    (LEARN, r"accuracy|outcome|score|success|exploitab|validation_loss|train_loss"),
    (
        UPDATE,
        r"^loss|^kl|^value|^returns|entropy|clip|^ratio|grad|^engine_|^lr$|skipped|optimizer_steps|alpha|staleness|^trained_late|version|advant",
    ),
    (UPDATE, r"logprob|mask|reject|truncat|weight|^preflight"),
    (TIME, r"tokens|micro_batch|imbalance|samples|refit|memory"),
)
# [(unit, pattern)]: a metric has the unit of the first pattern that matches its name.
_UNITS = (
    ("reward", r"^reward(/|$)"),
    ("seconds", r"seconds|_s$"),
    ("tokens a second", r"tokens_per_second"),
    ("TFLOP/s", r"tflops"),
    ("tokens", r"tokens|length"),
    ("nats", r"entropy|(^|[/_])kl(?!_coef)|logprob|^engine_gap"),
    (
        "count",
        r"^(graded|episodes|replaced)/|answers|tool_calls|^cuts|^update|_lag|^staleness|samples$|_steps",
    ),
    ("share", r"accura|f1|pass@|maj@|frac|share|finished|mfu|idle|^trained_late|^says_|positive|aligned|agree|match"),
    ("share", r"without_signal|alike|success|verdict|signal$|mixed_versions|truncat|skipped|rests$"),
    ("reward", r"reward|score"),
)
PALETTE = ("#2f7ed8", "#e07b39", "#2ca25f", "#9467bd", "#d64550", "#17a2b8", "#b8860b", "#7f7f7f")
_FIRST = ("accuracy", "outcome", "reward", "f1", "loss", "kl_ref", "entropy", "grad_norm", "engine_gap", "seconds")
# {metric or family of metrics: description}, for metrics whose names are not clear enough.
MEANINGS = {
    "answers": "answers in an episode, of all its agents",
    "tool_calls": "calls of tools in an episode",
    "cuts": "cut transcripts in an episode",
    "episodes": "episodes that failed",
    "reward": "mean over the rollouts of an iteration",
    "groups_without_signal": "share of groups whose rewards are all equal: nothing is learned from them",
    "signal": "moving share of groups whose rewards differ, in the generator's iterations",
    "rests": "1: the verifier's iteration was empty, as nobody asks it while outcomes suffice",
    "skipped": "1: no update, as nothing in the iteration's rollouts says what is better",
    "finished": "share of rollouts that ended by themselves",
    "engine_gap": "mean |log-prob of trainer - log-prob of engine| of the sampled tokens; near 0 is sound",
    "engine_kl": "KL between engine and trainer, from the sampled tokens",
    "kl_ref": "KL from the reference, from the sampled tokens",
    "value": "mean of a critic's values",
    "returns": "mean of the returns that a critic's values should be",
    "value_error": "mean squared difference of value and return; below the returns' variance, the critic has learned",
    "value_clip_frac": "share of trained tokens whose value is clipped",
    "clip_frac": "share of trained tokens whose ratio is clipped",
    "ratio": "mean of new over old probability of the trained tokens",
    "entropy": "mean entropy of the next token, in nats",
    "grad_norm": "norm of the gradient before clipping",
    "predicted_positive": "share that the verifier calls correct",
    "says_correct_of_correct": "share of correct solutions that the verifier calls correct",
    "says_wrong_of_wrong": "share of wrong solutions that the verifier calls wrong",
    "verdicts_match": "share of verifications with one verdict for each step",
    "step_agreement": "share of the verdicts on steps that are true",
    "staleness": "updates that a rollout has missed since it was written",
    "trained_late": "share of rollouts by the number of updates that they have missed since they were begun",
    "length": "tokens that a model wrote, mean",
    "seconds": "measured seconds of an iteration",
    "speed": "of an update: operations and tokens a second of one device, and seconds of its parts; idle shares",
}


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

    One run: a chart shows one metric, with a line for each role. But metrics whose names have the same part before the
    slash (reward/outcome, reward/format) share a chart, which then shows one role and one unit. Several runs: a chart
    shows one metric of one role, with a line for each run.
    """
    charts: dict[tuple[str, ...], Chart] = {}
    constants: dict[str, dict[str, list[str]]] = {}  # {question: {"name = value": scopes}}
    drawn = [_drawn(run) for run in runs]
    evaluated = {name for own in drawn for scope, name in own if scope == EVAL}
    for key in dict.fromkeys(key for own in drawn for key in own):
        found = [(place, own[key]) for place, own in enumerate(drawn) if key in own and own[key].values]
        if not found:
            continue
        question = question_of(*key)
        values = [np.frombuffer(curve.values, np.float64) for _, curve in found]
        least = min(float(own.min()) for own in values)
        if key[0] != EVAL and all(float(own.max()) == least for own in values):
            constants.setdefault(question, {}).setdefault(f"{key[1]} = {least:.4g}", []).append(key[0])
            continue
        title, name = _place(key, evaluated, alone=len(runs) == 1)
        unit = next((unit for unit, pattern in _UNITS if re.search(pattern, key[1])), "")
        own_chart = Chart(question=question, title=title, unit=unit, dots=key[0] == EVAL)
        chart = charts.setdefault((question, title, unit), own_chart)
        about = MEANINGS.get(key[1], MEANINGS.get(key[1].partition("/")[0], ""))
        chart.about = chart.about or ("" if chart.dots else about)
        for place, curve in found:
            same = [i for i, (other, _, drawn) in enumerate(chart.lines) if other == place and drawn == curve]
            if same:  # the run has another line with equal values; the two lines are drawn as one line with both names
                chart.lines[same[0]] = (place, f"{chart.lines[same[0]][1]} = {name}", curve)
            else:
                chart.lines.append((place, name, curve))
    texts = {q: [f"{', '.join(scopes)}: {text}" for text, scopes in own.items()] for q, own in constants.items()}

    def rank(chart: Chart) -> tuple[int, bool, int, str]:
        place = next((i for i, word in enumerate(_FIRST) if word in chart.title), len(_FIRST))
        return list(QUESTIONS).index(chart.question), not chart.dots, place, chart.title

    return Sorted(sorted(charts.values(), key=rank), texts)


def question_of(scope: str, name: str) -> str:
    """Returns the question that a metric answers, a key of QUESTIONS."""
    last = name.rpartition("/")[2]
    if scope == PREFLIGHT:
        return UPDATE
    if scope == SFT and last in ("loss", "validation_loss"):
        return LEARN
    for question, pattern in _SORTED:
        if re.search(pattern, name if scope != EVAL else last):
            return question
    return LEARN if scope == EVAL else REST


def plain_charts(found: Sorted) -> list[dict[str, Any]]:
    """Returns the charts, downsampled, in the format of the page's scripts."""
    width = bucket_width(found.charts)
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
        for chart in found.charts
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

    Returns lists in the format of the page's scripts: `x`, the first iteration of each bucket, `y`, its mean, and,
    unless `width` is 1, its minimum `low` and its maximum `high`.
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
    """Returns the cycles (from 1) and hours at up to `most` iterations, between which the page interpolates."""
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
    """Returns the curves to draw: the logged metrics, with the verifier's counts replaced by its two accuracies, and
    the seconds of each phase."""
    own = {
        key: curve
        for key, curve in run.curves.items()
        if not key[1].startswith("confusion/") and not key[1].rpartition("/")[2].startswith("num_")
    }
    for scope in run.updates:
        own |= {(scope, name): curve for name, curve in class_accuracies(run, scope).items()}
    times = {
        (scope, f"seconds/{phase}"): curve for (scope, phase), curve in run.seconds.items() if scope in run.updates
    }
    return own | times


def class_accuracies(run: RunMetrics, scope: str) -> dict[str, Curve]:
    """Returns the curves of a verifier's accuracies on correct and on wrong solutions, computed from its counts.
    Returns {} if the scope has no counts."""
    known = run.confusion(scope)
    if not known:
        return {}
    out = {}
    for name, (good, bad) in (("says_correct_of_correct", known[:2]), ("says_wrong_of_wrong", known[2:])):
        curve = out[name] = Curve()
        for iteration, correct, wrong in zip(good.iterations, good.values, bad.values, strict=True):
            if correct + wrong > 0:
                curve.add(iteration, correct / (correct + wrong))
    return out


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
