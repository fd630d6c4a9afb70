"""A verifier on solutions with known errors: ProcessBench, outcome and step judgements, confidence of votes, and right
labels for wrong reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.engines.base import Completion, Engine, Sampling
from megatron_rl.evaluation.confusion import Confusion, confusion, harmonic_mean, step_confusion
from megatron_rl.evaluation.draw import ProblemSet
from megatron_rl.evaluation.estimators import Calibration, Interval, bootstrap, calibration, mean_interval
from megatron_rl.evaluation.judging import Judging, Question, judge_all
from megatron_rl.evaluation.samples import Sample
from megatron_rl.evaluation.solve import sample_of
from megatron_rl.rewards.verdicts import final_verdict, step_verdicts
from megatron_rl.types import Prompt, Stop

JUDGE = "judge"
NO_ERROR = -1
NOTHING = Completion(tokens=np.empty(0), logprobs=np.empty(0), stop=Stop.LENGTH)
SHOWN = ("steps", "label", "correct", "step_labels")  # of the solution, in every sample


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A verifier that judges the solutions of a set, `sampling.n` times each."""

    engine: Engine
    tokenizer: Any
    sampling: Sampling
    context: int | None = None
    measure: str = field(default=JUDGE, init=False)

    def __call__(self, problems: ProblemSet, places: Sequence[int]) -> list[list[Sample]]:
        """Returns the verifications of problems[place], for each place. A problem without room for an answer gets empty
        ones, cut."""

        def steps(place: int) -> int:
            return len(problems.problems[place].values["steps"])

        question = Question[int, Sample](
            prompt=lambda place: Prompt(id=str(place), tokens=problems.prompts[place]),
            read=lambda place, text: reading(text, steps(place)),
        )
        judging = Judging(self.engine, self.tokenizer, self.sampling, question, context=self.context)
        found = judge_all(judging, {place: place for place in places})
        out = []
        for place in places:
            rows = [j.opinion | _length(j.completion) for j in found[place]]
            rows = rows or [reading("", steps(place)) | _length(NOTHING)] * self.sampling.n
            known = {name: problems.problems[place].values[name] for name in SHOWN}
            out.append([sample_of(problems, place, j, self.measure) | known | row for j, row in enumerate(rows)])
        return out


@dataclass(frozen=True, slots=True)
class Judged:
    """The figures of one set's samples with their intervals, and how sure the votes are."""

    figures: dict[str, Interval]
    calibration: Calibration | None
    steps: Confusion


def verifier_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a verifier's template is filled with; the steps in the tags that its training showed it."""
    steps = "\n".join(f"<step>{step}</step>" for step in values["steps"])
    return {
        "question": str(values["question"]),
        "solution": f"<think>\n{steps}\n</think>",
        "num_steps": str(len(values["steps"])),
    }


def reading(text: str, num_steps: int) -> Sample:
    """Reads a verification of K steps -> its text, step verdicts, final verdict, and `predicted`, the first step that
    it calls wrong.

    -1: it calls none wrong, with a verdict for each; None: it cannot be read so, and agrees with no label.
    """
    verdicts = step_verdicts(text)
    wrong = next((i for i, right in enumerate(verdicts[:num_steps]) if not right), None)
    predicted = wrong if wrong is not None else NO_ERROR if len(verdicts) == num_steps else None
    return {"response": text, "verdicts": list(verdicts), "final": final_verdict(text), "predicted": predicted}


def vote(predictions: Sequence[int | None]) -> int | None:
    """Returns the most frequent prediction; among equally frequent ones the earliest step; None without any that can be
    read."""
    counts = Counter(p for p in predictions if p is not None)
    most = max(counts.values(), default=0)
    return min((p for p, count in counts.items() if count == most), default=None)


def judged(groups: Sequence[Sequence[Sample]], *, seed: int = 0) -> Judged:
    """Computes the figures of a set of [P][n] samples. A solution is one problem of the bootstrap; figures of one
    verification are means over n."""
    wrong = np.array([group[0]["label"] != NO_ERROR for group in groups])
    hits = np.array([fmean(float(row["predicted"] == row["label"]) for row in group) for group in groups])
    figures: dict[str, Interval | None] = {}
    figures |= _processbench("", hits, wrong, seed)
    if len(groups[0]) > 1:
        votes = np.array([float(vote([row["predicted"] for row in group]) == group[0]["label"]) for group in groups])
        figures |= _processbench("_vote", votes, wrong, seed)
    figures |= _outcomes(groups, seed)
    figures |= _probe(groups, seed)
    steps = _steps(groups)
    figures["step_f1"] = (
        _by_solution(groups, lambda rows: _steps([groups[i] for i in rows]).f1, seed) if steps.total else None
    )
    figures["aligned"] = mean_interval(
        [fmean(float(len(r["verdicts"]) == len(r["steps"])) for r in group) for group in groups], seed=seed
    )
    figures["finished"] = mean_interval([fmean(float(r["finished"]) for r in group) for group in groups], seed=seed)
    confidences = [fmean(float(row["final"] is True) for row in group) for group in groups]
    sure = calibration(confidences, [bool(group[0]["correct"]) for group in groups])
    return Judged({name: value for name, value in figures.items() if value is not None}, sure, steps)


def _processbench(suffix: str, hits: np.ndarray, wrong: np.ndarray, seed: int) -> dict[str, Interval | None]:
    """Computes f1, the harmonic mean of the accuracies on solutions with an error (found at its step) and without one
    (arXiv 2412.06559)."""

    def accuracy(rows: np.ndarray, of: bool) -> float | None:
        chosen = hits[rows][wrong[rows] == of]
        return float(chosen.mean()) if len(chosen) else None

    def f1(rows: np.ndarray) -> float | None:
        parts = accuracy(rows, True), accuracy(rows, False)
        return None if parts[0] is None or parts[1] is None else harmonic_mean(parts[0], parts[1])

    count = len(hits)
    return {
        f"processbench_f1{suffix}": bootstrap(count, f1, seed=seed),
        f"error_accuracy{suffix}": bootstrap(count, lambda rows: accuracy(rows, True), seed=seed),
        f"correct_accuracy{suffix}": bootstrap(count, lambda rows: accuracy(rows, False), seed=seed),
    }


def _outcomes(groups: Sequence[Sequence[Sample]], seed: int) -> dict[str, Interval | None]:
    """Compares final verdicts with whether the final answer is right: accuracy, that of each class, and their harmonic
    mean."""

    def counts(rows: Sequence[int] | np.ndarray) -> Confusion:
        return confusion((row["final"], bool(row["correct"])) for i in rows for row in groups[i])

    def share(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    return {
        "outcome_accuracy": _by_solution(groups, lambda rows: share((c := counts(rows)).tp + c.tn, c.total), seed),
        "outcome_right_accuracy": _by_solution(groups, lambda rows: share((c := counts(rows)).tp, c.tp + c.fn), seed),
        "outcome_wrong_accuracy": _by_solution(groups, lambda rows: share((c := counts(rows)).tn, c.tn + c.fp), seed),
        "outcome_f1": _by_solution(groups, lambda rows: counts(rows).f1, seed),
    }


def _probe(groups: Sequence[Sequence[Sample]], seed: int) -> dict[str, Interval | None]:
    """Finds right labels with wrong reasons: among verifications that rightly reject a solution with an error, the
    share that find its first one."""

    def located(rows: np.ndarray) -> float | None:
        rejected = [
            r for i in rows for r in groups[i] if r["label"] != NO_ERROR and not r["correct"] and r["final"] is False
        ]
        return fmean(float(r["predicted"] == r["label"]) for r in rejected) if rejected else None

    return {"located_when_rejected": _by_solution(groups, located, seed)}


def _steps(groups: Sequence[Sequence[Sample]]) -> Confusion:
    """Compares step verdicts with gold labels, where there is one verdict per step. With the first error alone known,
    steps up to it count."""
    rows = [row for group in groups for row in group if len(row["verdicts"]) == len(row["steps"])]
    labels = [_gold_steps(row) for row in rows]
    return step_confusion([row["verdicts"][: len(gold)] for row, gold in zip(rows, labels, strict=True)], labels)


def _gold_steps(row: Sample) -> list[bool]:
    if row["step_labels"] is not None:
        return [bool(label) for label in row["step_labels"]]
    return [True] * len(row["steps"]) if row["label"] == NO_ERROR else [True] * row["label"] + [False]


def _length(completion: Completion) -> Sample:
    return {"finished": completion.stop.finished, "tokens": len(completion.tokens)}


def _by_solution(groups: Sequence[Sequence[Sample]], statistic: Any, seed: int) -> Interval | None:
    return bootstrap(len(groups), statistic, seed=seed, resamples=500)
