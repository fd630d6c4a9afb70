"""GRPO (arXiv 2402.03300): one model, groups of samples per problem, advantages from comparing their outcomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.algorithms.advantages import EstimatorName, assign_advantages
from megatron_rl.recipes.base import GENERATOR, accuracies, check_arguments, question_text, sampling_for, solve
from megatron_rl.training.turns import Part, Recipe, Schedule, Source, Table, Turn
from megatron_rl.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Grpo(Recipe):
    """A run that trains `generator` on the graded outcome alone, once a step."""

    updates: int  # of the run
    group_size: int = 5  # samples per problem
    estimator: EstimatorName = "grpo"  # a word of algorithms.estimators or module:name, or {target, args}
    template: str = "grpo_generator"  # a text file with {question}, or the name of a packaged prompt

    def __post_init__(self) -> None:
        check_arguments(self, groups=["group_size"], positive=["updates"], templates={"template": ["question"]})

    def roles(self) -> Mapping[str, Part]:
        group = {GENERATOR: self.group_size}
        return {GENERATOR: Part(samples=self.group_size, drawn=group, per_prompt=group)}

    def schedule(self) -> Schedule:
        return [[(GENERATOR,)]] * self.updates

    def prompt(self, payload: Mapping[str, object]) -> str:
        return question_text(self.template, payload)

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        sampling = sampling_for(table, turn, GENERATOR, self.group_size)
        solved, figures = solve(table, GENERATOR, source.take(), sampling)
        table.note(GENERATOR, figures)
        return {GENERATOR: assign_advantages([s.rollout for s in solved], reward="outcome", estimator=self.estimator)}

    def evaluate(self, prompts: Sequence[Prompt], table: Table) -> dict[str, float]:
        return accuracies(table, GENERATOR, prompts)[0]
