"""Advantages for several roles of the same episodes: baselines by role, and comparison among the peers of one task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.types import Rollout

DECAY = 0.95  # of the moving averages, as in SPIRAL


@dataclass(frozen=True)
class RoleBaselines:
    """A moving average of the rewards of each role (SPIRAL's role-conditioned baselines, arXiv 2506.24119).

    In a game in which one side wins what the other loses, a group's mean says nothing; a role's own usual reward does.
    A recipe keeps one from iteration to iteration, and has `asdict` of it in its state_dict.
    """

    values: Mapping[str, float] = field(default_factory=dict)  # by role; 0 before any reward

    def credit(
        self, rollouts: Sequence[Rollout], reward: str, *, decay: float = DECAY
    ) -> tuple[list[Rollout], RoleBaselines]:
        """Gives each of [B] rollouts the advantage r - b of its role, in their order, and moves b to
        decay b + (1 - decay) r after each one. -> the rollouts, and the baselines after them.

        Raises ValueError for a decay outside [0, 1) or a rollout without the reward.
        """
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay = {decay}: give a number from 0 to below 1; 0 compares with the last reward alone")
        values, credited = dict(self.values), []
        for rollout in rollouts:
            gained = _reward(rollout, reward)
            baseline = values.get(rollout.role, 0.0)
            credited.append(replace(rollout, advantages=gained - baseline))
            values[rollout.role] = decay * baseline + (1.0 - decay) * gained
        return credited, RoleBaselines(values)


def compare_peers(rollouts: Sequence[Rollout], peers: Sequence[str], reward: str) -> list[Rollout]:
    """Gives each of [B] rollouts the advantage r - mean over those of the same role with the same of [B] `peers`; 0
    where it is alone.

    With peers that name the proposed problem for solvers, and the source task for proposers, this is hierarchical GRPO:
    solvers are compared within one problem, proposers over all problems made from one task. Groups stay as they are.
    Raises ValueError for another number of peers than rollouts or a rollout without the reward.
    """
    if len(peers) != len(rollouts):
        raise ValueError(f"{len(peers)} peers for {len(rollouts)} rollouts: name one per rollout")
    gained: dict[tuple[str, str], list[float]] = defaultdict(list)
    keys = [(rollout.role, peer) for rollout, peer in zip(rollouts, peers, strict=True)]
    for rollout, key in zip(rollouts, keys, strict=True):
        gained[key].append(_reward(rollout, reward))
    means = {key: own[0] if min(own) == max(own) else sum(own) / len(own) for key, own in gained.items()}
    return [
        replace(rollout, advantages=rollout.rewards[reward] - means[key])
        for rollout, key in zip(rollouts, keys, strict=True)
    ]


def _reward(rollout: Rollout, name: str) -> float:
    if name not in rollout.rewards:
        raise ValueError(f"group {rollout.group!r} has no reward {name!r}; it has {sorted(rollout.rewards)}")
    return rollout.rewards[name]
