"""GRPO (arXiv 2402.03300): one model, a group of samples per problem, and advantages computed by comparing the outcomes
in a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.algorithms.advantages import EstimatorName
from megatron_rl.config.base import Count
from megatron_rl.recipes.answers import accuracies
from megatron_rl.recipes.solutions import GENERATOR, check_arguments, question_text, sampling_for, solve
from megatron_rl.training.iteration import (
    Iteration,
    PromptSource,
    Recipe,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
)
from megatron_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Grpo(Recipe):
    """A recipe that trains the role `generator` on the graded outcome of its solutions in every iteration.

    The credit stage is the default of Recipe: `estimator` compares the outcomes of a problem's solutions.
    """

    allows_votes = True
    updates: Count  # number of updates in the run
    group_size: Count = 5  # samples per problem
    estimator: EstimatorName = "grpo"  # a name in algorithms.estimators or module:name, or {target, args}
    template: str = "grpo_generator"  # text file with {question}, or name of a packaged prompt

    def __post_init__(self) -> None:
        check_arguments(self, groups=["group_size"], templates={"template": ["question"]})

    def roles(self) -> Mapping[str, RecipeRole]:
        group = {GENERATOR: self.group_size}
        return {GENERATOR: RecipeRole(samples=self.group_size, drawn=group, per_prompt=group)}

    def schedule(self) -> Schedule:
        return [[(GENERATOR,)]] * self.updates

    def prompt(self, payload: Mapping[str, object]) -> str:
        return question_text(self.template, payload)

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        sampling = sampling_for(context, iteration, GENERATOR, self.group_size)
        solved, metrics = solve(context, GENERATOR, source.take(), sampling)
        context.add_metrics(GENERATOR, metrics)
        return {GENERATOR: [s.rollout for s in solved]}

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        return accuracies(context, GENERATOR, prompts)[0]
