"""Weights of the verifier's advantages by the class of the solution that was judged (arXiv 2505.15034, eq. 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EPSILON = 1e-6


@dataclass(frozen=True)
class ClassCounts:
    """Running counts of rows whose solution is right and wrong; None before the first batch. The state a checkpoint holds."""

    right: float | None = None
    wrong: float | None = None

    def updated(self, labels: Sequence[bool], decay: float) -> ClassCounts:
        """Moving average including this batch: decay * old + (1 - decay) * count; the first batch initialises."""
        right = float(sum(labels))
        wrong = len(labels) - right
        if self.right is None or self.wrong is None:
            return ClassCounts(right, wrong)
        return ClassCounts(decay * self.right + (1 - decay) * right, decay * self.wrong + (1 - decay) * wrong)

    def weights(self, labels: Sequence[bool]) -> list[float]:
        """[B] labels -> [B] weights 1 / (sqrt(count of the class) + 1e-6), rescaled to average 1 over the rows given."""
        if not labels:
            return []
        if self.right is None or self.wrong is None:
            raise ValueError("no batch was counted yet: call updated() first")
        raw = {True: 1 / (math.sqrt(self.right) + EPSILON), False: 1 / (math.sqrt(self.wrong) + EPSILON)}
        rows = [raw[bool(label)] for label in labels]
        mean = sum(rows) / len(rows)
        return [w / mean for w in rows]
