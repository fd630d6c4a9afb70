"""Compares judgements with the truth: confusion counts and the F1 of two class accuracies. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Confusion:
    """The confusion counts of a judge's judgements of items, such as solutions. The positive class is "correct".

    `tp`: number of correct items judged correct. `fp`: wrong items judged correct. `tn`: wrong items judged wrong.
    `fn`: correct items judged wrong.
    """

    tp: int = 0
    fp: int = 0
    tn: int = 0
    fn: int = 0

    @property
    def total(self) -> int:
        return self.tp + self.fp + self.tn + self.fn

    @property
    def predicted_positive(self) -> float:
        """Returns the share of items that were judged correct; 0.0 if there are no judgements.

        A value near 0 or 1 means that the judge almost always gives the same judgement.
        """
        return _share(self.tp + self.fp, self.total) or 0.0

    @property
    def accuracy(self) -> float | None:
        """Returns the share of items that were judged rightly; None if there are no judgements."""
        return _share(self.tp + self.tn, self.total)

    @property
    def correct_accuracy(self) -> float | None:
        """Returns the judge's accuracy on correct items; None if there are no correct items."""
        return _share(self.tp, self.tp + self.fn)

    @property
    def wrong_accuracy(self) -> float | None:
        """Returns the judge's accuracy on wrong items; None if there are no wrong items."""
        return _share(self.tn, self.tn + self.fp)

    @property
    def f1(self) -> float | None:
        """Returns ProcessBench's F1, the harmonic mean of the judge's accuracy on correct items and its accuracy on
        wrong items.

        Returns None if there are no correct items or no wrong items.
        """
        return harmonic_mean(self.correct_accuracy, self.wrong_accuracy)

    def metrics(self) -> dict[str, float]:
        """Returns a dictionary of the metrics confusion/tp, confusion/fp, confusion/tn, confusion/fn and
        predicted_positive."""
        counts = {"tp": self.tp, "fp": self.fp, "tn": self.tn, "fn": self.fn}
        return {f"confusion/{name}": float(n) for name, n in counts.items()} | {
            "predicted_positive": self.predicted_positive
        }


def confusion(judgements: Iterable[tuple[bool | None, bool]]) -> Confusion:
    """Returns the confusion counts of (judgement, truth) pairs. A judgement that could not be parsed (None) is counted
    as "wrong"."""
    pairs = [(bool(judgement), truth) for judgement, truth in judgements]
    return Confusion(
        tp=pairs.count((True, True)),
        fp=pairs.count((True, False)),
        tn=pairs.count((False, False)),
        fn=pairs.count((False, True)),
    )


def step_confusion(verdicts: Sequence[Sequence[bool]], labels: Sequence[Sequence[bool]]) -> Confusion:
    """Returns the confusion counts of a verifier's verdicts on the single steps of solutions. `verdicts`, `labels`:
    [S][K], the verdict and the gold label of each of K steps of S solutions.

    Solutions whose number of verdicts differs from the number of labels are left out.
    """
    aligned = [(v, g) for v, g in zip(verdicts, labels, strict=True) if len(v) == len(g)]
    return confusion((verdict, truth) for v, g in aligned for verdict, truth in zip(v, g, strict=True))


def harmonic_mean(a: float | None, b: float | None) -> float | None:
    """Returns the harmonic mean 2ab / (a + b) of two numbers; 0 if both numbers are 0, and None if one is None."""
    if a is None or b is None:
        return None
    return 2 * a * b / (a + b) if a + b else 0.0


def _share(part: int, total: int) -> float | None:
    return part / total if total else None
