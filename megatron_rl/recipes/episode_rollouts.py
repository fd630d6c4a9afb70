"""Plays, grades and evaluates episodes of an environment, for recipes that train on episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import FiniteFloat

from megatron_rl.batches.units import members
from megatron_rl.config.base import refuse
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.dialogue import CHAT, TEXT, check_dialogue
from megatron_rl.environments.environment import EpisodeMaker, EpisodeSettings, estimates, problems
from megatron_rl.environments.episode_types import Episode
from megatron_rl.environments.validation import check_agents, with_rewards
from megatron_rl.recipes.answers import Answer, GradedAnswer, answer_metrics, answers_of
from megatron_rl.recipes.replacement import ROUNDS, to_replace
from megatron_rl.rewards.grading_pool import Graded, check_failures
from megatron_rl.run.metrics import REPLACED
from megatron_rl.texts.chat_template import problem_text
from megatron_rl.texts.response_forms import response_text
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import evaluated, greedy
from megatron_rl.types import AGENT, EPISODE, Outcome, Prompt, Rollout, is_correct

# name of the reward computed by the run's reward function, if the environment does not compute the rewards itself
OUTCOME = "outcome"
CURE = "Mend the environment or its tools, or raise recipe.args.step_timeout_s or reward.max_failure_share"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodesGraded:
    """The result of playing and grading episodes of an environment."""

    episodes: Sequence[Episode]
    # samples of the episodes that did not fail, with all rewards; the payload has the index of the episode
    rollouts: list[Rollout]
    # Means per episode: answers (of all agents), tool_calls, cuts (truncations of the transcript).
    # Counts of failed episodes: episodes/timeout, episodes/error. The following counts are left out if they are 0.
    # episodes/policy: episodes that the policy failed. episodes/repeated: episodes played again with the same seeds.
    # replaced/timeout, replaced/tool, replaced/error: episodes that were replaced because of a timeout, because the
    # environment or a tool failed, or because a grading failed. graded/repeated: gradings that failed once.
    metrics: dict[str, float]


@dataclass(kw_only=True)
class OverEpisodes(EpisodeSettings):
    """Base class of recipes that train on episodes of an environment. The fields are the arguments of all such recipes.

    An episode whose environment fails is played again, and is then replaced by a new episode of the same problem; see
    `play_episodes`. If the new episode fails too, the episode gives no sample, rather than a sample with a reward of 0.
    The other episodes of the group are used.
    """

    environment: Use  # target: class of the environment (an EpisodeMaker); args: arguments of the class
    # weight of each reward in the total reward, by reward name
    rewards: Mapping[str, FiniteFloat] = field(default_factory=lambda: {OUTCOME: 1.0})

    def build_maker(self, agents: Mapping[str, int], rewarded: Collection[str], *, key: str) -> None:
        """Creates the EpisodeMaker, which plays the episodes, from the arguments of the recipe.

        `agents`: number of agents per episode of each role that takes part.
        `rewarded`: roles whose samples must have all rewards named in the argument `rewards`.
        `key`: name of the setting with the roles, for error messages.

        Raises ConfigError for invalid arguments of the environment or the episodes.
        """
        if not self.rewards:
            raise ConfigError("recipe.args.rewards is empty: name at least one")
        check_dialogue(self.dialogue)
        self._maker: EpisodeMaker = build(self.environment)
        if not isinstance(self._maker, EpisodeMaker):
            raise ConfigError(
                f"recipe.args.environment.target = {self.environment.target!r} is no environment: name a class that "
                "inherits from megatron_rl.environments.environment:Environment, with @dataclass above it"
            )
        refuse(*problems(self._maker, self, agents, key=key))
        self._maker.check(self)
        self.estimates = estimates(self, self._maker, agents)
        self._rewarded, self._agents = tuple(rewarded), dict(agents)

    def files(self) -> Mapping[str, str]:
        """Returns {config key: path} of the files that the environment and its tools read."""
        return {f"recipe.args.environment.args.{name}": path for name, path in self._maker.files().items()}

    def episode_prompt(self, payload: Mapping[str, Any]) -> str:
        """Returns the text of a problem. The messages of an episode are made by the environment, not here. Raises
        ConfigError if the problem is a conversation (a list of messages) and the argument `dialogue` is "text".
        """
        if "messages" in payload and self.dialogue == TEXT:
            raise ConfigError(
                f"recipe.args.dialogue = {TEXT!r}, and the problems are conversations: set it to chat, or data.chat to "
                "false"
            )
        return problem_text("{question}", payload)

    def play_episodes(
        self, context: RolloutContext, prompts: Sequence[Prompt], seeds: Sequence[int],
        samplings: Mapping[str, Sampling], *,
        per_problem: int = 1,
    ) -> EpisodesGraded:  # fmt: skip
        """Plays `per_problem` episodes of each of [P] problems. Texts for which the environment gives no reward are
        graded with the run's reward function.

        `seeds`: [P] environment seeds, one for all episodes of a problem.
        `samplings`: sampling settings by role.

        An episode that failed because of the infrastructure (see FailureKind) is played again with the same seeds,
        unless all episodes failed. If the episode fails again, or if a grading of the episode's texts failed, the
        episode is replaced by an episode with the same environment seed and new sampling seeds, up to ROUNDS times,
        unless decoding is greedy; see `to_replace`.

        The samples of one problem form a group. Raises RewardFailure if too many gradings fail, or if too many episodes
        fail even after they were played again. Raises ConfigError if an episode had more agents of a role than
        configured in the recipe.
        """
        tasks = [prompt for prompt in prompts for _ in range(per_problem)]
        played = _Played(context)

        def play(numbers: Sequence[int], by_role: Mapping[str, Sampling]) -> None:
            problems = [tasks[number] for number in numbers]
            env_seeds = [seeds[number // per_problem] for number in numbers]
            with context.watch("rollout"):
                episodes = self._maker.play(context, problems, env_seeds, by_role, self, numbers)
            check_agents(episodes, self._agents)
            least = context.lowest_reward
            played.add(with_rewards(e, self.rewards, self._rewarded, graded=OUTCOME, lowest=least) for e in episodes)

        self._maker.load()
        play(range(len(tasks)), samplings)
        repeated = [number for number, episode in played.episodes.items() if episode.failure == "infrastructure"]
        repeated = [] if len(repeated) == len(tasks) > 1 else repeated
        if repeated:
            played.counts["episodes/repeated"] = len(repeated)
            play(repeated, samplings)
        played.check()
        for attempt in range(ROUNDS if any(sampling.temperature for sampling in samplings.values()) else 0):
            failed = played.failed()
            if not (numbers := to_replace(failed, count=len(tasks), group_size=per_problem)):
                break
            played.counts.update(f"{REPLACED}{failed[number]}" for number in numbers)
            seeded = {r: replace(s, seed=context.seed_for(s.seed, "replaced", attempt)) for r, s in samplings.items()}
            play(numbers, seeded)
        return played.result(per_problem)

    def reads_answers(self) -> Mapping[str, str]:
        """Returns the roles that take part with the dialogue "chat": the history of a conversation holds their answers,
        and not their thoughts."""
        return dict.fromkeys(self._agents if self.dialogue == CHAT else (), f"recipe.args.dialogue = {CHAT!r}")

    def total(self, rollout: Rollout) -> float:
        """Returns the total reward of a sample: the sum of its rewards, weighted by the argument `rewards`."""
        return sum(weight * rollout.rewards[name] for name, weight in self.rewards.items())

    def measure_episodes(
        self, context: RolloutContext, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, float], EpisodesGraded]:
        """Plays as many episodes of each problem as `context.evaluation` requests, and one greedy episode if
        `context.evaluation.also_greedy` is True. Returns metrics, and the sampled episodes. Names of metrics of greedy
        episodes end in _greedy.

        The metrics are the mean of each reward over the agents of a role, and the number of answers per episode of all
        agents. An agent without a reward, for instance in a failed episode, is included with a reward of 0 and counted
        in the metric ungraded. If the run's reward function is the only reward, the metric of this reward is called
        reward, and accuracy (the share of correct agents), pass@k and the other metrics of `answer_values` are added;
        the answers are stored in `context.answers`.
        """
        metrics: dict[str, float] = {}
        draws, seed = context.evaluation, context.seed
        seeds = [context.seed_for("evaluation", i) for i in range(len(prompts))]
        samplings = {"": {role: evaluated(context.samplings[role], draws, seed=seed) for role in self._agents}}
        if draws.also_greedy:
            samplings["_greedy"] = {role: greedy(context.samplings[role], seed=seed) for role in self._agents}
        played = []
        for suffix, by_role in samplings.items():
            per_problem = 1 if suffix else draws.n
            alone = {role: replace(sampling, n=1) for role, sampling in by_role.items()}
            episodes = self.play_episodes(context, prompts, seeds, alone, per_problem=per_problem)
            last = [episodes.rollouts[unit[-1]] for unit in members(episodes.rollouts)]
            for role, count in self._agents.items():
                agents = len(prompts) * count * per_problem
                for name in self.rewards:  # samples of a frozen role may lack rewards
                    gained = [r.rewards[name] for r in last if r.role == role and name in r.rewards]
                    if not gained and role not in self._rewarded:
                        continue
                    metrics[f"{role}/{'reward' if name == OUTCOME else name}{suffix}"] = sum(gained) / agents
                    if len(gained) < agents:
                        metrics[f"{role}/ungraded{suffix}"] = float(agents - len(gained))
                    correct = [is_correct(value, context.threshold) for value in gained]
                    if [*self.rewards] == [OUTCOME] and None not in correct:
                        metrics[f"{role}/accuracy{suffix}"] = sum(map(bool, correct)) / agents
                graded = role in self._rewarded or any(r.role == role and OUTCOME in r.rewards for r in last)
                if [*self.rewards] == [OUTCOME] and graded and not suffix:
                    answers = self._answers(context, prompts, [r for r in last if r.role == role], count * per_problem)
                    context.answers[role] = answers
                    metrics |= answer_metrics(role, answers, draws.k)
            metrics[f"episodes/answers{suffix}"] = episodes.metrics["answers"]
            if replaced := sum(count for name, count in episodes.metrics.items() if name.startswith(REPLACED)):
                metrics[f"episodes/replaced{suffix}"] = replaced
            played.append(episodes)
        return metrics, played[0]

    def _answers(
        self, context: RolloutContext, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], count: int
    ) -> list[list[Answer]]:
        """Converts samples of one role to graded answers of an evaluation. Returns [P][count] answers to P problems.

        `rollouts`: the last sample of each agent of the role in each episode. `count`: number of answers per problem,
        one of each agent in each episode. A sample without a graded outcome is counted as a failed answer.
        """
        graded: dict[tuple[int, int], GradedAnswer] = {}
        seen = Counter[int]()
        for rollout in (r for r in rollouts if OUTCOME in r.rewards):
            place = int(rollout.group.partition(":")[0])
            text = response_text(context.tokenizers[rollout.role], rollout.prompt, rollout.response)
            graded[place, seen[place]] = rollout, text, is_correct(rollout.rewards[OUTCOME], context.threshold)
            seen[place] += 1
        return answers_of(prompts, graded, count)


@dataclass(eq=False)
class _Played:
    """The episodes of one call of `play_episodes`, and the gradings of the agents' texts, by index of the episode."""

    context: RolloutContext
    episodes: dict[int, Episode] = field(default_factory=dict)
    gradings: dict[int, dict[str, Graded]] = field(default_factory=dict)  # {index: {agent: grading of its text}}
    # metrics that are left out if they are 0, see EpisodesGraded.metrics
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, episodes: Iterable[Episode]) -> None:
        """Adds episodes. An added episode replaces an earlier episode with the same index. Texts for which the
        environment gave no reward are graded with the run's reward function.
        """
        added = {episode.number: episode for episode in episodes}
        answers = [(episode, agent) for episode in added.values() for agent in episode.answers]
        with self.context.watch("reward"):
            texts = [episode.answers[agent] for episode, agent in answers]
            graded = self.context.grade(texts, [episode.task.payload for episode, _ in answers])
        self.episodes |= added
        self.gradings |= {number: {} for number in added}
        for (episode, agent), grading in zip(answers, graded, strict=True):
            self.gradings[episode.number][agent] = grading
            self.counts["graded/repeated"] += grading.repeated

    def check(self) -> None:
        """Raises RewardFailure if the share of failed episodes, or of failed gradings, is above max_failure_share."""
        ended = [Graded(episode.outcome, detail=episode.why, trace=episode.trace) for episode in self.episodes.values()]
        check_failures(ended, self.context.max_failure_share, what="episodes", cure=CURE)
        gradings = [grading for by_agent in self.gradings.values() for grading in by_agent.values()]
        check_failures(gradings, self.context.max_failure_share)

    def failed(self) -> dict[int, str]:
        """Returns {index: reason} of the episodes that failed for a reason that the policy did not cause. The reason is
        tool (an environment or one of its tools failed), timeout, or error (a grading failed).
        """
        reasons_of_failure = {}
        for number, episode in self.episodes.items():
            if episode.failure == "infrastructure":
                reasons_of_failure[number] = "timeout" if episode.outcome is Outcome.TIMEOUT else "tool"
            elif reasons := [grading.outcome.value for grading in self.gradings[number].values() if grading.failed]:
                reasons_of_failure[number] = reasons[0]
        return reasons_of_failure

    def result(self, per_problem: int) -> EpisodesGraded:
        """Returns the episodes, their samples with all rewards, and metrics. `per_problem`: number of episodes."""
        rollouts, episodes = [], [episode for _, episode in sorted(self.episodes.items())]
        for number, episode in enumerate(episodes):
            for rollout in episode.rollouts:
                grading = self.gradings[number].get(rollout.payload[AGENT])
                if grading is not None and grading.outcome is not Outcome.SCORE:
                    continue
                extra = {} if grading is None else {**grading.metrics, OUTCOME: grading.score}
                payload = {**rollout.payload, EPISODE: str(number)}
                payload |= {} if grading is None else {"grading": grading.label}
                group = f"{number // per_problem}:{episode.task.id}"
                rollouts.append(replace(rollout, group=group, payload=payload).with_rewards(**extra))
        counts = self.counts | Counter({"episodes/policy": sum(episode.failure == "policy" for episode in episodes)})
        metrics = _figures(episodes) | {name: float(count) for name, count in counts.items() if count}
        return EpisodesGraded(episodes=episodes, rollouts=rollouts, metrics=metrics)


def _figures(episodes: Sequence[Episode]) -> dict[str, float]:
    count = max(1, len(episodes))
    # {name of the metric: attribute of Episode}
    names = {"answers": "turns", "tool_calls": "tool_calls", "cuts": "cuts"}
    metrics = {metric: sum(getattr(e, attribute) for e in episodes) / count for metric, attribute in names.items()}
    for kind in (Outcome.TIMEOUT, Outcome.ERROR):
        metrics[f"episodes/{kind.value}"] = float(sum(episode.outcome is kind for episode in episodes))
    return metrics
