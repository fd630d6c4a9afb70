"""Computes metrics from samples: per problem set, with bootstrap intervals, and as equal-weight means over all sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from megatron_rl.evaluation.answer_values import answer_values
from megatron_rl.evaluation.handoff import HANDOFF
from megatron_rl.evaluation.judge import JUDGE, judged
from megatron_rl.evaluation.samples import Sample, Samples
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.evaluation.statistics import Calibration, Interval, calibration, macro_interval, mean_interval
from megatron_rl.evaluation.text_scores import LEGIBILITY
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.types import CUT_OFF, Outcome

MACRO = "mean over sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMetrics:
    """The metrics of one measure on one problem set. `values`: {metric: [P] values, one for each problem}, for metrics
    that are means over the P problems."""

    name: str
    title: str
    measure: str
    problems: int
    samples: int
    metrics: Mapping[str, Interval]
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    calibration: Calibration | None = None


def metrics_of(samples: Samples, name: str, title: str, measure: str, *, ks: Sequence[int], seed: int) -> SetMetrics:
    """Returns the metrics of one measure on the problem set `name`. All samples of the set must exist. `title`: the
    set's name in tables. `ks`: the values of k for pass@k."""
    groups = samples.rows(name, measure)
    rows = [row for group in groups for row in group]
    values: dict[str, list[float]] = {}
    metrics: Mapping[str, Interval] = {}
    sure = None
    if measure == JUDGE:
        metrics, sure = judged(groups, seed=seed)
        counts = {"unreadable": sum(row["predicted"] is None for row in rows)}
    elif rows and "score" in rows[0]:
        values = answer_values(groups, ks)
        failed = (Outcome.TIMEOUT.value, Outcome.ERROR.value, CUT_OFF)
        counts = {f"grading {kind.replace('_', ' ')}": sum(row["outcome"] == kind for row in rows) for kind in failed}
        counts["empty"] = sum(not row["tokens"] for row in rows)
        if "accuracy" in values and "confidence" in rows[0]:
            sure = calibration([row["confidence"] for row in rows], [row["correct"] for row in rows])
    else:
        names = text_names(measure, rows)
        values = text_values(groups, names)
        counts = {"left out": sum(row[names[0]] is None for row in rows) if names else 0}
    metrics = metrics or {metric: mean_interval(column, seed=seed) for metric, column in values.items() if column}
    return SetMetrics(
        name=name, title=title, measure=measure, problems=len(groups), samples=len(rows), metrics=metrics,
        values=values, counts={k: v for k, v in counts.items() if v}, calibration=sure,
    )  # fmt: skip


def text_names(measure: str, rows: Sequence[Sample]) -> list[str]:
    """Returns the names of the metrics of a measure that scores texts: "cross_entropy" for legibility; otherwise the
    fields of the rows that begin with kl_ or gap_, in the order of the first row."""
    if measure == LEGIBILITY:
        return ["cross_entropy"]
    return [name for name in rows[0] if name.startswith(("kl_", "gap_"))] if rows else []


def text_values(groups: Sequence[Sequence[Sample]], names: Sequence[str]) -> dict[str, list[float]]:
    """Returns {metric: one value for each problem} of scored texts. `groups`: [P][n], n samples of each of P problems.

    The value of a problem is the mean over the problem's scored texts. Problems without a scored text are left out.
    """
    columns = {}
    for name in names:
        scored = [[row[name] for row in group if row[name] is not None] for group in groups]
        columns[name] = [fmean(values) for values in scored if values]
    return columns


def macro(sets: Sequence[SetMetrics], *, seed: int) -> dict[str, dict[str, Interval]]:
    """Returns {measure: {metric: mean over the problem sets, with equal weights}}, for the metrics that all sets of a
    measure have.

    For a metric that is not a mean over problems, such as F1, the interval is computed from the intervals of the sets,
    as if the errors were independent and normally distributed.
    """
    means: dict[str, dict[str, Interval]] = {}
    for measure in dict.fromkeys(s.measure for s in sets):
        measured = [s for s in sets if s.measure == measure]
        means[measure] = {}
        for name in (name for name in measured[0].metrics if all(name in s.metrics for s in measured)):
            intervals = [s.metrics[name] for s in measured]
            if all(name in s.values for s in measured):
                means[measure][name] = macro_interval([s.values[name] for s in measured], seed=seed)
            elif len(intervals) == 1:
                means[measure][name] = intervals[0]
            else:
                value = fmean(f.value for f in intervals)
                half = sum(((f.high - f.low) / 2) ** 2 for f in intervals) ** 0.5 / len(intervals)
                means[measure][name] = Interval(value, max(0.0, value - half), min(1.0, value + half))
    return means


def gradings(samples: Samples, sets: Sequence[SetMetrics]) -> list[Graded]:
    """Returns the results of all gradings of an evaluation, in the form that rewards.grading_pool.check_failures
    expects."""
    rows = [
        row for s in sets if s.measure in (SOLVE, HANDOFF) for group in samples.rows(s.name, s.measure) for row in group
    ]
    return [Graded.of_label(row["outcome"], row["score"], row.get("detail", "")) for row in rows]
