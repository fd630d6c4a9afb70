"""Computes weights for the verifier's advantages: one weight for verifications of correct solutions and one for
verifications of wrong solutions (arXiv 2505.15034, eq. 9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ClassWeights = Literal["sqrt_inverse", "inverse", "off"]
EPSILON = 1e-6


@dataclass(frozen=True)
class ClassCounts:
    """Exponential moving averages of the numbers of correct and of wrong solutions per batch. The counts are None
    before the first batch.

    Checkpoints store `dataclasses.asdict(counts)`; `ClassCounts(**state)` restores the counts.
    """

    correct: float | None = None
    wrong: float | None = None

    def updated(self, labels: Sequence[bool], decay: float) -> ClassCounts:
        """Returns the counts updated with a batch of [B] labels (True: correct solution): decay * old count + (1 -
        decay) * count in the batch, with `decay` in [0, 1). The first batch sets the counts. An empty batch changes
        nothing.
        """
        if not labels:
            return self
        correct = float(sum(labels))
        wrong = len(labels) - correct
        if self.correct is None or self.wrong is None:
            return ClassCounts(correct, wrong)
        return ClassCounts(decay * self.correct + (1 - decay) * correct, decay * self.wrong + (1 - decay) * wrong)

    def weights(self, labels: Sequence[bool], kind: ClassWeights = "sqrt_inverse") -> list[float]:
        """Converts [B] labels to [B] weights 1 / (sqrt(count of the class) + 1e-6), rescaled to a mean of 1 over the
        batch. With the kind "inverse", the weights are 1 / (count of the class + 1e-6) before they are rescaled; with
        "off", all weights are 1.

        If the batch has only one class, all weights are 1. `updated` must have been called with a batch before.
        """
        if not labels:
            return []
        assert self.correct is not None and self.wrong is not None
        if kind == "off":
            return [1.0] * len(labels)
        size = math.sqrt if kind == "sqrt_inverse" else float
        raw = {True: 1 / (size(self.correct) + EPSILON), False: 1 / (size(self.wrong) + EPSILON)}
        rows = [raw[bool(label)] for label in labels]
        mean = math.fsum(rows) / len(rows)
        return [w / mean for w in rows]
