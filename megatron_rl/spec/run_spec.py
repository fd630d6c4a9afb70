"""The dataclasses of a run's specification. Every part of a run is built from one of these dataclasses or their fields.

`resolve.resolve` builds the specification from a config and fills in every default. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.base import config
from megatron_rl.config.data_sources import SOURCES, Source
from megatron_rl.config.datasets import PromptSet, SftData
from megatron_rl.config.engines import Embedded, RefitConfig, Rollouts, Servers
from megatron_rl.config.evaluation import EvalConfig, Evaluation, Reward
from megatron_rl.config.model import Model, RoleConfig
from megatron_rl.config.run import JobConfig, Launch, Preflight, Run, Sinks
from megatron_rl.config.schema import GenerateConfig, SftLoss
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.spec.rank_sets import rank_sets


@config
class RoleSpec(RoleConfig):
    """The resolved settings of a role: one model, and how it is sampled and trained.

    Defaults that depend on other settings are filled in: `loss.max_tokens` is never None, and `loss.correction` is the
    off-policy correction that the role is trained with. A model of the `eval` or `generate` command is a role without a
    policy.
    """

    name: str
    owner: str  # name of the role whose policy and engine this role uses: `same_as` if set, otherwise this role
    # name of the role whose servers this role uses: the owner, or a role with another adapter of the same base model
    servers: str
    reference: bool = False  # whether a frozen reference model is kept even if this role's loss does not use it


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The settings of a run's inference engines, and the models that the engines hold."""

    settings: Embedded | Servers
    # {name: role} of the roles with a separate engine, including roles whose engine is a third-party endpoint
    roles: Mapping[str, RoleSpec]
    refit: RefitConfig = field(default_factory=RefitConfig)
    # directory that contains the server token, the server registry and the server logs:
    # the run directory, or the output directory of the commands `eval` and `generate`
    directory: Path
    families: tuple[str, ...] = ()  # import paths of user-defined model families, which server processes must register
    trains: bool = False  # True for `megatron-rl train`, whose trainer sends weights to the engines
    hosts: int = 1  # number of hosts on which `generate` starts servers; each host starts the same number of servers
    # whether servers serve requests in the order of priorities; needed if several iterations are generated at once
    by_priority: bool = False

    @property
    def opened(self) -> dict[str, RoleSpec]:
        """Returns {name: role} of the roles in `roles` without an endpoint. The run itself starts or loads the engines
        of these roles."""
        return {name: role for name, role in self.roles.items() if role.endpoint is None}

    @property
    def server_roles(self) -> list[str]:
        """Returns the names of the roles that do not use the servers of another role, in the order of `roles`."""
        return [name for name, role in self.opened.items() if role.servers == name]

    @property
    def num_server_gpus(self) -> int:
        """Returns the number of GPUs that all servers use together; 0 for the embedded engine."""
        settings = self.settings
        return len(self.server_roles) * settings.replicas * settings.tp if isinstance(settings, Servers) else 0


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The problem sets of a training run."""

    # {name of the setting: problem set}; the names are `roles.NAME.data`, and `data` or `data.sources.NAME`
    training: Mapping[str, PromptSet]
    held_out: Sequence[EvaluatedSet]  # problem sets of the evaluations
    replay: Path | None  # directory of another run, on whose saved rollouts this run trains; None: generate rollouts

    @property
    def sources(self) -> dict[str, Source]:
        """Returns {name of the source: source} of the setting data.sources, or {} if the run has a single data set."""
        named = {name.removeprefix(f"{SOURCES}."): source for name, source in self.training.items()}
        return {name: source for name, source in named.items() if isinstance(source, Source)}

    @property
    def weights(self) -> dict[str, float]:
        """Returns {name of the source: weight} of the setting data.sources, or {} if the run has a single data set."""
        return {name: source.weight for name, source in self.sources.items()}

    def of(self, role: str) -> dict[str, PromptSet]:
        """Returns {name of the setting: problem set} for the iterations whose first role is `role`: the role's own
        `data`, or else the run's `data`."""
        role_data = f"roles.{role}.data"
        return {
            name: source
            for name, source in self.training.items()
            if (name == role_data if role_data in self.training else not name.startswith("roles."))
        }


def first_iterations(
    schedule: Sequence[Sequence[tuple[str, ...]]], count: int | None
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Returns the first `count` iterations of a training schedule, or the whole schedule if `count` is None.

    A schedule is a list of cycles, and a cycle is a list of iterations. The last returned cycle may be truncated."""
    cycles, remaining = [], sum(map(len, schedule)) if count is None else count
    for cycle in schedule:
        if remaining <= 0:
            break
        cycles.append(tuple(cycle[:remaining]))
        remaining -= len(cycle)
    return tuple(cycles)


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """The settings of the training loop: the iterations, evaluations, staleness of rollouts and preflight checks."""

    # schedule[cycle][iteration]: names of the roles to train in an iteration
    schedule: tuple[tuple[tuple[str, ...], ...], ...]
    evaluation: Evaluation  # when to evaluate, which checkpoints are kept as the best, and when to stop early
    rollouts: Rollouts  # how many iterations ahead of training rollouts may be generated
    preflight: Preflight  # checks of engine and reward before the first update; disabled if saved rollouts are replayed

    @property
    def num_iterations(self) -> int:
        """Returns the total number of iterations of the run."""
        return sum(map(len, self.schedule))


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The processes of a run: the number of ranks, how they are launched, and the cluster job that they run in."""

    ranks: int
    launch: Launch = field(default_factory=Launch)
    job: JobConfig = field(default_factory=JobConfig)


@dataclass(frozen=True)
class Host:
    """The host that a run will start on.

    `ranks`: number of the run's ranks on this host. `gpus`: True if the host has GPUs.
    """

    ranks: int
    gpus: bool


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The specification of a run of any command: the fields that all commands share."""

    roles: Mapping[str, RoleSpec]
    engine: EngineSpec | None  # None if the command generates no text
    cluster: ClusterSpec
    directory: Path  # the run directory, or the output directory
    models: Mapping[str, Model]  # {name of the setting: model}; a name is, for example, `roles.generator.model`
    # {name of the setting: problem set}; names are `data`, `roles.NAME.data`, `evaluation.sets.NAME` and `sets.NAME`
    sets: Mapping[str, PromptSet]
    reward: Reward | None  # None if no response is graded
    settings: Mapping[str, Any]  # the resolved config as plain Python values, for the run's records and digests


@dataclass(frozen=True, kw_only=True)
class EvalSpec(Spec):
    """The specification of `megatron-rl eval`.

    The models are roles without a policy, named `model`, `junior`, `verifier` and `base`."""

    engine: EngineSpec
    reward: Reward
    config: EvalConfig  # what is measured, and how
    evaluated: Sequence[EvaluatedSet]  # the problem sets


@dataclass(frozen=True, kw_only=True)
class GenerateSpec(Spec):
    """The specification of `megatron-rl generate`. The role `model` is the teacher, which generates the responses."""

    engine: EngineSpec
    config: GenerateConfig  # which prompts are sent, and how the responses are stored


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(Spec):
    """The specification of a training command: the fields that `train` and `sft` share."""

    run: Run  # name, seed and checkpoints
    sinks: Sinks

    @property
    def role_ranks(self) -> dict[str, range]:
        """Returns {role: its ranks}."""
        return rank_sets(self.roles, self.cluster.ranks)[0]


@dataclass(frozen=True, kw_only=True)
class SftSpec(TrainingSpec):
    """The specification of `megatron-rl sft`. The role `model` is the model that is trained."""

    data: SftData
    loss: SftLoss
    samples_per_step: int
    steps: int | None  # number of optimizer steps; if None, training runs for `epochs` passes over the data
    epochs: float
    validate_every: int  # number of optimizer steps between validations; 0: validate only at the end

    def num_steps(self, rows: int) -> int:
        """Returns the number of optimizer steps on a data set with `rows` rows. The last step of an epoch has the rest
        of the rows (see data.epochs)."""
        steps_per_epoch = math.ceil(rows / self.samples_per_step)
        return self.steps or math.ceil(round(self.epochs * steps_per_epoch, 6))  # rounded, as 0.1 * 30 is above 3


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The parts of a run's specification that a recipe's method `check` compares with the recipe."""

    roles: Mapping[str, RoleSpec]
    data: DataSpec
    rollouts: Rollouts
    prompts_per_iteration: int


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A part of a run (a stage) that overrides some of the run's settings."""

    until: int  # the stage ends after this number of iterations of the run
    overrides: Mapping[str, Any]  # {dotted name of a setting: value}
    spec: RunSpec  # specification that applies to the stage's iterations; its `stages` is empty


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainingSpec):
    """The specification of `megatron-rl train`."""

    engine: EngineSpec
    recipe: Any  # the training recipe built from the config, a training.iteration.Recipe
    data: DataSpec
    reward: Reward
    loop: LoopSpec
    stages: Sequence[StageSpec] = ()

    def at(self, iteration: int) -> RunSpec:
        """Returns the specification for an iteration, counted from 0: the specification of the iteration's stage, or
        this specification for iterations after all stages."""
        return next((stage.spec for stage in self.stages if iteration < stage.until), self)

    @property
    def checked(self) -> CheckedRun:
        """Returns the parts that the recipe checks."""
        return CheckedRun(
            roles=self.roles, data=self.data, rollouts=self.loop.rollouts,
            prompts_per_iteration=self.run.prompts_per_iteration,
        )  # fmt: skip

    def prompt_limits(self, role: str) -> dict[str, int]:
        """Returns {name of the setting: value in tokens} of a role's setting `max_prompt_tokens`: one entry for the run
        and one for each stage."""
        stages = {f"stages[{number}].": stage.spec for number, stage in enumerate(self.stages)}
        name = f"roles.{role}.max_prompt_tokens"
        return {f"{place}{name}": spec.roles[role].max_prompt_tokens for place, spec in {"": self, **stages}.items()}

    @property
    def rewards(self) -> dict[str, Reward]:
        """Returns {name of the setting: reward function} of the training problems.

        The settings are `data.sources.NAME.reward` for each source that has a reward, and `reward`. The setting
        `reward` is left out if every training problem belongs to a source that has a reward."""
        sources, own_sets = self.data.sources, len(self.data.training) > len(self.data.sources)  # roles.NAME.data
        used = own_sets or any(source.reward is None for source in sources.values())
        shared = {"reward": self.reward} if used else {}
        return shared | {f"{SOURCES}.{name}.reward": source.reward for name, source in sources.items() if source.reward}

    @property
    def preflight_set(self) -> str | None:
        """Returns the name of the evaluation set whose problems the preflight grades: the first set that is graded by
        the run's reward. None: the preflight grades training problems."""
        names = [s.name for s in self.data.held_out if s.reward == self.reward and not self.data.sources]
        return names[0] if names else None

    @property
    def policy_of(self) -> dict[str, str]:
        """Returns {name of a trained role: name of the role that owns its policy}. A trained role's rollouts update the
        policy of this owner."""
        return {name: self.roles[name].owner for name, part in self.recipe.roles().items() if part.trained}

    @property
    def reference_resets(self) -> dict[str, int]:
        """Returns {name of a policy: number of iterations between two resets of its reference model}. A reset replaces
        the reference by the policy's current weights. Policies without resets are left out."""
        every = {name: self.roles[name].loss.reset_reference_every for name in self.trained_policies}
        return {name: number for name, number in every.items() if number is not None}

    @property
    def evaluates_beside(self) -> bool:
        """Returns whether an evaluation runs at the same time as the generation and training of the next iteration."""
        evaluation, ahead = self.loop.evaluation, self.loop.rollouts.ahead > 0 and self.data.replay is None
        return ahead and evaluation.best is None and evaluation.early_stop is None

    @property
    def trained_policies(self) -> list[str]:
        """Returns the names of the policies that are updated, without duplicates."""
        return list(dict.fromkeys(self.policy_of.values()))
