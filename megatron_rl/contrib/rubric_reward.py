"""Reads a problem's rubric and the scores that a judge gives, and turns them into one reward.

After Rubric Anchors (arXiv 2508.12790): criteria with score tiers and weights, vetoes, and saturation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_rl.rewards.tags import boxed

PASS = 0.5  # score from which on a criterion counts as fulfilled
_WORDS = {"yes": 1.0, "no": 0.0}  # answers of a judge that was trained on entailment


@dataclass(frozen=True)
class Criterion:
    """One line of a rubric."""

    criterion: str  # what a response is judged by
    weight: float = 1.0  # of its score in the reward, at least 0
    veto: bool = False  # a response that does not fulfil it has the reward 0, whatever else it has
    saturation: float = 1.0  # score, above 0 up to 1, from which on more counts less; 1: it always counts in full
    tiers: Sequence[str] = ("It is not fulfilled.", "It is fulfilled.")  # of the score, the worst first

    def read(self, answer: str) -> float | None:
        r"""Returns the score in [0, 1] that a judge's answer gives: its last \boxed{}, with the number of a tier, or
        yes (the best) or no (the worst). None when there is none, or nothing of that kind in it."""
        said, top = (boxed(answer) or "").lower(), len(self.tiers) - 1
        if said.isascii() and said.isdigit() and len(said) < 4 and int(said) <= top:
            return int(said) / top
        return _WORDS.get(said)


def read_rubric(payload: Mapping[str, Any]) -> list[Criterion]:
    """Returns the criteria in payload["rubric"]: a list of mappings with the fields of a Criterion. Fields that are
    null have their defaults. Raises ValueError for a rubric that cannot be used, with the number of the criterion."""
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
    """Returns whether a response fails a veto: whether the score of one is below PASS."""
    return any(one.veto and score < PASS for one, score in zip(criteria, scores, strict=True))


def rubric_reward(criteria: Sequence[Criterion], scores: Sequence[float]) -> float:
    """Returns sum_k weight_k * saturated(score_k), and 0 for a response that fails a veto. `scores`: in [0, 1], one for
    each criterion."""
    if vetoed(criteria, scores):
        return 0.0
    return math.fsum(one.weight * saturated(score, one.saturation) for one, score in zip(criteria, scores, strict=True))


def saturated(score: float, threshold: float) -> float:
    """Returns the score itself up to the threshold t, and t + (1 - t) (1 - exp(-(s - t) / (1 - t))) from there on.

    That rises with slope 1 at the threshold, and ever less. The paper asks for diminishing returns beyond a threshold
    and prints no function; this one is ours, and needs no second parameter.
    """
    room = 1.0 - threshold
    return score if score <= threshold else threshold + room * (1.0 - math.exp(-(score - threshold) / room))


def _criterion(row: Mapping[str, Any]) -> Criterion:
    """Raises TypeError or ValueError for a criterion that cannot be used."""
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
