"""Turns samples into figures: for each set, with intervals over problems, and as the equal-weight mean over sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_rl.evaluation.estimators import (
    Calibration,
    Interval,
    best_of_n,
    calibration,
    macro_interval,
    majority,
    mean_interval,
    pass_at_k,
    weighted_vote,
)
from megatron_rl.evaluation.handoff import HANDOFF
from megatron_rl.evaluation.judge import JUDGE, judged
from megatron_rl.evaluation.samples import Sample, Samples
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.evaluation.text_scores import LEGIBILITY
from megatron_rl.rewards.pool import Graded, Outcome

RIGHT = 0.5  # a sample with a score above this counts as right
MACRO = "mean over sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFigures:
    """The figures of one measure on one set. `values`: for figures that are means over problems, their [P] values."""

    name: str
    title: str
    measure: str
    problems: int
    samples: int
    figures: Mapping[str, Interval]
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    calibration: Calibration | None = None


def figures_of(samples: Samples, name: str, title: str, measure: str, *, ks: Sequence[int], seed: int) -> SetFigures:
    """Returns the figures of one measure on a set whose samples are all there. `ks`: the values of k for pass@k."""
    groups = samples.rows(name, measure)
    about: dict[str, Any] = {
        "name": name,
        "title": title,
        "measure": measure,
        "problems": len(groups),
        "samples": sum(map(len, groups)),
    }
    if measure == JUDGE:
        found = judged(groups, seed=seed)
        unread = sum(row["predicted"] is None for group in groups for row in group)
        return SetFigures(**about, figures=found.figures, calibration=found.calibration, counts={"unreadable": unread})
    if measure in (SOLVE, HANDOFF):
        values, sure = answer_values(groups, ks), None
        rows = [row for group in groups for row in group]
        counts = {
            f"grading {kind.value}": sum(r["outcome"] == kind.value for r in rows)
            for kind in (Outcome.TIMEOUT, Outcome.ERROR)
        }
        counts |= {"empty": sum(not r["tokens"] for r in rows)}
        if rows and "confidence" in rows[0]:
            sure = _calibration(rows)
    else:
        values, counts, sure = text_values(groups, measure), {"left out": _left_out(groups, measure)}, None
    own = {figure: mean_interval(column, seed=seed) for figure, column in values.items() if column}
    return SetFigures(
        **about, figures=own, values=values, counts={k: v for k, v in counts.items() if v}, calibration=sure
    )


def answer_values(groups: Sequence[Sequence[Sample]], ks: Sequence[int]) -> dict[str, list[float]]:
    """Returns figures of graded answers, with one value for each problem. `groups`: [P][n] samples.

    They are accuracy (mean@n: the share that is right), reward (the mean score), pass@k, maj@n, best_of_n and vote_of_n
    by a verifier's weights, which count right answers too, and lengths.
    """
    n = min((len(group) for group in groups), default=0)
    right = [[float(row["score"] > RIGHT) for row in group] for group in groups]
    out = {"accuracy": [fmean(own) for own in right]}
    out |= {"reward": [fmean(row["score"] for row in group) for group in groups]}
    out |= {
        f"pass@{k}": [pass_at_k(len(own), round(sum(own)), k) for own in right]
        for k in ks
        if k <= n and (n > 1 or k > 1)
    }
    if n > 1:
        keys = [[row["key"] for row in group] for group in groups]
        out[f"maj@{n}"] = [majority(k, own) for k, own in zip(keys, right, strict=True)]
        if "confidence" in groups[0][0]:
            weights = [[row["confidence"] for row in group] for group in groups]
            out[f"best_of_{n}"] = [best_of_n(own, w) for own, w in zip(right, weights, strict=True)]
            out[f"vote_of_{n}"] = [weighted_vote(k, own, w) for k, own, w in zip(keys, right, weights, strict=True)]
    out["finished"] = [fmean(float(row["finished"]) for row in group) for group in groups]
    out["tokens"] = [fmean(row["tokens"] for row in group) for group in groups]
    if groups and "turns" in groups[0][0]:
        out["turns"] = [fmean(len(row["turns"]) for row in group) for group in groups]
        out["first_share"] = [
            fmean(sum(row["turns"][::2]) / max(1, row["tokens"]) for row in group) for group in groups
        ]
    return out


def text_values(groups: Sequence[Sequence[Sample]], measure: str) -> dict[str, list[float]]:
    """Returns figures of texts, with one value for each problem: cross_entropy, or each kl_ and gap_.

    A problem's value is the mean over its texts that were scored; problems without such a text are left out.
    """
    names = (
        ["cross_entropy"]
        if measure == LEGIBILITY
        else [name for name in groups[0][0] if name.startswith(("kl_", "gap_"))]
    )
    out = {}
    for name in names:
        scored = [[row[name] for row in group if row[name] is not None] for group in groups]
        out[name] = [fmean(values) for values in scored if values]
    return out


def macro(sets: Sequence[SetFigures], *, seed: int) -> dict[str, dict[str, Interval]]:
    """Returns {measure: {figure: equal-weight mean over its sets}}, for figures that every set of the measure has.

    Where a figure is no mean over problems (an F1), its interval comes from those of the sets, as if they were
    independent and normal.
    """
    out: dict[str, dict[str, Interval]] = {}
    for measure in dict.fromkeys(s.measure for s in sets):
        own = [s for s in sets if s.measure == measure]
        shared = [name for name in own[0].figures if all(name in s.figures for s in own)]
        out[measure] = {name: _combined(own, name, seed) for name in shared}
    return out


def gradings(samples: Samples, sets: Sequence[SetFigures]) -> list[Graded]:
    """Returns how every grading went, for rewards.pool.check_failures."""
    rows = [
        row for s in sets if s.measure in (SOLVE, HANDOFF) for group in samples.rows(s.name, s.measure) for row in group
    ]
    return [Graded(Outcome(row["outcome"]), row["score"], row.get("detail", "")) for row in rows]


def _combined(sets: Sequence[SetFigures], name: str, seed: int) -> Interval:
    if all(name in s.values for s in sets):
        return macro_interval([s.values[name] for s in sets], seed=seed)
    found = [s.figures[name] for s in sets]
    value = fmean(f.value for f in found)
    half = sum(((f.high - f.low) / 2) ** 2 for f in found) ** 0.5 / len(found)
    return found[0] if len(found) == 1 else Interval(value, max(0.0, value - half), min(1.0, value + half))


def _left_out(groups: Sequence[Sequence[Sample]], measure: str) -> int:
    name = (
        "cross_entropy"
        if measure == LEGIBILITY
        else next((n for n in groups[0][0] if n.startswith("kl_")), "")
        if groups
        else ""
    )
    return sum(row[name] is None for group in groups for row in group)


def _calibration(rows: Sequence[Sample]) -> Calibration | None:
    return calibration([row["confidence"] for row in rows], [row["score"] > RIGHT for row in rows])
