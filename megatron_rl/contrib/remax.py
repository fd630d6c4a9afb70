"""ReMax (arXiv 2310.10505): REINFORCE with the outcome of the greedy answer to the same problem as the baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.algorithms.advantages import EstimatorName
from megatron_rl.algorithms.estimators import ESTIMATORS, word_of
from megatron_rl.config.base import ConfigError, Count
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.dynamic_sampling import Group, Metrics, solve_groups
from megatron_rl.recipes.solutions import GENERATOR
from megatron_rl.training.iteration import Iteration, RecipeRole, RolloutContext
from megatron_rl.training.rollouts import greedy
from megatron_rl.types import Prompt

BASELINE = "greedy"  # name of the reward that holds the greedy answer's outcome in every rollout


@dataclass(frozen=True, kw_only=True)
class Remax(Dapo):
    """A recipe that trains the role `generator`. The advantage of a sample is its outcome minus the outcome of the
    greedy answer to the same problem, so one sample per problem is enough.

    A problem whose greedy answer could not be graded is left out. All options of Dapo but `reward_model` are
    supported.
    """

    allows_votes = False  # one greedy answer has no majority
    group_size: Count = 1
    estimator: EstimatorName = "reinforce"  # reinforce, reinforce_pp or a user-defined estimator

    def __post_init__(self) -> None:
        super().__post_init__()
        if word_of(self.estimator) in set(ESTIMATORS) - {"reinforce", "reinforce_pp"}:
            raise ConfigError(
                f"recipe.args.estimator = {word_of(self.estimator)!r}: it has a baseline of its own, and ReMax's would "
                "be lost; give reinforce or reinforce_pp"
            )
        if self.reward_model.used:
            raise ConfigError("recipe.args.reward_model: ReMax's baseline is a graded outcome; leave it out")

    def roles(self) -> Mapping[str, RecipeRole]:
        part = super().roles()[GENERATOR]
        return {GENERATOR: replace(part, drawn={GENERATOR: part.drawn[GENERATOR] + 1})}

    def _draw(
        self, iteration: Iteration, context: RolloutContext, number: int, prompts: Sequence[Prompt]
    ) -> tuple[list[Group], Metrics]:
        """Samples the groups of one round (see DynamicSampling.rounds), and the greedy answer to the prompt of each
        group."""
        groups, metrics = super()._draw(iteration, context, number, prompts)
        likeliest = replace(greedy(context.samplings[GENERATOR], seed=context.seed), logprobs=False)
        ones, _ = solve_groups(context, GENERATOR, [group.prompt for group in groups], likeliest)
        return [_compared(group, greedy_group) for group, greedy_group in zip(groups, ones, strict=True)], metrics

    def reward(self, role: str) -> dict[str, float]:
        return {**super().reward(role), BASELINE: -1.0}


def _compared(group: Group, likeliest: Group) -> Group:
    """Returns `group` with an additional reward of each solution: the baseline, which is the outcome of the greedy
    answer. If the greedy answer could not be graded, returns the group without solutions. `likeliest`: a group with the
    greedy answer.
    """
    if not likeliest.solutions:
        return replace(group, solutions=[])
    baseline = likeliest.solutions[0].rollout.rewards["outcome"]
    solutions = [replace(s, rollout=s.rollout.with_rewards(**{BASELINE: baseline})) for s in group.solutions]
    return replace(group, solutions=solutions)
