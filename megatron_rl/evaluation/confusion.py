"""Scores judgements against the truth: confusion counts and the F1 of two class accuracies. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Confusion:
    """The counts of judgements by (what was said, what is true).

    tp: said correct, is correct. fp: said correct, is wrong. tn: said wrong, is wrong. fn: said wrong, is correct.
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
        """Returns the share that was judged correct; 0.0 without judgements.

        Near 0 or 1 the judge always says the same.
        """
        return (self.tp + self.fp) / self.total if self.total else 0.0

    @property
    def f1(self) -> float | None:
        """Returns ProcessBench's F1, the harmonic mean of the accuracies on the correct and on the wrong.

        None when one of the two classes is empty.
        """
        correct, wrong = self.tp + self.fn, self.tn + self.fp
        if not correct or not wrong:
            return None
        return harmonic_mean(self.tp / correct, self.tn / wrong)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics confusion/tp, confusion/fp, confusion/tn, confusion/fn and predicted_positive."""
        counts = {"tp": self.tp, "fp": self.fp, "tn": self.tn, "fn": self.fn}
        return {f"confusion/{name}": float(n) for name, n in counts.items()} | {
            "predicted_positive": self.predicted_positive
        }


def confusion(judgements: Iterable[tuple[bool | None, bool]]) -> Confusion:
    """Counts (said, truth) pairs. A judgement that could not be read (None) counts as said wrong."""
    pairs = [(bool(said), truth) for said, truth in judgements]
    return Confusion(
        tp=pairs.count((True, True)),
        fp=pairs.count((True, False)),
        tn=pairs.count((False, False)),
        fn=pairs.count((False, True)),
    )


def step_confusion(verdicts: Sequence[Sequence[bool]], labels: Sequence[Sequence[bool]]) -> Confusion:
    """Counts [S][K] verdicts against gold labels, over the steps of S solutions.

    A solution counts only when it has as many verdicts as labels.
    """
    aligned = [(v, g) for v, g in zip(verdicts, labels, strict=True) if len(v) == len(g)]
    return confusion((said, truth) for v, g in aligned for said, truth in zip(v, g, strict=True))


def agreement(counts: Confusion) -> float | None:
    """Returns the share of judgements that are true; None when there are none."""
    return (counts.tp + counts.tn) / counts.total if counts.total else None


def harmonic_mean(a: float, b: float) -> float:
    """Returns 2ab / (a + b); 0 when both are 0."""
    return 2 * a * b / (a + b) if a + b else 0.0
