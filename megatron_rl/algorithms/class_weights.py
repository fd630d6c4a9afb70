"""Weights of the verifier's advantages by the class of the solution that was judged (arXiv 2505.15034, eq. 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EPSILON = 1e-6


@dataclass(frozen=True)
class ClassCounts:
    """Moving counts of rows whose solution is correct and wrong; None before the first batch.

    The state a checkpoint holds: `dataclasses.asdict(counts)` and `ClassCounts(**state)`.
    """

    correct: float | None = None
    wrong: float | None = None

    def updated(self, labels: Sequence[bool], decay: float) -> ClassCounts:
        """Returns decay * old + (1 - decay) * count of the [B] labels, this batch included; the first batch
        initialises, an empty one changes nothing. Raises ValueError for a decay outside [0, 1)."""
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay} of the class counts: give a number from 0 (this batch alone) to below 1")
        if not labels:
            return self
        correct = float(sum(labels))
        wrong = len(labels) - correct
        if self.correct is None or self.wrong is None:
            return ClassCounts(correct, wrong)
        return ClassCounts(decay * self.correct + (1 - decay) * correct, decay * self.wrong + (1 - decay) * wrong)

    def weights(self, labels: Sequence[bool]) -> list[float]:
        """Turns [B] labels into [B] weights 1 / (sqrt(count of the class) + 1e-6), rescaled to average 1 over the rows
        given.

        With one class in the batch all weights are 1. Raises ValueError before the first `updated`.
        """
        if not labels:
            return []
        if self.correct is None or self.wrong is None:
            raise ValueError("no batch was counted yet: call updated() first")
        raw = {True: 1 / (math.sqrt(self.correct) + EPSILON), False: 1 / (math.sqrt(self.wrong) + EPSILON)}
        rows = [raw[bool(label)] for label in labels]
        mean = math.fsum(rows) / len(rows)
        return [w / mean for w in rows]
