"""Trains roles on episodes of an environment: conversations with tools, games, and task sets of other libraries."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.algorithms.advantages import EstimatorName, assign_advantages
from megatron_rl.algorithms.role_credit import DECAY, RoleBaselines, compare_peers
from megatron_rl.config.base import Count, Decay, refuse
from megatron_rl.recipes.critics import Critics, WithCritics
from megatron_rl.recipes.episode_rollouts import OverEpisodes
from megatron_rl.recipes.solutions import check_arguments, sampling_for
from megatron_rl.training.iteration import (
    CreditContext,
    Iteration,
    PromptSource,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
)
from megatron_rl.types import EPISODE, TRAINED, Prompt, Rollout


@dataclass(kw_only=True)
class Agents(OverEpisodes, WithCritics):
    """A recipe in which every iteration plays episodes of the data set's problems and trains the roles that took part
    in the episodes.
    """

    updates: Count  # number of updates in the run
    # number of agents of each role in an episode; the tokenizer of the first role is used for the problems
    agents: Mapping[str, Count] = field(default_factory=lambda: {"agent": 1})
    trained: Sequence[str] = ()  # roles that are trained; empty: all roles
    group_size: Count = 8  # episodes per problem, all with the same environment seed
    # What the reward of a sample is compared with to compute the advantage.
    # "task": compares a sample with all samples of the role for the same problem.
    # "episode": compares a sample with all samples of the role in the same episode, for a role with several agents.
    # "ema": compares a sample with a moving average of the role's rewards (SPIRAL, arXiv 2506.24119).
    compared: Literal["task", "episode", "ema"] = "task"
    # Advantage estimator if `compared` is "task": a name in algorithms.estimators, or module:name of a function.
    # With the estimator gae, samples are not compared, and each trained role has a critic.
    estimator: EstimatorName = "grpo"
    ema_decay: Decay = DECAY

    def __post_init__(self) -> None:
        check_arguments(self, groups=["group_size"] if self.compared == "task" else [], critics=True)
        self._critics = Critics.of(self.estimator, {role: f"{role}_critic" for role in self._trained})
        refuse(*self.problems())
        self.build_maker(self.agents, self._trained, key="agents")
        self._baselines = RoleBaselines()

    def problems(self) -> Iterator[str]:
        """Yields an error message for each contradiction between the arguments."""
        if not self.agents:
            yield "recipe.args.agents is empty: name at least one"
        if unknown := set(self.trained) - set(self.agents):
            yield f"recipe.args.trained names {', '.join(sorted(unknown))}, and recipe.args.agents does not"
        if self.compared != "task" and self._critics.critic_of:
            yield f"recipe.args.compared = {self.compared!r} with estimator gae, which compares nothing: leave it out"
        if self.compared == "episode" and all(self.agents[role] == 1 for role in self._trained):
            yield (
                "recipe.args.compared = 'episode' compares the agents of one role, and no role that learns has two in "
                "recipe.args.agents: set it to task or ema"
            )

    def roles(self) -> Mapping[str, RecipeRole]:
        drawn = {role: self.group_size * count for role, count in self.agents.items()}
        alike = dict.fromkeys(drawn, self.group_size)  # all episodes of a problem begin with the same prompt
        parts = {
            r: RecipeRole(
                trained=r in self._trained, samples=count, drawn=drawn, per_prompt=alike, episode=self.estimates[r]
            )
            for r, count in drawn.items()
        }
        return self._critics.roles(parts)

    def schedule(self) -> Schedule:
        return self._critics.schedule([[tuple(self._trained)]] * self.updates)

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return self.episode_prompt(payload)

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        problems = source.take()
        seeds = [context.seed_for(iteration.number, "task", i) for i in range(len(problems))]
        samplings = {role: sampling_for(context, iteration, role, 1) for role in self.agents}
        played = self.play_episodes(context, problems, seeds, samplings, per_problem=self.group_size)
        context.add_metrics(iteration.role, played.metrics)
        return {role: [r for r in played.rollouts if r.role == role] for role in self._trained}

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        if self._critics.critic_of:
            return self._critics.credit(iteration, rollouts, context, reward=self.rewards)
        return {role: self._credited(credited) for role, credited in rollouts.items()}

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Plays `context.evaluation.n` episodes of each problem, and one greedy episode if `context.evaluation` asks
        for it. Returns metrics; a failed episode is included with rewards of 0.
        """
        return self.measure_episodes(context, prompts)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self._baselines.values), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baselines = RoleBaselines(state["baselines"])
        super().load_state_dict(state)

    @property
    def _trained(self) -> list[str]:
        return [role for role in self.agents if not self.trained or role in self.trained]

    def _credited(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Assigns advantages to the samples of one role. With `compared` "ema", each sample is compared with the moving
        average before the average is updated with the sample's reward.
        """
        if self.compared == "task":
            return assign_advantages(rollouts, reward=self.rewards, estimator=self.estimator)
        summed = [r.with_rewards(**{TRAINED: self.total(r)}) for r in rollouts]
        if self.compared == "episode":
            return compare_peers(summed, [str(r.payload[EPISODE]) for r in summed], TRAINED)
        credited, self._baselines = self._baselines.credit(summed, TRAINED, decay=self.ema_decay)
        return credited
