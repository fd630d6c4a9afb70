"""The protocol of environments, and of everything else that plays episodes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from megatron_rl.config.base import ConfigError
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.dialogue import TEXT
from megatron_rl.environments.episode_runner import EpisodesPlay
from megatron_rl.environments.episode_types import Episode, EpisodeEnd, NextRequest, Said
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt


@dataclass(kw_only=True)
class EpisodeSettings:
    """Settings of the play of episodes, whoever plays them."""

    # text: messages are put one behind the other as they are. chat: the tokenizer's chat template. renderers:NAME: that
    # renderer of the library `renderers`, which also reads calls of tools.
    dialogue: str = TEXT
    # By role: the system message that opens the conversation of each of its agents, where neither the environment sends
    # one nor, for the first role, the problem's own conversation has one (data.system). Not with the dialogue text.
    system: Mapping[str, str] = field(default_factory=dict)
    episode_timeout_s: float = 3600.0  # from an episode's begin on; a later one is given up
    step_timeout_s: float = 120.0  # for one `begin` or `step`
    workers: int = 64  # calls of environments that run at the same time
    # What `megatron-rl plan` is told of an environment, and nothing else reads: mean tokens that it puts before each
    # answer of an agent but the first, and mean seconds that it takes for that.
    told: int = 0
    tool_s: float = 0.0


class EpisodeMaker(ABC):
    """Something that plays episodes with the roles' engines."""

    @abstractmethod
    def play(
        self,
        context: RolloutContext,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> list[Episode]:
        """Plays one episode of each of [E] tasks with its seed. Returns [E] episodes, in order.

        `samplings` is by role, with n = 1. The seed of each answer is a function of the role's seed, the index of the
        episode, the agent, and the number of the answer. Raises EngineError if an engine fails. A failure of an
        environment is the outcome of its episode and raises nothing.
        """
        ...

    def speaking_roles(self) -> Collection[str] | None:
        """Returns the roles whose models are asked, or None if they are not known.

        Before a run, these roles are compared with the agents of the recipe.
        """
        return None

    def check(self, settings: EpisodeSettings) -> None:
        """Raises ConfigError for settings with which these episodes cannot be played.

        The default accepts all settings.
        """
        return None

    def most_answers(self, role: str) -> int | None:
        """Returns the largest number of answers of an agent per episode, or None if it is not known.

        Only plans of memory and time read the number.
        """
        return None

    def files(self) -> Mapping[str, str]:
        """Returns {argument: path} of the files that the episodes read and that must exist before a run.

        Plans do not need the files.
        """
        return {}

    def load(self) -> None:
        """Loads data that takes long to load. Calls after the first one are no-ops.

        It is called before each batch of episodes, in the process that plays them. Raises ConfigError for files that
        cannot be used.
        """
        return None


class Environment(EpisodeMaker):
    """A world that models act in. A subclass is a dataclass whose fields are its arguments in the config.

    It is built once on every rank, also for checks and plans, and loaded on the rank that plays. Each episode has a
    shallow copy of the environment. The three methods of a copy are called one after the other, from different threads,
    so state of the episode is set in `begin`. What happens must be a function of the task, the seed and the models'
    answers.
    """

    @abstractmethod
    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[NextRequest] | EpisodeEnd:
        """Starts an episode of a task, which is the payload of a problem. Returns the agents that speak first."""
        ...

    @abstractmethod
    def step(self, said: Said) -> Sequence[NextRequest] | EpisodeEnd:
        """Takes one answer.

        Returns the agents that speak next, which may be none while other answers are still to come.

        Answers come in the order in which their requests were returned. Raises EnvironmentFailure if something broke.
        Any other exception counts as such a failure, too.
        """
        ...

    def play(
        self,
        context: RolloutContext,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> list[Episode]:
        """See EpisodeMaker."""
        return EpisodesPlay(self, context, samplings, settings).play(tasks, seeds)

    def copy(self) -> Self:
        """Returns the environment of one episode."""
        return copy.copy(self)

    def close(self) -> None:
        """Ends what the episode still holds. It is called once, also while `step` hangs in another thread."""


def check_speakers(maker: EpisodeMaker, roles: Collection[str], *, key: str) -> None:
    """Raises ConfigError where the roles that a recipe has agents for are not those that its episodes ask, as far as
    their maker tells. `key`: of the setting that names the recipe's."""
    asked = maker.speaking_roles()
    if asked is None or set(asked) == set(roles):
        return
    own, others = ", ".join(dict.fromkeys(asked)), ", ".join(roles)
    raise ConfigError(
        f"recipe.args.{key} names {others}, and {type(maker).__name__} (recipe.args.environment) asks {own}: name the "
        "same roles in both"
    )


def check_system(settings: EpisodeSettings, maker: EpisodeMaker, roles: Collection[str]) -> None:
    """Raises ConfigError for system messages that no agent would have. `roles`: those that speak."""
    for role, text in settings.system.items():
        key = f"recipe.args.system.{role} = {text[:40]!r}"
        if role not in roles:
            raise ConfigError(f"{key}: the roles of recipe.args.agents are {', '.join(roles)}")
        if not isinstance(maker, Environment):
            raise ConfigError(f"{key}: {type(maker).__name__} makes its own conversations; write it in there")
        if settings.dialogue == TEXT:
            raise ConfigError(
                f"{key}, but recipe.args.dialogue = {TEXT!r} has no system messages: set it to chat, or write the text "
                "into the environment's first message"
            )


def estimates(settings: EpisodeSettings, maker: EpisodeMaker, roles: Collection[str]) -> dict[str, EpisodeEstimate]:
    """Returns what plans take an episode of each role to be: the most answers that its maker knows of, and what the
    settings say. Raises ConfigError for a setting below 0, and for one of what stands between answers where no role is
    known to answer twice."""
    most = {role: maker.most_answers(role) or 1 for role in roles}
    for name, value in (("told", settings.told), ("tool_s", settings.tool_s)):
        if value < 0:
            raise ConfigError(f"recipe.args.{name} = {value}: give at least 0")
        if value and max(most.values()) == 1:
            raise ConfigError(
                f"recipe.args.{name} = {value} is between two answers of an agent, and the environment knows of one: "
                f"let its `most_answers` say more, or tell the plan by --episode {min(roles)}.{name}={value}"
            )
    return {
        role: EpisodeEstimate(
            answers=answers,
            told=settings.told if answers > 1 else 0,
            tool_s=settings.tool_s if answers > 1 else 0.0,
            calls_at_once=settings.workers,
            bounded=True,
        )
        for role, answers in most.items()
    }
