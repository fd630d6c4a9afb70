"""A small recipe over episodes of verifiers: every role's samples of one task are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.environments.base import EpisodeSettings
from megatron_rl.environments.verifiers import Verifiers
from megatron_rl.recipes.base import sampling_for
from megatron_rl.training.turns import Part, Recipe, Schedule, Source, Table, Turn
from megatron_rl.types import Outcome, Rollout


@dataclass(frozen=True, kw_only=True)
class EpisodesOfVerifiers(Recipe):
    """All roles of the environment's agents learn from the same episodes."""

    updates: int
    world: Verifiers
    group_size: int = 2  # episodes of each task

    def roles(self) -> Mapping[str, Part]:
        return {role: Part(samples=self.group_size) for role in self.world.agents.values()}

    def schedule(self) -> Schedule:
        return [[tuple(self.world.agents.values())]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return str(payload["question"])

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        tasks = [problem for problem in source.take() for _ in range(self.group_size)]
        seeds = [table.seed_for(turn.number, place) for place in range(len(tasks))]
        samplings = {role: sampling_for(table, turn, role, 1) for role in turn.roles}
        episodes = self.world.play(table, tasks, seeds, samplings, EpisodeSettings(workers=2))
        found: dict[str, list[Rollout]] = {role: [] for role in turn.roles}
        for episode in episodes:
            for rollout in episode.rollouts:
                total = sum(rollout.rewards.values())
                own = replace(rollout, group=str(episode.number // self.group_size), rewards={"reward": total})
                found[rollout.role].append(own)
        for role in turn.roles:
            table.note(role, {"played": float(sum(e.outcome is Outcome.SCORE for e in episodes))})
        return {role: assign_advantages(own, reward="reward", estimator="batch") for role, own in found.items()}
