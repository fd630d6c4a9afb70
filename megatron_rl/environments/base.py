"""The protocol of environments, and of everything else that plays episodes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_rl.engines.base import Sampling
from megatron_rl.environments.episodes import EpisodesPlay
from megatron_rl.environments.moves import Episode, Move, Over, Said
from megatron_rl.training.turns import Table
from megatron_rl.types import Prompt


@dataclass(kw_only=True)
class EpisodeSettings:
    """Settings of the play of episodes, whoever plays them."""

    # text: messages are put one behind the other as they are. chat: the tokenizer's chat template. renderers:NAME: that
    # renderer of the library `renderers`, which also reads calls of tools.
    dialogue: str = "text"
    episode_timeout_s: float = 3600.0  # from an episode's begin on; a later one is given up
    step_timeout_s: float = 120.0  # for one `begin` or `step`
    workers: int = 64  # calls of environments that run at the same time


class EpisodeMaker(ABC):
    """Something that plays episodes with the roles' engines."""

    @abstractmethod
    def play(
        self,
        table: Table,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> list[Episode]:
        """Plays one episode of every task, with its seed. [E] tasks and seeds -> [E] episodes, in order.

        `samplings` is by role, with n = 1; the seed of each answer is a function of the role's seed, the episode's
        place, the seat and the number of its answer. Raises EngineError where an engine fails; whatever happens to an
        environment is an episode's outcome.
        """
        ...


class Environment(EpisodeMaker):
    """A world that models act in. A subclass is a dataclass whose fields are its arguments in the config.

    It is built once. Every episode has a shallow copy of it, whose three methods are called one after the other, from
    changing threads: what belongs to the episode is set in `begin`, and what takes long to load in __post_init__. What
    happens is a function of the task, the seed and what the models say.
    """

    @abstractmethod
    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[Move] | Over:
        """Starts an episode of a task, which is a problem's payload. -> the seats that speak first."""
        ...

    @abstractmethod
    def step(self, said: Said) -> Sequence[Move] | Over:
        """Takes one answer. -> the seats that speak next; none while answers to earlier moves are still to come.

        Answers come in the order in which their moves were returned. Raises EnvironmentFailure where something broke;
        any other exception is taken for such a failure too.
        """
        ...

    def play(
        self,
        table: Table,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> list[Episode]:
        """See EpisodeMaker."""
        return EpisodesPlay(self, table, samplings, settings).play(tasks, seeds)

    def copy(self) -> Self:
        """Returns the environment of one episode."""
        return copy.copy(self)

    def close(self) -> None:
        """Ends what the episode still holds. It is called once, also while `step` hangs in another thread."""
