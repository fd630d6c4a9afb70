"""Plays, grades and measures episodes of an environment, for the recipes that train on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.chat_template import problem_text
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.dialogue import TEXT, check_dialogue
from megatron_rl.environments.environment import EpisodeMaker, EpisodeSettings, check_speakers, check_system, estimates
from megatron_rl.environments.episode_types import AGENT, Episode
from megatron_rl.environments.validation import check_agents, with_rewards
from megatron_rl.rewards.grading_pool import Graded, check_failures
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import greedy, plain
from megatron_rl.types import Outcome, Prompt, Rollout

EPISODE = "episode"  # the name in a rollout's payload of its episode's number within the iteration, as text
OUTCOME = "outcome"  # the reward that the run's reward function gives, where the environment leaves it to that
CURE = "Mend the environment or its tools, or raise recipe.args.step_timeout_s or reward.max_failure_share"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodesGraded:
    """Episodes that were played, with the samples of those that count."""

    episodes: Sequence[Episode]
    rollouts: list[Rollout]  # with all their rewards; the payload names the episode
    metrics: dict[str, float]  # answers (of all agents), tool_calls, cuts, episodes/timeout, episodes/error


@dataclass(kw_only=True)
class OverEpisodes(EpisodeSettings):
    """The arguments that all recipes over episodes have, and what they do alike.

    An episode that fails or is late is no sample, and no reward of 0: its group goes on without it.
    """

    environment: Use  # an Environment or another EpisodeMaker, by target and args
    rewards: Mapping[str, float] = field(default_factory=lambda: {OUTCOME: 1.0})  # by name: its weight in what counts

    def build_maker(self, agents: Mapping[str, int], rewarded: Collection[str], *, key: str) -> None:
        """Builds what plays the episodes. `agents`: the roles that speak, and how many agents of an episode each has;
        `rewarded`: those of them whose samples must have the rewards that count; `key`: of the setting that names the
        roles. Raises ConfigError for arguments of the play that cannot be."""
        if not self.rewards:
            raise ConfigError("recipe.args.rewards is empty: name at least one")
        for name, weight in self.rewards.items():
            if not math.isfinite(weight):
                raise ConfigError(f"recipe.args.rewards.{name} = {weight}: give a finite number")
        for name in ("episode_timeout_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"recipe.args.{name} = {getattr(self, name)}: give more than 0 seconds")
        check_dialogue(self.dialogue)
        self._maker: EpisodeMaker = build(self.environment)
        if not isinstance(self._maker, EpisodeMaker):
            raise ConfigError(
                f"recipe.args.environment.target = {self.environment.target!r} is no environment: name a class that "
                "inherits from megatron_rl.environments.environment:Environment, with @dataclass above it"
            )
        check_system(self, self._maker, agents)
        check_speakers(self._maker, agents, key=key)
        self._maker.check(self)
        self.estimates = estimates(self, self._maker, agents)
        self._rewarded, self._agents = tuple(rewarded), dict(agents)

    def files(self) -> Mapping[str, str]:
        """Returns {key of the config: path} of the files that the environment and its tools read."""
        return {f"recipe.args.environment.args.{name}": path for name, path in self._maker.files().items()}

    def episode_prompt(self, payload: Mapping[str, Any]) -> str:
        """Returns a problem's text, which opens no conversation: the environment does. Raises ConfigError for problems
        that are conversations, where messages become tokens as texts."""
        if "messages" in payload and self.dialogue == TEXT:
            raise ConfigError(
                f"recipe.args.dialogue = {TEXT!r}, and the problems are conversations: set it to chat, or data.chat to "
                "false"
            )
        return problem_text("{question}", payload)

    def play_episodes(
        self, context: RolloutContext, prompts: Sequence[Prompt], seeds: Sequence[int],
        samplings: Mapping[str, Sampling], *,
        each: int = 1,
    ) -> EpisodesGraded:  # fmt: skip
        """Plays `each` episodes of every problem, all with the problem's seed, and grades what the environment left to
        the run's reward function. The samples of one problem are a group. [P] prompts and seeds; `samplings` by role.
        Raises RewardFailure when too many episodes, or gradings, fail; ConfigError when one had more agents of a role
        than the recipe."""
        tasks = [prompt for prompt in prompts for _ in range(each)]
        self._maker.load()
        with context.watch("rollout"):
            episodes = self._maker.play(context, tasks, [seed for seed in seeds for _ in range(each)], samplings, self)
        check_agents(episodes, self._agents)
        episodes = [with_rewards(one, self.rewards, self._rewarded, OUTCOME) for one in episodes]
        ended = [Graded(one.outcome, detail=one.why, trace=one.trace) for one in episodes]
        check_failures(ended, context.max_failure_share, what="episodes", cure=CURE)
        scores = _grade(context, episodes)
        rollouts = []
        for one in episodes:
            for rollout in one.rollouts:
                grading = scores.get((one.number, rollout.payload[AGENT]))
                if grading is not None and grading.outcome is not Outcome.SCORE:
                    continue
                extra = {} if grading is None else {**grading.metrics, OUTCOME: grading.score}
                payload = {**rollout.payload, EPISODE: str(one.number)}
                group = f"{one.number // each}:{one.task.id}"
                rollouts.append(replace(rollout, group=group, payload=payload).with_rewards(**extra))
        return EpisodesGraded(episodes=episodes, rollouts=rollouts, metrics=_figures(episodes))

    def total(self, rollout: Rollout) -> float:
        """Returns the weighted sum of a sample's rewards that counts."""
        return sum(weight * rollout.rewards[name] for name, weight in self.rewards.items())

    def measure_episodes(
        self, context: RolloutContext, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, float], EpisodesGraded]:
        """Plays one episode of each problem at temperature 1, and one by the likeliest tokens. -> the mean of each
        reward over the agents of a role, where an agent without one, as of an episode that failed, counts with 0 and as
        ungraded; of the run's reward function's alone, which is called reward, also accuracy (the share that is
        correct); and the answers of an episode, of all its agents. And what was played at temperature 1."""
        metrics: dict[str, float] = {}
        seeds = [context.seed_for("evaluation", i) for i in range(len(prompts))]
        played = []
        for kind, alone in (("sampled", plain), ("greedy", greedy)):
            own: dict[str, Sampling] = {
                role: alone(context.samplings[role], seed=context.seed) for role in self._agents
            }
            found = self.play_episodes(context, prompts, seeds, own)
            last = [samples[-1] for samples in by_agent(found.rollouts)]
            for role, count in self._agents.items():
                for name in self.rewards:  # a frozen role may have none
                    gained = [r.rewards[name] for r in last if r.role == role and name in r.rewards]
                    if not gained and role not in self._rewarded:
                        continue
                    agents = len(prompts) * count
                    metrics[f"{role}/{'reward' if name == OUTCOME else name}_{kind}"] = sum(gained) / agents
                    if len(gained) < agents:
                        metrics[f"{role}/ungraded_{kind}"] = float(agents - len(gained))
                    if [*self.rewards] == [OUTCOME]:
                        correct = sum(value > context.threshold for value in gained)
                        metrics[f"{role}/accuracy_{kind}"] = correct / agents
            metrics[f"episodes/answers_{kind}"] = found.metrics["answers"]
            played.append(found)
        return metrics, played[0]


def by_agent(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Puts the samples of each agent of an episode together: a transcript that was truncated is several. -> the agents,
    and their samples, in the order in which they come."""
    agents: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        agents.setdefault((rollout.payload[EPISODE], rollout.payload[AGENT]), []).append(rollout)
    return list(agents.values())


def _grade(context: RolloutContext, episodes: Sequence[Episode]) -> dict[tuple[int, str], Graded]:
    """Has the texts graded that environments left to the run's reward function. -> by episode and agent."""
    asked = [(one.number, agent) for one in episodes for agent in one.answers]
    with context.watch("reward"):
        texts = [episodes[number].answers[agent] for number, agent in asked]
        graded = context.grade(texts, [episodes[number].task.payload for number, _ in asked])
    check_failures(graded, context.max_failure_share)
    return dict(zip(asked, graded, strict=True))


def _figures(episodes: Sequence[Episode]) -> dict[str, float]:
    count = max(1, len(episodes))
    names = {"answers": "turns", "tool_calls": "tool_calls", "cuts": "cuts"}  # metric -> what an episode has of it
    metrics = {metric: sum(getattr(one, own) for one in episodes) / count for metric, own in names.items()}
    for kind in (Outcome.TIMEOUT, Outcome.ERROR):
        metrics[f"episodes/{kind.value}"] = float(sum(one.outcome is kind for one in episodes))
    return metrics
