"""The interface of recipes: the iteration, the source of prompts, the context with engines and graders, and the base
class Recipe.
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

# ([B] responses, [B] payloads) -> [B] gradings
Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]
# schedule[cycle][index of the iteration in the cycle] = roles that the iteration trains
Schedule = Sequence[Sequence[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One upcoming round of rollouts and training. The `roles` are trained in this order on the rollouts of the
    iteration.
    """

    cycle: int  # index of the cycle (item of the schedule)
    index: int  # index of the iteration within the cycle
    roles: tuple[str, ...]
    number: int  # number of earlier iterations in the run
    updates: Mapping[str, int] = field(default_factory=dict)  # number of earlier iterations of each role in the run

    @property
    def role(self) -> str:
        """The first role that the iteration trains. In most recipes it is the only role."""
        return self.roles[0]

    def update(self, role: str) -> int:
        """Returns the number of iterations of `role` before this one."""
        return self.updates.get(role, 0)


class PromptSource(Protocol):
    """The source of an iteration's problems. Checkpoints hold its exact position, no matter how many prompts an
    iteration takes.
    """

    def take(self, count: int | None = None) -> list[Prompt]:
        """Returns the next `count` prompts; run.prompts_per_iteration prompts if `count` is None."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """The engines, tokenizers, settings and grader with which a recipe generates rollouts, on the driver. The keys of
    the mappings are role names.
    """

    engines: Mapping[str, Engine]
    tokenizers: Mapping[str, Any]
    samplings: Mapping[str, Sampling]  # sampling settings of each role; the recipe sets `n` and `seed`
    max_prompt_tokens: Mapping[str, int]
    grade: Grade
    partner_weights: Mapping[str, float] = field(default_factory=dict)  # Rollout.partner_weight of each role's tandem
    watch: Stopwatch = field(default_factory=Stopwatch)
    seed: int = 0  # random seed of the run
    # an answer or episode is correct if its reward is above this threshold, the middle of reward.range
    threshold: float = 0.5
    max_failure_share: float = 1.0  # maximum share of the gradings of an iteration that may time out or raise
    # metrics of the iteration so far, by role; see `add_metrics`
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # JSON values that an evaluation stores for later evaluations of the run
    kept: dict[str, Any] = field(default_factory=dict)

    def session(self, role: str) -> Session:
        """Returns a new session with the role's engine."""
        return self.engines[role].session()

    def add_metrics(self, role: str, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the log line of `role` for this iteration."""
        self.metrics.setdefault(role, {}).update(metrics)

    def seed_for(self, *names: object) -> int:
        """Returns a seed in [0, 2^63). The seed depends only on the run's seed and `names`, so a resumed run samples
        the same.
        """
        digest = hashlib.blake2b("/".join(map(str, (self.seed, *names))).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The data that an iteration trains on: rollouts with advantages by role, in the order of training, and metrics by
    role.
    """

    rollouts: Mapping[str, list[Rollout]]
    metrics: Mapping[str, Mapping[str, float]]  # metrics by role


@dataclass(frozen=True, kw_only=True)
class RecipeRole:
    """A recipe's description of one of its roles."""

    trained: bool = True
    samples: int = 1  # samples per problem that an update of this role trains on
    drawn: Mapping[str, int] = field(
        default_factory=dict
    )  # samples per problem that each role generates in an iteration that trains this role; used for plans
    # by role: number of the `drawn` samples that share one prompt; 1 for roles not in the mapping
    per_prompt: Mapping[str, int] = field(default_factory=dict)
    # estimated size of an episode, if the role answers several times; used for plans
    episode: EpisodeEstimate = field(default_factory=EpisodeEstimate)


class Recipe(ABC):
    """A training method. A subclass is a dataclass whose fields are the recipe's arguments in the config.

    `rollout` and `evaluate` run on the driver only. All other methods, except those for the state, are pure functions
    of the arguments.
    """

    # True if the recipe supports only rewards from 0 to 1, regardless of reward.range
    needs_shares: ClassVar[bool] = False

    @abstractmethod
    def roles(self) -> Mapping[str, RecipeRole]:
        """Returns every role that the method needs a model for.

        The first role's tokenizer and prompt length apply to the prompts of the data set.
        """
        ...

    @abstractmethod
    def schedule(self) -> Schedule:
        """Returns all cycles of the run with their iterations."""
        ...

    @abstractmethod
    def prompt(self, payload: Mapping[str, Any]) -> str:
        """Returns the text with which a problem is presented to the first role."""
        ...

    @abstractmethod
    def rollout(
        self, iteration: Iteration, source: PromptSource, context: RolloutContext
    ) -> Mapping[str, Sequence[Rollout]]:
        """Generates rollouts, computes their rewards and assigns advantages. Returns the rollouts to train on by role,
        in the order of training.
        """
        ...

    def check(self, spec: RunSpec) -> None:
        """Raises ConfigError if the method does not support a setting of the run other than the recipe's arguments. The
        roles of `spec` are those of the recipe.
        """
        return None

    def files(self) -> Mapping[str, str]:
        """Returns {config key: path} of the files, besides data and models, that must exist before a run starts."""
        return {}

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Returns metrics on held-out problems, named `role/metric`; none by default.

        Values that later evaluations of the run need, also after a resume, are stored in `context.kept`.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that later iterations need from earlier ones, as JSON values. Called on the driver after
        every iteration.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""
        return None
