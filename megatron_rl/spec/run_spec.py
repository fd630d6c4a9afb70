"""The dataclasses of a run's specification: every part of a run is built from one of them, or from a section of one.

`resolve.resolve` makes them from a config, with every default filled in. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.base import config
from megatron_rl.config.datasets import PromptSet, SftData
from megatron_rl.config.engines import Embedded, RefitConfig, Rollouts, Servers
from megatron_rl.config.evaluation import EvalConfig, Evaluation, Reward
from megatron_rl.config.model import Model, RoleConfig
from megatron_rl.config.run import JobConfig, Launch, Preflight, Run, Sinks
from megatron_rl.config.schema import GenerateConfig


@config
class RoleSpec(RoleConfig):
    """One model and how it is sampled and trained: the settings of a role, with the defaults that depend on other
    settings filled in.

    `loss.max_tokens` is never null, and `loss.correction` is the correction that the role is trained with. A model of
    `eval` or `generate` is a role without a policy.
    """

    name: str
    owner: str  # role whose policy and engine this role uses: `same_as`, or the role itself
    servers: str  # role whose servers answer for this role: the owner, or a role with another adapter of its model


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The engines of a run: their settings, and the models that they hold."""

    settings: Embedded | Servers
    roles: Mapping[str, RoleSpec]  # the roles that have an engine of their own, those with an endpoint included
    refit: RefitConfig = field(default_factory=RefitConfig)
    directory: Path  # the run directory, or the directory of an evaluation's output: token, server registry and logs
    families: tuple[str, ...] = ()  # model families of the user's own, which server processes must know, too
    trains: bool = False  # a trainer runs beside the engines

    @property
    def opened(self) -> dict[str, RoleSpec]:
        """Returns the roles whose engine the run opens itself: all roles but those with an endpoint."""
        return {name: role for name, role in self.roles.items() if role.endpoint is None}

    @property
    def server_roles(self) -> list[str]:
        """Returns the roles that have servers of their own, in order."""
        return [name for name, role in self.opened.items() if role.servers == name]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The problems of a training run."""

    training: Mapping[str, PromptSet]  # by the name of the setting: `data` and `roles.NAME.data`
    held_out: PromptSet | None  # the problems of evaluations; None: there are no evaluations
    replay: Path | None  # a run whose rollouts are trained on; None: the engines write them


def first_iterations(
    schedule: Sequence[Sequence[tuple[str, ...]]], count: int | None
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Returns the cycles of a schedule that hold its first `count` iterations; the last of them may be cut short.
    None: the whole schedule."""
    found, left = [], sum(map(len, schedule)) if count is None else count
    for cycle in schedule:
        if left <= 0:
            break
        found.append(tuple(cycle[:left]))
        left -= len(cycle)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """The iterations of a training run, and what happens between them."""

    schedule: tuple[tuple[tuple[str, ...], ...], ...]  # cycles -> iterations of the cycle -> roles that are trained
    evaluation: Evaluation  # when to evaluate, and on how many problems
    rollouts: Rollouts  # how far rollouts may be ahead of training
    preflight: Preflight  # checks before the first update; a replay has none

    @property
    def num_iterations(self) -> int:
        """Returns the number of iterations of the whole run."""
        return sum(map(len, self.schedule))


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The processes of a run: how many ranks, who starts them, and the job that they run in."""

    ranks: int
    launch: Launch = field(default_factory=Launch)
    job: JobConfig = field(default_factory=JobConfig)


@dataclass(frozen=True)
class Host:
    """The host that a run is to start on: how many of its ranks run there, and whether it has GPUs."""

    ranks: int
    gpus: bool


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The part of a specification that all commands have."""

    roles: Mapping[str, RoleSpec]
    engine: EngineSpec | None  # None: nothing is generated
    cluster: ClusterSpec
    directory: Path  # the run directory, or the directory of the output
    models: Mapping[str, Model]  # by the name of the setting, such as `roles.generator.model`
    sets: Mapping[str, PromptSet]  # by the name of the setting: `data`, `roles.NAME.data`, `evaluation.prompts`
    reward: Reward | None  # None: nothing is graded
    settings: Mapping[str, Any]  # the resolved config as plain values, for records and fingerprints


@dataclass(frozen=True, kw_only=True)
class EvalSpec(Spec):
    """The specification of `megatron-rl eval`. The models are roles without a policy: `model`, `junior`, `verifier` and
    `base`."""

    engine: EngineSpec
    reward: Reward
    config: EvalConfig  # what is measured, and how


@dataclass(frozen=True, kw_only=True)
class GenerateSpec(Spec):
    """The specification of `megatron-rl generate`. The teacher is the role `model`."""

    engine: EngineSpec
    config: GenerateConfig  # what is asked, and what becomes of the answers


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(Spec):
    """The part of a specification that the commands which train have: `train` and `sft`."""

    run: Run  # name, seed and checkpoints
    sinks: Sinks


@dataclass(frozen=True, kw_only=True)
class SftSpec(TrainingSpec):
    """The specification of `megatron-rl sft`. The model is the role `model`."""

    data: SftData
    samples_per_step: int
    steps: int | None  # optimizer steps; None: `epochs` passes over the data
    epochs: float
    validate_every: int  # optimizer steps between validations; 0: only at the end


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainingSpec):
    """The specification of `megatron-rl train`."""

    engine: EngineSpec
    recipe: Any  # the recipe that was built from the config (training.iteration.Recipe)
    data: DataSpec
    reward: Reward
    loop: LoopSpec

    @property
    def policy_of(self) -> dict[str, str]:
        """Returns {trained role: the role whose policy its rollouts train}."""
        return {name: self.roles[name].owner for name, part in self.recipe.roles().items() if part.trained}

    @property
    def trained_policies(self) -> list[str]:
        """Returns the names of the policies that are updated, each once."""
        return list(dict.fromkeys(self.policy_of.values()))
