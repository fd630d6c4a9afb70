"""PPO (arXiv 1707.06347) with a critic, a second model that predicts the return at every token. Advantages compare
rewards with the critic's values (GAE), and not with other samples of the problem.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.algorithms.estimators import GAE, EstimatorName
from megatron_rl.config.base import Count, refuse
from megatron_rl.recipes.critics import Critics, WithCritics
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.reward_model import RewardModel
from megatron_rl.recipes.solutions import GENERATOR, check_arguments
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.training.iteration import (
    CreditContext,
    Iteration,
    PromptSource,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
    Score,
)


@dataclass(frozen=True, kw_only=True)
class Ppo(WithCritics, Grpo):
    """A recipe that trains `generator` on the outcome of its solutions, and `critic`, a model with a value head, on the
    returns."""

    group_size: Count = 1  # samples per problem
    estimator: EstimatorName = GAE  # gae, or {target: gae, args: {...}} with the arguments of algorithms.gae.Gae
    reward_model: RewardModel = RewardModel()  # mix the score of a reward model with the outcome

    def __post_init__(self) -> None:
        check_arguments(self, templates={"template": ["question"]}, critics=True)
        object.__setattr__(self, "_critics", Critics.of(self.estimator, {GENERATOR: "critic"}))
        if not self._critics.critic_of:
            refuse(f"recipe.args.estimator = {self.estimator!r} uses no critic: leave it out, or take the recipe Grpo")

    def roles(self) -> Mapping[str, RecipeRole]:
        return self.reward_model.roles(self._critics.roles(super().roles()))

    def schedule(self) -> Schedule:
        return self._critics.schedule(super().schedule())

    def check(self, run: CheckedRun) -> None:
        super().check(run)
        self.reward_model.check(self, run, GENERATOR)

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        rollouts = super().rollout(iteration, source, context)
        return {**rollouts, **self.reward_model.texts(context, rollouts[GENERATOR], self.prompt)}

    def scores(self, iteration: Iteration) -> Sequence[Score]:
        return [*self.reward_model.scores, *super().scores(iteration)]

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        scored = self.reward_model.scored(rollouts, GENERATOR)
        option = self.reward_model
        return self._critics.credit(iteration, scored, context, reward=option.weights, finish=option.mixed)
