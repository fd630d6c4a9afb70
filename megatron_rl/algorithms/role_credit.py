"""Computes advantages for several roles that act in the same episodes. The baseline is a moving average of the rewards
of a role, or the mean reward of comparable rollouts of the same role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.algorithms.advantages import total_reward
from megatron_rl.batches.units import join, members, share
from megatron_rl.types import Rollout

DECAY = 0.95  # decay factor of the moving averages, as in SPIRAL


@dataclass(frozen=True)
class RoleBaselines:
    """A moving average of the rewards of each role (SPIRAL's role-conditioned baselines, arXiv 2506.24119).

    In a zero-sum game, the mean reward of all players is always the same, but the average reward of one role is
    informative. A recipe keeps the baselines from iteration to iteration, and stores `dataclasses.asdict(baselines)` in
    its state_dict.
    """

    values: Mapping[str, float] = field(default_factory=dict)  # moving average by role; 0 before the first reward

    def credit(
        self, rollouts: Sequence[Rollout], reward: str, *, decay: float = DECAY
    ) -> tuple[list[Rollout], RoleBaselines]:
        """Assigns each of [B] rollouts the advantage r - b, where b is the baseline of its role. After each rollout, b
        becomes decay b + (1 - decay) r, where `decay` is in [0, 1). Returns the rollouts and the new baselines. The
        rollouts of one agent in an episode count as one.

        Raises ValueError for a rollout without the reward.
        """
        values, credited = dict(self.values), []
        for rollout in join(rollouts):
            gained = total_reward(rollout, reward)
            baseline = values.get(rollout.role, 0.0)
            credited.append(replace(rollout, advantages=gained - baseline))
            values[rollout.role] = decay * baseline + (1.0 - decay) * gained
        return share(credited, rollouts), RoleBaselines(values)


def compare_peers(rollouts: Sequence[Rollout], peers: Sequence[str], reward: str) -> list[Rollout]:
    """Assigns each of [B] rollouts the advantage r - m, where m is the mean reward of its peers: the rollouts with the
    same role and the same key in `peers` [B], including itself. A rollout without other peers gets 0.

    If the peer key is the proposed problem for solvers and the source task for proposers, this is hierarchical GRPO:
    solvers are compared within one problem, proposers over all problems made from one task. The groups of the rollouts
    are not changed. The rollouts of one agent in an episode count as one. Raises ValueError if the number of keys
    differs from the number of rollouts, or if a rollout lacks the reward.
    """
    gained: dict[tuple[str, str], list[float]] = defaultdict(list)
    keys = [(rollout.role, peer) for rollout, peer in zip(rollouts, peers, strict=True)]
    for unit in members(rollouts):
        gained[keys[unit[0]]].append(total_reward(rollouts[unit[0]], reward))
    means = {key: gains[0] if min(gains) == max(gains) else sum(gains) / len(gains) for key, gains in gained.items()}
    return [
        replace(rollout, advantages=rollout.rewards[reward] - means[key])
        for rollout, key in zip(rollouts, keys, strict=True)
    ]
