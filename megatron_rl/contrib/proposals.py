"""Parts of self-play: the proposer's reward, a rule that checks its answers, and votes of the solver on answers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from megatron_rl.config.plugins import find_function
from megatron_rl.config.schema import Reward
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.solutions import (
    Solution,
)
from megatron_rl.rewards.grading_pool import Graded, GradePool, check_failures
from megatron_rl.rewards.role_tags import last_inside
from megatron_rl.rewards.tags import boxed
from megatron_rl.text import decode_all
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import sample
from megatron_rl.types import Outcome, Prompt

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
    """A user-defined function that checks whether a proposer's answers are correct. It runs in worker processes, which
    exist as long as the AnswerRule.
    """

    def __init__(self, target: str | None, workers: int) -> None:
        """Creates the pool of worker processes. `target`: module:name of a reward function; if None, every answer
        counts as correct. Raises ConfigError if the function cannot be imported.
        """
        self._pool: GradePool | None = None
        if target is not None:
            find_function(target)
            self._pool = GradePool(Reward(target=target, workers=workers))
            weakref.finalize(self, self._pool.close)

    def correct(
        self, answers: Mapping[int, str], payloads: Mapping[int, Mapping[str, Any]], max_failure_share: float
    ) -> dict[int, bool | None]:
        """Returns whether each answer is correct, or None for an answer that could not be graded. The mappings have the
        same keys. Raises RewardFailure if too many gradings fail.
        """
        if self._pool is None or not answers:
            return dict.fromkeys(answers, True)
        graded = self._pool.grade(list(answers.values()), [payloads[i] for i in answers])
        check_failures(graded, max_failure_share)
        known = [one.correct if one.outcome is Outcome.SCORE else None for one in graded]
        return dict(zip(answers, known, strict=True))


# grading of each sample of a problem for which no sample has an answer: the sample counts as wrong
UNANSWERED = Graded(Outcome.SCORE)


def solve_by_vote(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[Solution], dict[str, float]]:
    r"""Samples [P * n] answers, and grades the answers to a problem against the most frequent answer in \boxed{} (the
    earliest one if several are equally frequent), which replaces payload["answer"]. Returns the graded solutions in
    order, and the metrics graded/timeout and graded/error.

    R-Zero (arXiv 2508.05004) creates its labels in this way. R-Zero merges answers that its grader considers equal;
    this function counts answers as strings, and uses the grader only to compare with the most frequent answer. A sample
    without a score is left out of its group. Raises RewardFailure if too many gradings fail.
    """
    with context.watch("rollout"):
        rollouts = sample(context, role, prompts, sampling)
    texts = decode_all(context.tokenizers[role], [rollout.response for rollout in rollouts])
    winners = [elected(texts[i : i + sampling.n]) for i in range(0, len(texts), sampling.n)]
    keys = [winners[k // sampling.n] for k in range(len(texts))]
    payloads = [{**rollout.payload, "answer": key} for rollout, key in zip(rollouts, keys, strict=True)]
    known = [k for k, key in enumerate(keys) if key is not None]
    with context.watch("reward"):
        graded = context.grade([texts[k] for k in known], [payloads[k] for k in known])
    check_failures(graded, context.max_failure_share)
    results = dict.fromkeys(range(len(texts)), UNANSWERED) | dict(zip(known, graded, strict=True))
    solutions = []
    for k, result in results.items():
        if result.outcome is Outcome.SCORE:
            correct = result.correct
            payload = {**payloads[k], "correct": correct, "grading": result.outcome.value}
            rollout = replace(rollouts[k].with_rewards(**result.metrics, outcome=result.score), payload=payload)
            solutions.append(Solution(rollout=rollout, text=texts[k], correct=correct))
    failed = Counter(result.outcome for result in graded)
    return solutions, {f"graded/{kind.value}": float(failed[kind]) for kind in (Outcome.TIMEOUT, Outcome.ERROR)}


def elected(texts: Sequence[str]) -> str | None:
    r"""Returns the most frequent answer in the last \boxed{} of each text, or None if no text has one."""
    votes = Counter(answer for text in texts if (answer := boxed(text)))
    return votes.most_common(1)[0][0] if votes else None
