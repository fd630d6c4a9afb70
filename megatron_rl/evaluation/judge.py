"""Evaluates a verifier on solutions with known errors: ProcessBench, outcome and step verdicts, calibration of votes,
and rejections for a wrong reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import Engine, Sampling
from megatron_rl.evaluation.confusion import Confusion, confusion, harmonic_mean, step_confusion
from megatron_rl.evaluation.draw import ProblemSet, draw_within
from megatron_rl.evaluation.samples import Sample
from megatron_rl.evaluation.solve import sample_of
from megatron_rl.evaluation.statistics import Calibration, Interval, bootstrap, calibration, mean_interval
from megatron_rl.rewards.verdicts import final_verdict, step_verdicts
from megatron_rl.texts.text import decode

JUDGE = "judge"
NO_ERROR = -1
SHOWN = ("steps", "label", "correct", "step_labels")  # fields of the judged solution that are copied to every sample


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A verifier that judges every solution of a set `sampling.n` times."""

    engine: Engine
    tokenizer: Any
    sampling: Sampling
    context: int | None = None
    measure: str = field(default=JUDGE, init=False)

    def __call__(self, problems: ProblemSet, places: Sequence[int]) -> list[list[Sample]]:
        """Returns `sampling.n` verifications (samples) for each of the solutions with the indices `places`.

        If a prompt leaves no space for an answer in the context, its verifications are empty and marked as unfinished.
        """
        prompts = {place: problems.prompts[place] for place in places}
        completions = draw_within(self.engine, prompts, self.sampling, self.context)
        groups: list[list[Sample]] = []
        for place in places:
            values = problems.problems[place].values
            groups.append(
                [
                    sample_of(problems, place, j, self.measure)
                    | {name: values[name] for name in SHOWN}
                    | reading(decode(self.tokenizer, c.tokens).text, len(values["steps"]))
                    | {"finished": c.stop.finished, "tokens": len(c.tokens)}
                    for j, c in enumerate(completions[place])
                ]
            )
        return groups


def verifier_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values for the placeholders of a verifier's template. Each step of the solution is a <step> block, as
    in the verifier's training."""
    steps = "\n".join(f"<step>{step}</step>" for step in values["steps"])
    return {
        "question": str(values["question"]),
        "solution": f"<think>\n{steps}\n</think>",
        "num_steps": str(len(values["steps"])),
    }


def reading(text: str, num_steps: int) -> Sample:
    """Parses a verifier's text about a solution with `num_steps` steps. Returns a dictionary with the `response`, the
    `verdicts` on the steps, the `final` verdict and `predicted`.

    `predicted` is the index of the first step that the verifier calls wrong. It is -1 if the verifier calls every step
    correct, and None if it calls no step wrong but the number of verdicts is not `num_steps`. None is always a wrong
    prediction.
    """
    verdicts = step_verdicts(text)
    wrong = next((i for i, correct in enumerate(verdicts[:num_steps]) if not correct), None)
    predicted = wrong if wrong is not None else NO_ERROR if len(verdicts) == num_steps else None
    return {"response": text, "verdicts": list(verdicts), "final": final_verdict(text), "predicted": predicted}


def vote(predictions: Sequence[int | None]) -> int | None:
    """Returns the most frequent prediction. In a tie, returns the smallest. Predictions of None are ignored. Returns
    None if all predictions are None."""
    counts = Counter(p for p in predictions if p is not None)
    most = max(counts.values(), default=0)
    return min((p for p, count in counts.items() if count == most), default=None)


def judged(groups: Sequence[Sequence[Sample]], *, seed: int = 0) -> tuple[dict[str, Interval], Calibration | None]:
    """Computes a verifier's metrics from [P][n] samples: n verifications of each of P solutions. Returns (metrics with
    confidence intervals, calibration of the votes).

    The bootstrap resamples the P solutions. Metrics of single verifications are averaged over the n samples.
    """
    wrong = np.array([group[0]["label"] != NO_ERROR for group in groups])
    hits = np.array([fmean(float(row["predicted"] == row["label"]) for row in group) for group in groups])
    metrics = _processbench("", hits, wrong, seed)
    if len(groups[0]) > 1:
        votes = np.array([float(vote([row["predicted"] for row in group]) == group[0]["label"]) for group in groups])
        metrics |= _processbench("_vote", votes, wrong, seed)
    for name, statistic in _STATISTICS.items():
        interval = bootstrap(
            len(groups), lambda rows, of=statistic: of([row for i in rows for row in groups[i]]), seed=seed,
            resamples=500,
        )  # fmt: skip
        metrics[name] = interval
    aligned = [fmean(float(len(r["verdicts"]) == len(r["steps"])) for r in group) for group in groups]
    metrics["aligned"] = mean_interval(aligned, seed=seed)
    metrics["finished"] = mean_interval([fmean(float(r["finished"]) for r in group) for group in groups], seed=seed)
    confidences = [fmean(float(row["final"] is True) for row in group) for group in groups]
    sure = calibration(confidences, [bool(group[0]["correct"]) for group in groups])
    return {name: value for name, value in metrics.items() if value is not None}, sure


def _processbench(suffix: str, hits: np.ndarray, wrong: np.ndarray, seed: int) -> dict[str, Interval | None]:
    """Returns the metrics of ProcessBench (arXiv 2412.06559): accuracy on solutions with an error (the verifier must
    find the first wrong step), accuracy on solutions without an error, and f1, the harmonic mean of both. `suffix`:
    end of the metrics' names."""

    def accuracy(rows: np.ndarray, of: bool) -> float | None:
        chosen = hits[rows][wrong[rows] == of]
        return float(chosen.mean()) if len(chosen) else None

    statistics = {
        "processbench_f1": lambda rows: harmonic_mean(accuracy(rows, True), accuracy(rows, False)),
        "error_accuracy": lambda rows: accuracy(rows, True),
        "correct_accuracy": lambda rows: accuracy(rows, False),
    }
    return {name + suffix: bootstrap(len(hits), of, seed=seed) for name, of in statistics.items()}


def _outcomes(rows: Sequence[Sample]) -> Confusion:
    """Returns the confusion counts of the verifier's final verdicts, with respect to whether the solutions' final
    answers are correct."""
    return confusion((row["final"], bool(row["correct"])) for row in rows)


def located_when_rejected(rows: Sequence[Sample]) -> float | None:
    """Returns the share of the rejected wrong solutions in which the verifier found the first wrong step. Returns None
    if the verifier rejected no wrong solution.

    A low share means that the verifier rejects wrong solutions for wrong reasons.
    """
    rejected = [r for r in rows if r["label"] != NO_ERROR and not r["correct"] and r["final"] is False]
    return fmean(float(r["predicted"] == r["label"]) for r in rejected) if rejected else None


def step_counts(rows: Sequence[Sample]) -> Confusion:
    """Returns the confusion counts of the verdicts on single steps with respect to the steps' gold labels. Samples
    whose number of verdicts differs from the number of steps are left out.

    If only the first wrong step of a solution is labelled, the steps after it are left out.
    """
    aligned = [row for row in rows if len(row["verdicts"]) == len(row["steps"])]
    labels = []
    for row in aligned:
        correct = len(row["steps"]) if row["label"] == NO_ERROR else row["label"]
        leading = [True] * correct + [False] * (correct < len(row["steps"]))
        labels.append(leading if row["step_labels"] is None else [bool(label) for label in row["step_labels"]])
    verdicts = [row["verdicts"][: len(gold)] for row, gold in zip(aligned, labels, strict=True)]
    return step_confusion(verdicts, labels)


# Name of a metric -> function that computes the metric from the samples of several solutions.
_STATISTICS: Mapping[str, Callable[[Sequence[Sample]], float | None]] = {
    "outcome_accuracy": lambda rows: _outcomes(rows).accuracy,
    "outcome_correct_accuracy": lambda rows: _outcomes(rows).correct_accuracy,
    "outcome_wrong_accuracy": lambda rows: _outcomes(rows).wrong_accuracy,
    "outcome_f1": lambda rows: _outcomes(rows).f1,
    "located_when_rejected": located_when_rejected,
    "step_f1": lambda rows: step_counts(rows).f1,
}
