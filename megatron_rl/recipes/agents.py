"""Trains roles on episodes of an environment: conversations with tools, games, tasks that others have written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_rl.algorithms.advantages import TRAINED, assign_advantages
from megatron_rl.algorithms.role_credit import DECAY, RoleBaselines, compare_peers
from megatron_rl.chat import problem_text
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.base import Sampling
from megatron_rl.environments.base import EpisodeMaker, EpisodeSettings, check_system, estimates
from megatron_rl.environments.dialogue import TEXT, check_dialogue
from megatron_rl.environments.moves import SEAT, Episode
from megatron_rl.environments.refusals import with_rewards
from megatron_rl.recipes.base import check_arguments, sampling_for
from megatron_rl.rewards.pool import Graded, check_failures
from megatron_rl.training.rollouts import greedy, plain
from megatron_rl.training.turns import Part, Recipe, Schedule, Source, Table, Turn
from megatron_rl.types import Outcome, Prompt, Rollout

OUTCOME = "outcome"  # the reward that the run's reward function gives, where the environment leaves it to that
CURE = "Mend the environment or its tools, or raise recipe.args.step_timeout_s or reward.max_failure_share"


@dataclass(kw_only=True)
class Agents(EpisodeSettings, Recipe):
    """A run whose every turn plays episodes of the data set's problems, and trains the roles that spoke in them.

    An episode that fails or is late is no sample, and no reward of 0: its group goes on without it.
    """

    updates: int  # of the run
    environment: Use  # an Environment or another EpisodeMaker, by target and args
    seats: Mapping[str, int] = field(default_factory=lambda: {"agent": 1})  # roles that speak, and their seats in an
    # episode; the first role's tokenizer holds for the problems
    trained: Sequence[str] = ()  # roles that learn; none named: all
    group_size: int = 8  # episodes of each problem, all with the same seed of the environment
    rewards: Mapping[str, float] = field(default_factory=lambda: {OUTCOME: 1.0})  # by name: its weight in what counts
    # Samples of one role that are compared with each other. task: those of one problem. episode: those of one episode,
    # for several seats of a role. ema: each with a moving average of its role's rewards (SPIRAL, arXiv 2506.24119).
    compared: Literal["task", "episode", "ema"] = "task"
    estimator: str = "grpo"  # for `task`: a word of algorithms.estimators, or module:name
    ema_decay: float = DECAY

    def __post_init__(self) -> None:
        groups = ["group_size"] if self.compared == "task" else []
        check_arguments(self, groups=groups, positive=["updates", "group_size", "workers"], shares=["ema_decay"])
        for name in ("seats", "rewards"):
            if not getattr(self, name):
                raise ConfigError(f"recipe.args.{name} is empty: name at least one")
        if unknown := set(self.trained) - set(self.seats):
            raise ConfigError(f"recipe.args.trained names {', '.join(sorted(unknown))}, and recipe.args.seats does not")
        if self.ema_decay == 1.0:
            raise ConfigError("recipe.args.ema_decay = 1.0: the average would never move; give less than 1")
        check_dialogue(self.dialogue)
        self._maker: EpisodeMaker = build(self.environment)
        if not isinstance(self._maker, EpisodeMaker):
            raise ConfigError(f"recipe.args.environment.target = {self.environment.target!r} is no EpisodeMaker")
        check_system(self, self._maker, self.seats)
        self._estimates = estimates(self, self._maker, self.seats)
        self._baselines = RoleBaselines()

    def roles(self) -> Mapping[str, Part]:
        drawn = {role: self.group_size * count for role, count in self.seats.items()}
        return {
            r: Part(trained=r in self._trained, samples=count, drawn=drawn, episode=self._estimates[r])
            for r, count in drawn.items()
        }

    def schedule(self) -> Schedule:
        return [[tuple(self._trained)]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        if "messages" in payload and self.dialogue == TEXT:
            raise ConfigError(
                f"recipe.args.dialogue = {TEXT!r}, and the problems are conversations: set it to chat, or data.chat to "
                "false"
            )
        return problem_text("{question}", payload)

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        problems = source.take()
        tasks = [problem for problem in problems for _ in range(self.group_size)]
        seeds = [table.seed_for(turn.number, "task", i // self.group_size) for i in range(len(tasks))]
        samplings = {role: sampling_for(table, turn, role, 1) for role in self.seats}
        with table.watch("rollout"):
            episodes = self._maker.play(table, tasks, seeds, samplings, self)
        rollouts, figures = self._graded(table, episodes)
        table.note(turn.role, figures)
        return {role: self._credited([r for r in rollouts if r.role == role]) for role in turn.roles}

    def evaluate(self, prompts: Sequence[Prompt], table: Table) -> dict[str, float]:
        """Plays one episode of each problem at temperature 1, and one by the likeliest tokens; an episode that failed
        counts with rewards of 0."""
        out: dict[str, float] = {}
        seeds = [table.seed_for("evaluation", i) for i in range(len(prompts))]
        for kind, alone in (("sampled", plain), ("greedy", greedy)):
            own: dict[str, Sampling] = {role: alone(table.samplings[role], seed=table.seed) for role in self.seats}
            rollouts, figures = self._graded(table, self._maker.play(table, prompts, seeds, own, self))
            for role, count in self.seats.items():
                own_last = [r for r in _last(rollouts) if r.role == role]
                for name in self.rewards:
                    gained = [r.rewards[name] for r in own_last if name in r.rewards]  # a frozen role may have none
                    if gained or role in self._trained:
                        out[f"{role}/{name}_{kind}"] = sum(gained) / (len(prompts) * count)
            out[f"episodes/answers_{kind}"] = figures["turns"]
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self._baselines.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baselines = RoleBaselines(state["baselines"])

    @property
    def _trained(self) -> list[str]:
        return [role for role in self.seats if not self.trained or role in self.trained]

    def _graded(self, table: Table, episodes: Sequence[Episode]) -> tuple[list[Rollout], dict[str, float]]:
        """Grades what the environments left to the run's reward function. -> the samples with all their rewards, and
        figures of the episodes. Raises RewardFailure when too many episodes, or gradings, fail."""
        episodes = [with_rewards(one, self.rewards, self._trained, OUTCOME) for one in episodes]
        ended = [Graded(one.outcome, detail=one.why) for one in episodes]
        check_failures(ended, table.max_failure_share, what="episodes", cure=CURE)
        asked = [(one.number, seat) for one in episodes for seat in one.answers]
        with table.watch("reward"):
            texts = [episodes[number].answers[seat] for number, seat in asked]
            graded = table.grade(texts, [episodes[number].task.payload for number, _ in asked])
        check_failures(graded, table.max_failure_share)
        scores = dict(zip(asked, graded, strict=True))
        rollouts = []
        for one in episodes:
            for rollout in one.rollouts:
                grading = scores.get((one.number, rollout.payload[SEAT]))
                if grading is not None and grading.outcome is not Outcome.SCORE:
                    continue
                extra = {} if grading is None else {OUTCOME: grading.score}
                payload = {**rollout.payload, "episode": str(one.number)}
                group = f"{one.number // self.group_size}:{one.task.id}"
                rollouts.append(replace(rollout, group=group, payload=payload).with_rewards(**extra))
        count = max(1, len(episodes))
        figures = {
            name: sum(getattr(one, name) for one in episodes) / count for name in ("turns", "tool_calls", "cuts")
        }
        for kind in (Outcome.TIMEOUT, Outcome.ERROR):
            figures[f"episodes/{kind.value}"] = float(sum(one.outcome is kind for one in episodes))
        return rollouts, figures

    def _credited(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Gives samples of one role their advantages. The moving average is used before a reward moves it."""
        if self.compared == "task":
            return assign_advantages(rollouts, reward=self.rewards, estimator=self.estimator)
        summed = [r.with_rewards(**{TRAINED: sum(w * r.rewards[n] for n, w in self.rewards.items())}) for r in rollouts]
        if self.compared == "episode":
            return compare_peers(summed, [str(r.payload["episode"]) for r in summed], TRAINED)
        credited, self._baselines = self._baselines.credit(summed, TRAINED, decay=self.ema_decay)
        return credited


def _last(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the last sample of each seat, as cut transcripts are several."""
    return list({(rollout.payload["episode"], rollout.payload[SEAT]): rollout for rollout in rollouts}.values())
