"""Parts of self-play: the proposer's reward, a parser of proposals, and a rule that checks the proposed answers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal

from megatron_rl.config.plugins import find_function
from megatron_rl.config.schema import Reward
from megatron_rl.rewards.grading_pool import GradePool, check_failures
from megatron_rl.rewards.role_tags import last_inside
from megatron_rl.types import Outcome

Aim = Literal["hard", "middle", "even"]


def aimed(aim: Aim, accuracy: float) -> float:
    """Returns the proposer's reward for a question that the solver answers with accuracy a.

    `aim`: the formula. "hard" means 1 - a and "middle" means 4 a (1 - a), both from Search Self-Play (arXiv
        2510.18821). "even" means min(a, 1 - a), from R-Zero (arXiv 2508.05004).
    """
    hard = 1.0 - accuracy
    return {"hard": hard, "middle": 4.0 * accuracy * hard, "even": min(accuracy, hard)}[aim]


def read_proposal(text: str) -> tuple[str, str] | None:
    """Returns the last question and the last answer of a proposal, or None if one of them is missing."""
    question, answer = last_inside(text, "question"), last_inside(text, "answer")
    return (question, answer) if question and answer else None


class AnswerRule:
    """A user-defined function that checks whether a proposer's answers are correct. The function runs in worker
    processes, which end when the AnswerRule is garbage-collected.
    """

    def __init__(self, target: str | None, workers: int) -> None:
        """Creates the pool of worker processes. `target`: module:name of a reward function; if None, every answer
        counts as correct. Raises ConfigError if the function cannot be imported.
        """
        self._pool: GradePool | None = None
        if target is not None:
            find_function(target)
            self._pool = GradePool(Reward(target=target, workers=workers, cut_off="drop"))
            weakref.finalize(self, self._pool.close)

    def correct(
        self, answers: Mapping[int, str], payloads: Mapping[int, Mapping[str, Any]], max_failure_share: float
    ) -> dict[int, bool | None]:
        """Returns whether each answer is correct, or None for an answer that could not be graded. `answers` and
        `payloads` have the same keys. Raises RewardFailure if too many gradings fail.
        """
        if self._pool is None or not answers:
            return dict.fromkeys(answers, True)
        graded = self._pool.grade(list(answers.values()), [payloads[i] for i in answers])
        check_failures(graded, max_failure_share)
        verdicts = [grading.correct if grading.outcome is Outcome.SCORE else None for grading in graded]
        return dict(zip(answers, verdicts, strict=True))
