"""GRPO (arXiv 2402.03300): one model, groups of samples per problem, advantages from comparing their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.algorithms.advantages import Estimator, assign_advantages
from megatron_rl.config.schema import ConfigError
from megatron_rl.recipes.base import accuracies, at_least, check_groups, solution_metrics, solve
from megatron_rl.text import fill, read_template
from megatron_rl.training.rollouts import measure, without_signal
from megatron_rl.training.turns import Played, Players, Turn
from megatron_rl.types import Prompt

GENERATOR = "generator"


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """Trains `generator` on the graded outcome alone. It has no state of its own."""

    updates: int  # of the run; one step each
    group_size: int = 5  # samples per problem
    estimator: Estimator = "grpo"
    template: str = "grpo_generator"  # a text file with {question}, or the name of a packaged prompt

    def __post_init__(self) -> None:
        at_least({"updates": self.updates}, 1)
        check_groups({"group_size": self.group_size}, self.estimator)
        try:
            read_template(self.template)
        except FileNotFoundError as error:
            raise ConfigError(f"recipe.args: {error}") from None

    @property
    def roles(self) -> tuple[str, ...]:
        return (GENERATOR,)

    @property
    def trained(self) -> tuple[str, ...]:
        return (GENERATOR,)

    @property
    def prompt_role(self) -> str:
        return GENERATOR

    @property
    def group_sizes(self) -> Mapping[str, int]:
        return {GENERATOR: self.group_size}

    def drawn(self, role: str) -> Mapping[str, int]:
        """Samples per problem that each role draws in a turn of `role`: for `megatron-rl plan`."""
        return {GENERATOR: self.group_size}

    def num_steps(self) -> int:
        return self.updates

    def turns(self, step: int) -> list[str]:
        return [GENERATOR]

    def generator_prompt(self, payload: Mapping[str, Any]) -> str:
        return fill(read_template(self.template), question=str(payload["question"]))

    def play(self, turn: Turn, prompts: Sequence[Prompt], players: Players) -> Played:
        """[P] problems -> [P * group_size] solutions; rewards {outcome}."""
        sampling = replace(
            players.samplings[GENERATOR], n=self.group_size, seed=players.seed_for(turn.number, GENERATOR)
        )
        solutions = solve(players, GENERATOR, prompts, sampling)
        trajectories = assign_advantages([s.trajectory for s in solutions], reward="outcome", estimator=self.estimator)
        metrics = measure(trajectories) | solution_metrics(solutions)
        return Played(
            trajectories=trajectories,
            metrics=metrics | {"groups_without_signal": without_signal(trajectories, "outcome")},
        )

    def evaluate(self, prompts: Sequence[Prompt], players: Players, seed: int) -> dict[str, float]:
        """generator/accuracy_sampled (temperature 1), generator/accuracy_greedy, generator/problems."""
        figures, _ = accuracies(players, GENERATOR, prompts, seed)
        return figures

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None
