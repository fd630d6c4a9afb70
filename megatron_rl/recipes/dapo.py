"""GRPO with options: DAPO (arXiv 2503.14476), ScaleRL (2510.13786), GHPO (2507.10628) and GRPO-lambda (2505.18086)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.config.base import refuse
from megatron_rl.recipes.curriculum import Curriculum, Record, success_rates
from megatron_rl.recipes.dynamic_sampling import DynamicSampling, Group, Metrics, draw_groups, solve_groups
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.hints import Hints
from megatron_rl.recipes.length_rewards import AddedReward, Brevity, LengthReward, Overlong, RepetitionPenalty, priced
from megatron_rl.recipes.reward_model import RewardModel
from megatron_rl.recipes.solutions import GENERATOR, check_fields, sampling_for
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.training.iteration import (
    CreditContext,
    Iteration,
    PromptSource,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Score,
)
from megatron_rl.types import Prompt

RATES = "success_rates"  # key in RolloutContext.handed_over of the success rates that `credit` receives


@dataclass(frozen=True, kw_only=True)
class Dapo(Grpo):
    """A recipe that trains the role `generator` on the graded outcome of its solutions, with options that select
    problems, adjust rewards, or retry problems with hints. Without any option it is identical to Grpo.
    """

    # skip groups whose outcomes are all equal, and sample more problems instead
    dynamic_sampling: DynamicSampling | None = None
    curriculum: Curriculum | None = None  # skip problems that are solved or too hard
    # sample problems without a correct solution again, with the beginning of a known solution in the prompt
    hints: Hints | None = None
    # penalty for solutions close to the maximum length, and an option not to train on truncated solutions
    overlong: Overlong | None = None
    brevity: Brevity | None = None  # lower rewards for long correct solutions, in problems with high success rates
    length_reward: LengthReward | None = None  # reward that is higher for the shorter solutions of a group
    repetition_penalty: RepetitionPenalty | None = None  # penalty for solutions that repeat n-grams
    reward_model: RewardModel = RewardModel()  # mix the score of a reward model with the outcome
    # state of the curriculum: the problems that are skipped
    _record: Record = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(*self.problems())
        object.__setattr__(self, "_record", Record(self.curriculum))

    def problems(self) -> Iterator[str]:
        """Yields an error message for each pair of options that exclude each other."""
        if self.dynamic_sampling is not None and self.brevity is not None:
            yield (
                "recipe.args: dynamic_sampling leaves out problems that are always solved, which brevity is for; "
                "take one of the two"
            )
        if self.dynamic_sampling is not None and self.group_size == 1:
            yield "recipe.args.group_size = 1: dynamic_sampling leaves every group of one out; give 2 or more"
        if self.hints is not None and self.reward_model.used:
            yield "recipe.args: hints and reward_model: a reward model would not see the hint; take one of the two"

    def needs_correct(self) -> str:
        parts = ("curriculum", "hints", "brevity", "length_reward")
        return next((f"recipe.args.{name}" for name in parts if vars(self)[name] is not None), "")

    def roles(self) -> Mapping[str, RecipeRole]:
        drawn = self.group_size * (self.dynamic_sampling.oversampling if self.dynamic_sampling else 1)
        group = {GENERATOR: self.group_size}
        generator = {GENERATOR: RecipeRole(samples=self.group_size, drawn={GENERATOR: drawn}, per_prompt=group)}
        return self.reward_model.roles(generator)

    def check(self, run: CheckedRun) -> None:
        self.reward_model.check(self, run, GENERATOR)
        if self.curriculum is not None:
            self.curriculum.check(run)
        if self.overlong is not None:
            self.overlong.check(run, GENERATOR)
        if run.rollouts.labels == "votes":
            refuse(*self._vote_problems())
        if self.hints is not None:
            check_fields(run, GENERATOR, {self.hints.field: "recipe.args.hints"}, held_out=False)

    def _vote_problems(self) -> Iterator[str]:
        """Yields an error message for each option that needs known answers, which majority votes replace."""
        place = "rollouts.labels = 'votes'"
        if self.hints is not None:
            yield f"recipe.args.hints show known solutions, but {place} has none; set one of them"
        if self.curriculum is not None:
            yield (
                f"recipe.args.curriculum retires problems that are solved, but with {place} a success rate is how "
                "often the samples agree, right or wrong; set one of them"
            )

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        draw = partial(self._draw, iteration, context)
        groups, metrics = draw_groups(self._record.over(source), draw, self.dynamic_sampling)
        context.add_metrics(GENERATOR, metrics)
        solutions = priced(groups, context.samplings[GENERATOR].max_tokens, self._added)
        return {GENERATOR: solutions, **self.reward_model.texts(context, solutions, self.prompt)}

    def scores(self, iteration: Iteration) -> Sequence[Score]:
        return self.reward_model.scores

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        self._record.learn(context.handed_over.get(RATES, ()))
        context.add_metrics(GENERATOR, self._record.metrics())
        scored = self.reward_model.scored(rollouts, GENERATOR)[GENERATOR]
        credited = assign_advantages(
            scored, reward=self.reward(GENERATOR), estimator=self.estimator, alpha=self.reward_model.alpha
        )
        return {GENERATOR: self.overlong.trained(credited) if self.overlong else credited}

    def reward(self, role: str) -> dict[str, float]:
        return {**self.reward_model.weights, **dict.fromkeys(self._added, 1.0)}

    @property
    def _added(self) -> dict[str, AddedReward]:
        """The options that are set and that add a reward to each solution: {name of the reward: option}."""
        options = {
            "overlong": self.overlong if self.overlong is not None and self.overlong.cache else None,
            "brevity": self.brevity,
            "length_reward": self.length_reward,
            "repetition_penalty": self.repetition_penalty,
        }
        return {name: option for name, option in options.items() if option is not None}

    def state_dict(self) -> dict[str, Any]:
        return self._record.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._record.load_state_dict(state)

    def _draw(
        self, iteration: Iteration, context: RolloutContext, number: int, prompts: Sequence[Prompt]
    ) -> tuple[list[Group], Metrics]:
        """Samples the groups of one round (see DynamicSampling.rounds). The success rates of these groups are handed to
        the curriculum before any group is sampled again with hints.
        """
        sampling = sampling_for(context, iteration, GENERATOR, self.group_size)
        if number > 0:
            sampling = replace(sampling, seed=context.seed_for(iteration.number, GENERATOR, "round", number))
        groups, metrics = solve_groups(context, GENERATOR, prompts, sampling)
        if self.curriculum is not None:
            context.handed_over.setdefault(RATES, []).extend(success_rates(groups))
        if self.hints is None:
            return groups, metrics
        return self.hints.retry(context, GENERATOR, groups, metrics, sampling=sampling, text=self.prompt)
