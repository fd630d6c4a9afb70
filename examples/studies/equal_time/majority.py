"""GRPO whose answers are rewarded besides for agreeing with the majority: a judge without a second model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.base import Share
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import GENERATOR, Solution, sampling_for, solve
from megatron_rl.texts.tags import boxed
from megatron_rl.training.iteration import Iteration, PromptSource, RolloutContext, RolloutsByRole
from megatron_rl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class MajorityGrpo(Grpo):
    r"""A run that trains `generator` as Grpo does, by the outcome plus `majority_weight` for an answer in \boxed{} that
    is the most frequent one among those to its problem, and is given twice at least.

    The reward by majority is that of TTRL (arXiv 2504.16084), which knows no correct answers. Here these are known, so
    that a correct answer that stands alone earns more than a wrong one of the majority while the weight is below 1.
    """

    majority_weight: Share = 0.5

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        sampling = sampling_for(context, iteration, GENERATOR, self.group_size)
        solved, metrics = solve(context, GENERATOR, source.take(), sampling)
        rollouts = with_majority(solved)
        context.add_metrics(GENERATOR, metrics)
        return {GENERATOR: rollouts}

    def reward(self, role: str) -> dict[str, float]:
        return {"outcome": 1.0, "majority": self.majority_weight}


def with_majority(solutions: Sequence[Solution]) -> list[Rollout]:
    """Gives the rollout of each solution the reward `majority`: 1 where its answer is the majority's, else 0."""
    groups: dict[str, list[str]] = {}
    for solution in solutions:
        groups.setdefault(solution.rollout.group, []).append(solution.text)
    winners = {group: elected(texts) for group, texts in groups.items()}
    for group, texts in groups.items():
        if sum(boxed(text) == winners[group] for text in texts) < 2:
            winners[group] = None
    rollouts = []
    for solution in solutions:
        winner = winners[solution.rollout.group]
        agrees = winner is not None and boxed(solution.text) == winner
        rollouts.append(replace(solution.rollout, rewards={**solution.rollout.rewards, "majority": float(agrees)}))
    return rollouts


def elected(texts: Sequence[str]) -> str | None:
    r"""Returns the most frequent answer in the last \boxed{} of each text, or None if no text has one."""
    votes = Counter(answer for text in texts if (answer := boxed(text)))
    return votes.most_common(1)[0][0] if votes else None
