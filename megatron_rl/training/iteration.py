"""What a recipe is given to make rollouts with: the iteration, the source of prompts, and the context with engines and
graders.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.engines.protocol import Engine, Sampling, Session
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.types import Prompt, Rollout

Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]  # [B] responses and payloads -> [B]
# cycles of the run -> iterations of the cycle -> roles that the iteration trains
Schedule = Sequence[Sequence[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One round of rollouts and training to come: `roles` are trained, in this order, on rollouts made for it."""

    cycle: int  # index of the cycle in the schedule
    index: int  # place among the iterations of that cycle
    roles: tuple[str, ...]
    number: int  # iterations before this one, over the run
    updates: Mapping[str, int] = field(
        default_factory=dict
    )  # by role: iterations of that role before this one, over the run

    @property
    def role(self) -> str:
        """The first role that the iteration trains; the only one of most recipes."""
        return self.roles[0]

    def update(self, role: str) -> int:
        """Number of iterations of `role` before this one."""
        return self.updates.get(role, 0)


class PromptSource(Protocol):
    """The problems of an iteration. Its position is exact in checkpoints, however many prompts an iteration takes."""

    def take(self, count: int | None = None) -> list[Prompt]:
        """The next `count` prompts; None: run.prompts_per_iteration of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """Everything a recipe makes rollouts with, on the driver. The mappings have the role's name as key."""

    engines: Mapping[str, Engine]
    tokenizers: Mapping[str, Any]
    samplings: Mapping[str, Sampling]  # the recipe sets `n` and `seed`
    max_prompt_tokens: Mapping[str, int]
    grade: Grade
    partner_weights: Mapping[str, float] = field(default_factory=dict)  # by role: Rollout.partner_weight of its tandem
    watch: Stopwatch = field(default_factory=Stopwatch)
    seed: int = 0  # of the run
    threshold: float = 0.5  # the reward above which an answer or an episode is correct: the middle of reward.range
    max_failure_share: float = 1.0  # of the gradings of one iteration that may time out or raise
    # by role: the iteration's metrics so far, see `add_metrics`
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # JSON values that an evaluation keeps for the run's later ones

    def session(self, role: str) -> Session:
        """A new session with the role's engine."""
        return self.engines[role].session()

    def add_metrics(self, role: str, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the metrics line of `role` for this iteration."""
        self.metrics.setdefault(role, {}).update(metrics)

    def seed_for(self, *names: object) -> int:
        """Returns a seed in [0, 2^63) that is a function of the run's seed and `names` alone, so that a resumed run
        draws the same.
        """
        digest = hashlib.blake2b("/".join(map(str, (self.seed, *names))).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The material that an iteration trains on: rollouts with advantages by role, in the order of training; and metrics
    by role.
    """

    rollouts: Mapping[str, list[Rollout]]
    metrics: Mapping[str, Mapping[str, float]]  # by role


@dataclass(frozen=True, kw_only=True)
class RecipeRole:
    """The description that a recipe gives of one of its roles."""

    trained: bool = True
    samples: int = 1  # of each problem, that an update of this role trains on
    drawn: Mapping[str, int] = field(
        default_factory=dict
    )  # samples per problem that each role draws in an iteration of this one; for plans
    per_prompt: Mapping[str, int] = field(default_factory=dict)  # of these, samples with one prompt; without it: 1
    episode: EpisodeEstimate = field(default_factory=EpisodeEstimate)  # of a role that answers several times; for plans


class Recipe(ABC):
    """A training method. A subclass is a dataclass whose fields are the recipe's arguments in the config.

    `rollout` and `evaluate` run on the driver alone. The other members are pure functions of the arguments.
    """

    needs_shares: ClassVar[bool] = False  # it understands rewards from 0 to 1 alone, whatever reward.range says

    @abstractmethod
    def roles(self) -> Mapping[str, RecipeRole]:
        """Every role that the method needs a model for.

        The first one's tokenizer and prompt length hold for the data set's prompts.
        """
        ...

    @abstractmethod
    def schedule(self) -> Schedule:
        """All cycles of the run with their iterations."""
        ...

    @abstractmethod
    def prompt(self, payload: Mapping[str, Any]) -> str:
        """The text that a problem is put to the first role with."""
        ...

    @abstractmethod
    def rollout(
        self, iteration: Iteration, source: PromptSource, context: RolloutContext
    ) -> Mapping[str, Sequence[Rollout]]:
        """Rolls out, rewards and assigns advantages. -> rollouts to train on by role, in the order of training."""
        ...

    def check(self, spec: RunSpec) -> None:
        """Raises ConfigError for settings of the run, beside the recipe's own arguments, that the method does not work
        with. The roles of `spec` are those of the recipe."""
        return None

    def files(self) -> Mapping[str, str]:
        """Returns {key of the config: path} of the files beside data and models that must be there before a run."""
        return {}

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Returns metrics on held-out problems, named `role/metric`; none by default. What later evaluations of the run
        shall find, also after a resume, goes into `context.kept`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what later iterations need of earlier ones, as JSON values. It is taken on the driver after every
        iteration."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        return None
