"""Rewards for the length and the repetitions of a solution, and the handling of truncated solutions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Protocol

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from megatron_rl.config.base import ConfigError, Count, PositiveShare, config
from megatron_rl.recipes.dynamic_sampling import Group
from megatron_rl.rewards.repetition import repeated_share
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.types import Rollout, Stop


class AddedReward(Protocol):
    """An option of a recipe that gives each solution a reward in addition to the outcome."""

    def rewards(self, groups: Sequence[Group], limit: int) -> list[list[float]]:
        """Returns the rewards of the solutions of [P] groups. `limit`: maximum number of tokens of a solution."""
        ...


@config
class Overlong:
    """Settings for solutions close to sampling.max_tokens or truncated there (DAPO, arXiv 2503.14476)."""

    # number of tokens before max_tokens over which the penalty increases from 0 to `penalty`; 0: no penalty
    cache: NonNegativeInt = 0
    penalty: NonNegativeFloat = 1.0  # penalty for a solution of max_tokens tokens
    # if True, truncated solutions are used in the comparison of their group, but not trained on
    leave_out_truncated: bool = False

    def problems(self) -> Iterator[str]:
        """Yields an error message if the settings have no effect."""
        if not (self.cache or self.leave_out_truncated):
            yield ("recipe.args.overlong does nothing: give cache, or set leave_out_truncated to true")

    def check(self, run: CheckedRun, role: str) -> None:
        """Raises ConfigError if `cache` is larger than the maximum length of a solution, so that the penalty would
        start before the first token.
        """
        limit = run.roles[role].sampling.max_tokens
        if self.cache > limit:
            raise ConfigError(
                f"recipe.args.overlong.cache = {self.cache} is above roles.{role}.sampling.max_tokens = {limit}: give "
                "at most that, as it is the last part of it, or raise max_tokens"
            )

    def reward(self, length: int, limit: int) -> float:
        """Returns penalty * min(0, -(length - (limit - cache)) / cache) for a solution of `length` tokens, where
        `limit` is the maximum length (eq. 13).
        """
        if self.cache == 0:
            return 0.0
        return self.penalty * min(0.0, -(length - (limit - self.cache)) / self.cache)

    def rewards(self, groups: Sequence[Group], limit: int) -> list[list[float]]:
        """Returns the penalty of each solution of [P] groups; see `reward`."""
        return [[self.reward(s.rollout.length, limit) for s in group.solutions] for group in groups]

    def trained(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts to train on. With `leave_out_truncated`, truncated rollouts are removed."""
        return [r for r in rollouts if not (self.leave_out_truncated and r.stop is Stop.LENGTH)]


@config
class Brevity:
    """Settings of a penalty for long correct solutions, which applies only to the problems with the highest success
    rates. Solutions of other problems get the plain outcome, so that accuracy does not collapse (GRPO-lambda, arXiv
    2505.18086; its code is not released, so the default size of the penalty may differ from the paper's).
    """

    # lambda in the paper: share of an update's groups, those with the highest success rates, that get the penalty
    share: PositiveShare = 0.2
    penalty: PositiveShare = 0.2  # maximum penalty of a correct solution

    def rewards(self, groups: Sequence[Group], limit: int) -> list[list[float]]:
        """Returns the length reward of each solution of [P] groups, 0 or below. A correct solution in a selected group
        gets -penalty * sigmoid((length - mean) / std). The mean and the population std (n) are those of the lengths of
        the group's correct solutions (arXiv 2502.04463).

        The number of selected groups is rounded down, but at least 1. Among groups with the same success rate, earlier
        ones are selected first.
        """
        rates = [group.success_rate or 0.0 for group in groups]
        order = sorted(range(len(groups)), key=lambda i: (-rates[i], i))
        chosen = set(order[: max(1, int(self.share * len(groups)))])
        return [self._of(group) if i in chosen else [0.0] * len(group.solutions) for i, group in enumerate(groups)]

    def _of(self, group: Group) -> list[float]:
        lengths = [float(s.rollout.length) for s in group.solutions if s.correct]
        if not lengths:
            return [0.0] * len(group.solutions)
        mean, std = fmean(lengths), pstdev(lengths)
        return [
            -self.penalty / (1.0 + math.exp(-(s.rollout.length - mean) / (std + 1e-6))) if s.correct else 0.0
            for s in group.solutions
        ]


@config
class LengthReward:
    """Settings of a reward for short solutions. The length of a solution is compared with the lengths of the other
    solutions of its group (Kimi k1.5, arXiv 2501.12599, section 2.3.3).
    """

    weight: PositiveFloat = 1.0  # factor on the reward; with weight 1, the reward is between -0.5 and 0.5

    def rewards(self, groups: Sequence[Group], limit: int) -> list[list[float]]:
        """Returns weight * lambda for correct solutions of [P] groups and weight * min(0, lambda) for wrong solutions,
        where lambda = 0.5 - (length - shortest) / (longest - shortest). `shortest` and `longest` are the minimum and
        maximum length in the group. If all solutions of a group have the same length, their rewards are 0.
        """
        return [self._of(group) for group in groups]

    def _of(self, group: Group) -> list[float]:
        lengths = [s.rollout.length for s in group.solutions]
        if len(set(lengths)) < 2:
            return [0.0] * len(lengths)
        shortest, longest = min(lengths), max(lengths)
        scores = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
        return [
            self.weight * (score if s.correct else min(0.0, score))
            for s, score in zip(group.solutions, scores, strict=True)
        ]


@config
class RepetitionPenalty:
    """Settings of a penalty for repeated n-grams of tokens (arXiv 2502.03373, appendix C.2)."""

    ngram_size: Count = 3  # number of tokens of an n-gram
    penalty: PositiveFloat = 1.0  # the penalty is this number times the share of n-grams that are repetitions

    def rewards(self, groups: Sequence[Group], limit: int) -> list[list[float]]:
        """Returns the penalty of each solution of [P] groups, 0 or below."""
        return [
            [-self.penalty * repeated_share(s.rollout.response.tolist(), self.ngram_size) for s in group.solutions]
            for group in groups
        ]


def priced(groups: Sequence[Group], limit: int, added: Mapping[str, AddedReward]) -> list[Rollout]:
    """Adds the rewards of options such as Overlong to the rollouts of [P] groups. Returns the rollouts in order.

    `limit`: maximum number of tokens of a solution. `added`: {name of the reward: option that computes the reward}.
    """
    rollouts = [s.rollout for group in groups for s in group.solutions]
    for name, option in added.items():
        values = [value for values_of_group in option.rewards(groups, limit) for value in values_of_group]
        rollouts = [r.with_rewards(**{name: value}) for r, value in zip(rollouts, values, strict=True)]
    return rollouts
