"""What the loop asks of a recipe: whose turn it is, what a turn's rollouts are, and what the recipe gets to play it with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.engines.base import Engine, Sampling
from megatron_rl.rewards.pool import Graded
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.types import Prompt, Trajectory

Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]  # [B] responses and payloads -> [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One update to come: `role` is trained on rollouts made for it."""

    step: int  # loop step
    index: int  # place among the turns of that step
    role: str
    number: int  # turns of all roles before this one, over the run
    update: int  # turns of this role before this one, over the run


@dataclass(frozen=True, kw_only=True)
class Players:
    """Everything a recipe plays with, on the driver. The mappings have the role's name as key."""

    engines: Mapping[str, Engine]
    tokenizers: Mapping[str, Any]
    samplings: Mapping[str, Sampling]  # `n` and `seed` are the recipe's to set
    max_prompt_tokens: Mapping[str, int]
    grade: Grade
    watch: Stopwatch = field(default_factory=Stopwatch)
    seed: int = 0  # of the run
    max_failure_share: float = 1.0  # of gradings that may time out or raise, per call of `grade`

    def seed_for(self, *names: object) -> int:
        """A seed in [0, 2^63) that is a function of the run's seed and `names` alone, so that a resumed run draws the same."""
        digest = hashlib.blake2b("/".join(map(str, (self.seed, *names))).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a turn trains on: trajectories with advantages, in groups; and what was measured while they were made."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]


class Recipe(Protocol):
    """A training method. `turns` is a pure function of the step; play and evaluate run on the driver alone."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role it needs a model for, trained or not."""
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """The roles that are updated."""
        ...

    @property
    def prompt_role(self) -> str:
        """The role whose tokenizer and prompt length hold for the data set's prompts."""
        ...

    @property
    def group_sizes(self) -> Mapping[str, int]:
        """G of each trained role: samples per prompt."""
        ...

    def num_steps(self) -> int:
        """Steps of the whole run."""
        ...

    def turns(self, step: int) -> list[str]:
        """The roles trained at `step`, in order."""
        ...

    def generator_prompt(self, payload: Mapping[str, Any]) -> str:
        """The text a problem is put to `prompt_role` with."""
        ...

    def play(self, turn: Turn, prompts: Sequence[Prompt], players: Players) -> Played:
        """Roll out, reward and assign advantages."""
        ...

    def evaluate(self, prompts: Sequence[Prompt], players: Players, seed: int) -> dict[str, float]:
        """Figures on held-out problems, named `role/figure`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the recipe, as JSON values. Of the driver's copy."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        ...
