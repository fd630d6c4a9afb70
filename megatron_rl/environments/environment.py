"""Base classes EpisodeMaker (an object that plays episodes) and Environment (a world in which models act), and the
settings of episodes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.dialogue import TEXT
from megatron_rl.environments.episode_runner import EpisodesPlay
from megatron_rl.environments.episode_types import Episode, EpisodeEnd, NextRequest, Said
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt


@dataclass(kw_only=True)
class EpisodeSettings:
    """Settings for playing episodes with an environment or any other EpisodeMaker."""

    # How messages are converted to tokens. text: the texts are concatenated. chat: the tokenizer's chat template.
    # renderers:NAME: the renderer NAME of the library `renderers`, which also parses tool calls.
    dialogue: str = TEXT
    # {role: system message} for the conversations of the role's agents. An entry is used only if the environment sends
    # no system message. The entry of the first role is used only if the problem has no system message (data.system).
    # Not available with dialogue = text.
    system: Mapping[str, str] = field(default_factory=dict)
    episode_timeout_s: PositiveFloat = 3600.0  # timeout of an episode, from the call of the environment's `begin`
    step_timeout_s: PositiveFloat = 120.0  # timeout of one call of the environment's `begin`, `step` or `close`
    # maximum number of concurrent calls of methods of environments; for Verifiers, of concurrent episodes
    workers: PositiveInt = 64
    # Mean number of tokens that the environment inserts before each answer of an agent except the agent's first answer.
    # Only `megatron-rl plan` uses this estimate.
    told: NonNegativeInt = 0
    # Mean time in seconds that the environment takes to process an answer before it requests the next answer. Only
    # `megatron-rl plan` uses this estimate.
    tool_s: NonNegativeFloat = 0.0


class EpisodeMaker(ABC):
    """Base class of environments, and of other objects that play episodes with the engines of the roles.

    Copies of a recipe share one EpisodeMaker, so that the processes and data that the EpisodeMaker has started or
    loaded exist only once. Therefore several threads may call `play` at the same time.
    """

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        return self

    @abstractmethod
    def play(
        self,
        context: RolloutContext,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
        numbers: Sequence[int] | None = None,
    ) -> list[Episode]:
        """Plays one episode of each of [E] tasks. Returns [E] episodes, in order.

        `seeds`: seed of each episode. `samplings`: {role: sampling parameters}, with one sample per prompt (n = 1).
        `numbers`: index of each episode among the episodes of the iteration (Episode.number); None: 0 to E - 1. The
        seed of each answer is a function of the role's seed, the seed and index of the episode, the agent, and the
        index of the answer. So an episode that is played again with the same seed and index gets the same answers.
        Raises EngineError if an engine fails. If an environment fails, no exception is raised; the failure is the
        outcome of the episode.
        """
        ...

    def speaking_roles(self) -> Collection[str] | None:
        """Returns the roles whose models generate answers, or None if these roles are not known.

        Before a run starts, these roles are compared with the roles of the agents that the recipe defines.
        """
        return None

    def check(self, settings: EpisodeSettings) -> None:
        """Raises ConfigError if the episodes cannot be played with these settings.

        The default implementation accepts all settings.
        """
        return None

    def most_answers(self, role: str) -> int | None:
        """Returns the maximum number of answers of an agent per episode, or None if the maximum is not known.

        The maximum is used by `megatron-rl plan`, and by the check of the settings `told` and `tool_s`.
        """
        return None

    def files(self) -> Mapping[str, str]:
        """Returns {argument: path} of the files that the episodes read. The files must exist before a run starts.

        The command `megatron-rl plan` works without the files.
        """
        return {}

    def load(self) -> None:
        """Loads data that takes long to load. Calls after the first one are no-ops.

        The method is called before each batch of episodes, in the process that plays the episodes. Raises ConfigError
        if a file cannot be used.
        """
        return None


class Environment(EpisodeMaker):
    """Base class of environments in which models act. A subclass is a dataclass whose fields are its arguments in the
    config.

    The environment is built once on every rank, also by the commands `check` and `plan`. Only the rank that plays the
    episodes calls `load`, which loads the environment's data. Each episode uses a shallow copy of the environment.
    `begin` must create the state of the episode, because a shallow copy shares lists and other mutable values with the
    other copies. `begin`, `step` and `close` of a copy are called from different threads. The episode must be a
    deterministic function of the task, the seed and the models' answers.
    """

    @abstractmethod
    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[NextRequest] | EpisodeEnd:
        """Starts an episode. `task`: the payload of a problem, with the question. Returns the requests for the first
        answers, or the end of the episode."""
        ...

    @abstractmethod
    def step(self, said: Said) -> Sequence[NextRequest] | EpisodeEnd:
        """Processes one answer of an agent. Returns requests for the next answers, or the end of the episode.

        The list of requests may be empty while other answers are pending. Answers are passed in the order in which
        their requests were returned. Raises EnvironmentFailure if the episode failed; any other exception is treated as
        a failure of the kind "infrastructure".
        """
        ...

    def play(
        self,
        context: RolloutContext,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
        numbers: Sequence[int] | None = None,
    ) -> list[Episode]:
        """Plays one episode of each task; see `EpisodeMaker.play`."""
        indices = range(len(tasks)) if numbers is None else numbers
        return EpisodesPlay(self, context, samplings, settings).play(tasks, seeds, indices)

    def copy(self) -> Self:
        """Returns a shallow copy of the environment for one episode."""
        return copy.copy(self)

    def close(self) -> None:
        """Releases the resources of the episode. The method is called once, even if `step` hangs in another thread."""


def problems(
    maker: EpisodeMaker, settings: EpisodeSettings, roles: Collection[str], *, key: str
) -> Iterator[str]:  # fmt: skip
    """Yields an error message for each setting that does not fit the EpisodeMaker.

    The roles of the recipe's agents (`roles`) must be equal to `maker.speaking_roles()`, unless this method returns
    None. Every system message in the settings must be used. `settings.told` and `settings.tool_s` must be 0 if
    `maker.most_answers` gives no role more than one answer. `key`: name of the recipe's setting that lists the roles,
    which error messages contain.
    """
    speaking = maker.speaking_roles()
    if speaking is not None and set(speaking) != set(roles):
        yield (
            f"recipe.args.{key} names {', '.join(roles)}, and {type(maker).__name__} (recipe.args.environment) asks "
            f"{', '.join(dict.fromkeys(speaking))}: name the same roles in both"
        )
    for role, text in settings.system.items():
        system = f"recipe.args.system.{role} = {text[:40]!r}"
        if role not in roles:
            yield f"{system}: the roles of recipe.args.agents are {', '.join(roles)}"
        elif not isinstance(maker, Environment):
            yield f"{system}: {type(maker).__name__} makes its own conversations; write it in there"
        elif settings.dialogue == TEXT:
            yield (
                f"{system}, but recipe.args.dialogue = {TEXT!r} has no system messages: set it to chat, or write the "
                "text into the environment's first message"
            )
    answers_once = all((maker.most_answers(role) or 1) == 1 for role in roles)
    for name, value in (("told", settings.told), ("tool_s", settings.tool_s)):
        if value and answers_once:
            yield (
                f"recipe.args.{name} = {value} is between two answers of an agent, and the environment knows of one: "
                f"let its `most_answers` say more, or tell the plan by --episode {min(roles)}.{name}={value}"
            )


def estimates(settings: EpisodeSettings, maker: EpisodeMaker, roles: Collection[str]) -> dict[str, EpisodeEstimate]:
    """Returns {role: EpisodeEstimate} for `megatron-rl plan`, computed from `maker.most_answers` and the settings."""
    most = {role: maker.most_answers(role) or 1 for role in roles}
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
