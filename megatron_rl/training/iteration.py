"""The interface of recipes: the iteration, the source of prompts, the context with engines and graders, and the base
class Recipe.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from megatron_rl.algorithms.advantages import EstimatorName, assign_advantages
from megatron_rl.batches.packed_batch import ADVANTAGES
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.engines.protocol import Engine, Sampling, Session
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.types import Prompt, Rollout

# function that grades responses: ([B] responses, [B] payloads of their problems) -> [B] gradings
Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]
RolloutsByRole = Mapping[str, Sequence[Rollout]]
# schedule[cycle][index of the iteration in the cycle] = names of the roles that the iteration trains
Schedule = Sequence[Sequence[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step of the training loop: generating rollouts and training on them. `roles` are trained in the given order
    on the rollouts of the iteration.
    """

    cycle: int  # index of the cycle (item of the schedule)
    index: int  # index of the iteration within the cycle
    roles: tuple[str, ...]
    number: int  # number of iterations of the run before this one
    # number of iterations that trained each role before this one
    updates: Mapping[str, int] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The first role that the iteration trains. Most recipes train only one role per iteration."""
        return self.roles[0]

    def update(self, role: str) -> int:
        """Returns the number of iterations that trained `role` before this iteration."""
        return self.updates.get(role, 0)


class PromptSource(Protocol):
    """The source of an iteration's problems. Checkpoints store the exact position in the data set, whatever number of
    prompts an iteration takes.

    With rollouts.max_staleness above 0, several iterations are generated at once. The first `take` of an iteration then
    waits until all earlier iterations have called `take` once or have ended. Later calls do not wait: they return
    problems of the data set in a random order that depends only on run.seed and the number of the iteration, beginning
    with the problems that the iteration has not taken. So no prompt depends on timing.
    """

    @property
    def prompts_per_iteration(self) -> int:
        """Returns the setting run.prompts_per_iteration, the number of problems of an iteration."""
        ...

    def take(self, count: int | None = None, fits: Callable[[Prompt], bool] = ...) -> list[Prompt]:
        """Returns the next `count` prompts for which `fits` returns True, and skips prompts for which it returns False.
        By default, `count` is `prompts_per_iteration` and all prompts fit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDraws:
    """The settings with which an evaluation samples answers to the problems of a set."""

    n: int = 1  # number of samples of each problem
    k: tuple[int, ...] = (1,)  # the values of k for pass@k
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = True  # whether one greedy answer is drawn in addition to samples

    @property
    def also_greedy(self) -> bool:
        """Returns whether one greedy answer is drawn in addition to samples that are drawn at a temperature above 0."""
        return self.greedy and self.temperature > 0


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
    # loss weight (Rollout.partner_weight) of tokens that a Tandem junior generated, for each role with a junior
    partner_weights: Mapping[str, float] = field(default_factory=dict)
    watch: Stopwatch = field(default_factory=Stopwatch)
    seed: int = 0  # random seed of the run
    # an answer or episode with a higher reward is correct; None if no scale is declared (see types.is_correct)
    threshold: float | None = 0.5
    # lower end of the setting reward.range: the reward of an episode that the policy failed
    lowest_reward: float = 0.0
    # maximum share of an iteration's gradings that may fail (time out or raise an error)
    max_failure_share: float = 1.0
    # whether `recipes.solutions.solve` grades the samples of a problem against their most frequent answer, and not
    # against the known answer
    voted: bool = False
    # metrics that the recipe added in this iteration so far, by role; see `add_metrics`
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # JSON values that `Recipe.rollout` hands to `Recipe.credit` of the same iteration, by name
    handed_over: dict[str, Any] = field(default_factory=dict)
    # JSON values that an evaluation of a set stores for later evaluations of the set
    kept: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationDraws = field(default_factory=EvaluationDraws)  # sampling of answers in evaluations
    # {role: [P][n] graded answers} of an evaluation, which `Recipe.evaluate` stores (see recipes/answers.py)
    answers: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)

    def session(self, role: str) -> Session:
        """Returns a new session for sampling requests to the role's engine."""
        return self.engines[role].session()

    def add_metrics(self, role: str, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the log line of `role` for this iteration."""
        self.metrics.setdefault(role, {}).update(metrics)

    def seed_for(self, *names: object) -> int:
        """Returns a seed in [0, 2^63). The seed depends only on the run's seed and `names`, so a resumed run samples
        with the same seeds.
        """
        digest = hashlib.blake2b("/".join(map(str, (self.seed, *names))).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Score:
    """A request for values that only the trainer can compute, one per token of each rollout of a role.

    The values are stored in `Rollout.values` under the request's name, [T] float32, with 0 for tokens that are not in
    the loss. The value of a token is computed from the tokens before it.
    """

    role: str  # the role whose rollouts are scored
    # "value": output of the value head. "logprobs": log-prob of the token. "entropy": entropy of the distribution over
    # the vocabulary. All three are computed with the current weights of the role in the field `by`.
    # "reference_logprobs": log-prob of the token under the frozen reference model of this role.
    name: Literal["value", "logprobs", "reference_logprobs", "entropy"]
    by: str  # the role whose model computes the values


@dataclass(frozen=True, kw_only=True)
class CreditContext:
    """An argument of `Recipe.credit`: has data that the method needs besides the rollouts, and collects the metrics
    that the method adds.
    """

    # JSON values that `Recipe.rollout` of this iteration stored in RolloutContext.handed_over
    handed_over: Mapping[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # metrics added so far, by role

    def add_metrics(self, role: str, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the log line of `role` for this iteration."""
        self.metrics.setdefault(role, {}).update(metrics)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The rollouts and metrics of an iteration, both by role. After the credit stage, the rollouts have advantages and
    are in the order of training.
    """

    rollouts: Mapping[str, list[Rollout]]
    metrics: Mapping[str, Mapping[str, float]]
    handed_over: Mapping[str, Any] = field(default_factory=dict)  # see RolloutContext.handed_over
    credited: bool = False  # True after the credit stage


@dataclass(frozen=True, kw_only=True)
class RecipeRole:
    """The number and size of the samples that a role of a recipe generates and trains on."""

    trained: bool = True
    samples: int = 1  # number of samples per problem on which an update of this role trains
    drawn: Mapping[str, int] = field(
        default_factory=dict
    )  # number of samples that each role generates per problem when this role is trained; used to estimate memory, time
    # {role: number of the samples in `drawn` that are generated from the same prompt}; 1 for roles not in the mapping
    per_prompt: Mapping[str, int] = field(default_factory=dict)
    # size of an episode, if the role answers several times in a conversation; used to estimate memory and time
    episode: EpisodeEstimate = field(default_factory=EpisodeEstimate)
    # the setting `head` that the role must have: "value" for a critic, "score" for a reward model, None for a role that
    # generates text
    head: Literal["value", "score"] | None = None
    # What the rollouts that `credit` returns for this role give its loss (packed_batch.SIGNALS, or keys of
    # Rollout.values). `check` refuses a loss that needs something else, and a loss that does not read all of it.
    gives: frozenset[str] = frozenset({ADVANTAGES})
    reference: bool = False  # whether `scores` needs the role's frozen reference, even if the role's loss does not


class Recipe(ABC):
    """A training method. A subclass is a dataclass whose fields are the recipe's arguments in the config.

    An iteration has four stages: `rollout` generates rollouts with rewards, the trainer computes the `scores` that the
    recipe requests, `credit` computes advantages, and the trainer updates the policies. The recipe's state
    (`state_dict`) changes in `credit` only.

    `rollout`, `credit` and `evaluate` run on the driver only. All other methods, except `state_dict` and
    `load_state_dict`, are pure functions of the arguments.
    """

    # True if the recipe supports only rewards from 0 to 1; the setting reward.range must then be [0, 1]
    needs_shares: ClassVar[bool] = False
    # True if `rollout` grades all samples of a problem in one call of `recipes.solutions.solve`, so that the setting
    # rollouts.labels may be votes
    allows_votes: ClassVar[bool] = False
    # the estimator that computes advantages in the default `credit`; recipes with this argument declare it as a field
    estimator: EstimatorName = "grpo"

    @abstractmethod
    def roles(self) -> Mapping[str, RecipeRole]:
        """Returns a description of every role for which the method needs a model, by role name.

        The tokenizer and the maximum prompt length of the first role apply to the prompts of the data set.
        """
        ...

    @abstractmethod
    def schedule(self) -> Schedule:
        """Returns the schedule of the run: a list of cycles. A cycle is a list of iterations, and an iteration is the
        tuple of the roles that it trains.
        """
        ...

    @abstractmethod
    def prompt(self, payload: Mapping[str, Any]) -> str:
        """Returns the prompt text of a problem for the first role. `payload`: the fields of the problem."""
        ...

    @abstractmethod
    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        """Generates the rollouts of an iteration and computes their rewards. Returns the rollouts by role.

        With rollouts.max_staleness = k above 0, up to k + 1 iterations are generated at once while earlier iterations
        train. Each of them is generated in a separate thread by a separate copy of the recipe (copy.deepcopy). In the
        copy for iteration n, the recipe has the state that it had after `credit` of iteration n - 1 - k.
        """
        ...

    def reads_answers(self) -> Mapping[str, str]:
        """Returns {role: what reads the role's answers without their thoughts, for error messages}. The form of these
        roles' responses must be known (megatron_rl/texts/response_forms.py). Default: no role."""
        return {}

    def scores(self, iteration: Iteration) -> Sequence[Score]:
        """Returns requests for the values that `credit` needs and only the trainer can compute. Default: no request."""
        return ()

    def scores_of(self, roles: tuple[str, ...]) -> Sequence[Score]:
        """Returns the scores that the recipe requests (see `scores`) for an iteration that trains `roles`."""
        return self.scores(Iteration(cycle=0, index=0, roles=roles, number=0))

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        """Computes advantages and updates the recipe's state. Called once per iteration, in order. Returns the rollouts
        to train on, in the order of training, for every role that the iteration trains.

        `rollouts`: the result of `rollout`, with the requested `scores` in Rollout.values. By default, the estimator
        `self.estimator` computes the advantages of each role's rollouts from the reward that `reward` selects.
        """
        return {
            role: assign_advantages(own, reward=self.reward(role), estimator=self.estimator)
            for role, own in rollouts.items()
        }

    def reward(self, role: str) -> str | Mapping[str, float]:
        """Returns the reward from which the default `credit` computes the advantages of a role's rollouts: the name of
        one reward, or {name: weight} for a weighted sum of several rewards.
        """
        return "outcome"

    def needs_correct(self) -> str:
        """Returns the name of a part of the method that needs to know which answers are correct, such as
        recipe.args.curriculum; "" if there is none. With such a part, the reward must have a declared scale
        (Reward.threshold).
        """
        return ""

    def check(self, run: CheckedRun) -> None:
        """Raises ConfigError if the method does not support a setting of the run (other than the recipe's arguments,
        which the constructor checks). `run` has the roles that the method `roles` returns.
        """
        return None

    def files(self) -> Mapping[str, str]:
        """Returns {config key: path} of the files that must exist before a run starts, except data sets and models."""
        return {}

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates the roles on the held-out problems of one set and returns the metrics, named `role/metric`. The
        default returns an empty dict.

        `context.evaluation` says how answers are drawn. Graded answers are stored in `context.answers`. Values that
        later evaluations of the run need, also after a resume, are stored in `context.kept`.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that later iterations need from earlier ones, as JSON values. Called on the driver after
        the credit of every iteration.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""
        return None
