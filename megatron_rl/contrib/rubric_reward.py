"""Parses a problem's rubric and a judge's scores, and combines the scores to one reward.

Based on Rubric Anchors (arXiv 2508.12790): criteria with score tiers and weights, vetoes, and saturation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_rl.rewards.tags import boxed

PASS = 0.5  # minimum score of a fulfilled criterion
# scores of the answers yes and no, which a judge trained with the recipe Entailment gives
_WORDS = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True)
class Criterion:
    """One criterion of a rubric."""

    criterion: str  # description of the criterion
    weight: float = 1.0  # weight of the score in the reward, at least 0
    veto: bool = False  # if True, a response that does not fulfil the criterion has the reward 0
    saturation: float = 1.0  # score in (0, 1] above which a higher score increases the reward less; 1: no such limit
    tiers: Sequence[str] = ("It is not fulfilled.", "It is fulfilled.")  # descriptions of the score levels, worst first

    def read(self, answer: str) -> float | None:
        r"""Returns the score in [0, 1] in a judge's answer, or None if there is none.

        The score is read from the last \boxed{}, which contains the index of a tier, or yes (best) or no (worst).
        """
        said, top = (boxed(answer) or "").lower(), len(self.tiers) - 1
        if said.isascii() and said.isdigit() and len(said) < 4 and int(said) <= top:
            return int(said) / top
        return _WORDS.get(said)


def read_rubric(payload: Mapping[str, Any]) -> list[Criterion]:
    """Returns the criteria in payload["rubric"], a list of mappings with the fields of a Criterion. Fields that are
    null get their defaults. Raises ValueError, with the index of the criterion, for an invalid rubric.
    """
    rows = payload.get("rubric")
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ValueError(f"the problem's rubric is {rows!r}: it is a list of criteria; name its column by data.fields")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(_criterion(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"criterion {number} of the rubric, {row!r}, cannot be used: {error}") from None
    return found


def vetoed(criteria: Sequence[Criterion], scores: Sequence[float]) -> bool:
    """Returns whether a response fails a veto: whether its score on any criterion with `veto` is below PASS."""
    return any(one.veto and score < PASS for one, score in zip(criteria, scores, strict=True))


def rubric_reward(criteria: Sequence[Criterion], scores: Sequence[float]) -> float:
    """Returns sum_k weight_k * saturated(score_k), or 0 for a response that fails a veto. `scores`: one score in [0, 1]
    for each criterion.
    """
    if vetoed(criteria, scores):
        return 0.0
    return math.fsum(one.weight * saturated(score, one.saturation) for one, score in zip(criteria, scores, strict=True))


def saturated(score: float, threshold: float) -> float:
    """Returns the score s if it is at most the threshold t, otherwise t + (1 - t) (1 - exp(-(s - t) / (1 - t))).

    The function has slope 1 at the threshold, and a decreasing slope above it. The paper mentions diminishing returns
    above a threshold but gives no function; this function was chosen because it needs no second parameter.
    """
    room = 1.0 - threshold
    return score if score <= threshold else threshold + room * (1.0 - math.exp(-(score - threshold) / room))


def _criterion(row: Mapping[str, Any]) -> Criterion:
    """Returns the criterion of a mapping. Raises TypeError or ValueError if it is invalid."""
    if not isinstance(row, Mapping):
        raise TypeError(f"it is a mapping with {', '.join(field.name for field in fields(Criterion))}")
    one = Criterion(**{name: value for name, value in row.items() if value is not None})
    if not isinstance(one.criterion, str) or not one.criterion or not isinstance(one.veto, bool):
        raise ValueError("its criterion is a text, and its veto true or false")
    if not (0 <= one.weight < math.inf and 0 < one.saturation <= 1):
        raise ValueError("give a weight of at least 0, and a saturation above 0 up to 1")
    if isinstance(one.tiers, str) or len(one.tiers) < 2:
        raise ValueError("give at least two tiers, the worst first")
    return one
