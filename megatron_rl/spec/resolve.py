"""Resolves a config into a run's specification, once, before anything starts. This module does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from megatron_rl.config import files, plugins
from megatron_rl.config.base import ConfigError, refuse, sections
from megatron_rl.config.data_settings import generated_name
from megatron_rl.config.data_sources import Sources
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engines import Servers
from megatron_rl.config.evaluation import Reward, Sets, sets_of
from megatron_rl.config.model import CORRECTION_AHEAD, Model, RoleConfig
from megatron_rl.config.run import Preflight
from megatron_rl.config.schema import HELD_OUT, EvalConfig, GenerateConfig, SftConfig, TrainConfig, models_of
from megatron_rl.models import registry
from megatron_rl.spec import checks, missing_files, server_gpus
from megatron_rl.spec.evaluated_sets import EvaluatedSet, evaluated_sets
from megatron_rl.spec.rank_sets import ALL
from megatron_rl.spec.run_spec import (
    ClusterSpec,
    DataSpec,
    EngineSpec,
    EvalSpec,
    GenerateSpec,
    Host,
    LoopSpec,
    RoleSpec,
    RunSpec,
    SftSpec,
    Spec,
    StageSpec,
    first_iterations,
)
from megatron_rl.spec.stages import config_of

Config = TrainConfig | SftConfig | EvalConfig | GenerateConfig
# Default of preflight.max_logprob_gap, in nats, if engines hold weights or the key-value cache in 8 bits or fewer
LOW_PRECISION_GAP = 0.2


@overload
def resolve(config: TrainConfig, ranks: int, *, to_come: bool = False, host: Host | None = None) -> RunSpec: ...
@overload
def resolve(config: Config, ranks: int, *, to_come: bool = False, host: Host | None = None) -> Spec: ...
def resolve(config: Config, ranks: int, *, to_come: bool = False, host: Host | None = None) -> Spec:
    """Returns the specification of the run that a config describes, after all checks.

    `ranks`: total number of ranks of the run. `to_come`: if True, allows model directories that do not exist yet
    because an earlier job will write them. `host`: the host that the run will start on; if None, files, packages and
    GPUs of this host are not checked. Raises ConfigError with a list of all invalid settings.
    """
    registry.add(config.families, "families")
    spec, problems = specify(config, ranks)
    problems = checks.problems(spec, to_come=to_come) + problems
    if not problems and host is not None:
        problems = [text for absent in missing_files.absent_files(spec) if (text := absent.problem) is not None]
        problems += missing_files.server_problems(spec.engine) + missing_files.sandbox_problems(spec.settings)
        problems += missing_files.transport_problems(spec.engine)
        problems += server_gpus.device_problems(spec.engine, host.ranks) if host.gpus else []
    refuse(*problems)
    return spec


def specify(config: Config, ranks: int) -> tuple[Spec, list[str]]:
    """Returns (unchecked specification of a config, list of error messages). The error messages are about evaluation
    sets that cannot be resolved, a recipe that cannot be built, and invalid stages. The field `recipe` of the
    specification is None if the recipe cannot be built."""
    config = settled(config)
    shared: dict[str, Any] = {
        "roles": roles_of(config),
        "engine": None if isinstance(config, SftConfig) else engine_of(config),
        "directory": config.directory,
        "models": models_of(config),
        "sets": sections(config, PromptSet),
        "reward": None if isinstance(config, SftConfig) else config.reward,
        "settings": files.tree_of(config),
        "cluster": ClusterSpec(ranks=ranks, launch=config.launch),
    }
    if isinstance(config, EvalConfig):
        evaluated, problems = _evaluated(config.sets, config, config.reward, drawn=config.sampling)
        shared["sets"] |= {f"sets.{dataset.name}": dataset.source for dataset in evaluated}
        return EvalSpec(**shared, config=config, evaluated=evaluated), problems
    if isinstance(config, GenerateConfig):
        return GenerateSpec(**shared, config=config), []
    shared |= {
        "run": config.run,
        "sinks": config.sinks,
        "cluster": ClusterSpec(ranks=ranks, launch=config.launch, job=config.job),
    }
    if isinstance(config, SftConfig):
        settings = ("data", "loss", "samples_per_step", "steps", "epochs", "validate_every")
        return SftSpec(**shared, **{name: getattr(config, name) for name in settings}), []
    held_out, problems = _evaluated(config.evaluation.sets, config.evaluation, config.reward, data=config.data)
    recipe, training = None, shared["sets"]
    shared["sets"] = training | {f"{HELD_OUT}.{dataset.name}": dataset.source for dataset in held_out}
    try:
        recipe = plugins.build(config.recipe)
    except ConfigError as error:
        problems.append(str(error))
    stages = _stages(shared["settings"], ranks, problems)
    shared["roles"] = _with_references(shared["roles"], {} if recipe is None else recipe.roles(), stages)
    replay = Path(config.debug.replay) if config.debug.replay else None
    spec = RunSpec(
        **shared, recipe=recipe, stages=stages,
        data=DataSpec(training=training, held_out=held_out, replay=replay),
        loop=LoopSpec(
            schedule=() if recipe is None else first_iterations(recipe.schedule(), config.run.iterations),
            evaluation=config.evaluation,
            rollouts=config.rollouts,
            preflight=_preflight(config.preflight, enabled=replay is None, low_precision=config.engine.low_precision),
        ),
    )  # fmt: skip
    return spec, problems


def _stages(settings: Mapping[str, Any], ranks: int, problems: list[str]) -> list[StageSpec]:
    """Returns the specification of each stage of a run, and appends error messages to `problems`. `settings`: the run's
    config as plain values."""
    specs = list[StageSpec]()
    for number, stage in enumerate(settings["stages"]):
        try:
            spec, wrong = specify(config_of(settings, stage["overrides"], f"stages[{number}]"), ranks)
        except ConfigError as error:
            problems.append(str(error))
            continue
        problems += [f"stages[{number}]: {line}" for line in wrong]
        assert isinstance(spec, RunSpec), "a TrainConfig is specified by a RunSpec"
        specs.append(StageSpec(**stage, spec=spec))
    return specs


def _preflight(preflight: Preflight, *, enabled: bool, low_precision: bool) -> Preflight:
    """Returns the settings of the preflight, with the default of max_logprob_gap raised to LOW_PRECISION_GAP if engines
    hold weights or the key-value cache in 8 bits or fewer."""
    gap = LOW_PRECISION_GAP if low_precision and preflight.max_logprob_gap is None else preflight.max_logprob_gap
    return dataclasses.replace(preflight, enabled=preflight.enabled and enabled, max_logprob_gap=gap)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def settled(config: AnyConfig, *, staleness: int | None = None, ranks: Mapping[str, str] | None = None) -> AnyConfig:
    """Returns the config with `auto` replaced in rollouts.max_staleness and in the ranks of roles.

    `staleness`: the value of rollouts.max_staleness; None: 1 if the engines can generate while the trainer trains, and
    0 if they cannot. `ranks`: {role: its ranks}; a role that is left out has all ranks.
    """
    if not isinstance(config, TrainConfig):
        return config
    if config.rollouts.max_staleness == "auto":
        apart = isinstance(config.engine, Servers) and not config.engine.colocate
        number = int(apart) if staleness is None else staleness
        config = dataclasses.replace(config, rollouts=dataclasses.replace(config.rollouts, max_staleness=number))
    if automatic := [name for name, role in config.roles.items() if role.ranks == "auto"]:
        changed = {
            name: dataclasses.replace(config.roles[name], ranks=(ranks or {}).get(name, ALL)) for name in automatic
        }
        config = dataclasses.replace(config, roles={**config.roles, **changed})
    return config


def _evaluated(
    sets: Sets, defaults: Any, reward: Reward, *, drawn: Any = None, data: PromptSet | Sources | None = None
) -> tuple[tuple[EvaluatedSet, ...], list[str]]:  # fmt: skip
    """Returns (resolved problem sets of an evaluation, list of error messages). There are no sets if there are errors.

    `data`: the training problems. The user's own sets that have neither `fields` nor `settings` inherit `data.fields`.
    """
    fields, listed = data.fields if isinstance(data, PromptSet) else {}, sets_of(sets)
    bare = [s.path and not (s.fields or s.settings or generated_name(s.path)) for s in listed]
    listed = [dataclasses.replace(s, fields=fields) if is_bare else s for s, is_bare in zip(listed, bare, strict=True)]
    try:
        return evaluated_sets(listed, defaults, reward, drawn=drawn), []
    except ConfigError as error:
        return (), [str(error)]


def _with_references(
    roles: Mapping[str, RoleSpec], parts: Mapping[str, Any], stages: Sequence[StageSpec]
) -> dict[str, RoleSpec]:  # fmt: skip
    """Returns the roles with the field `reference` set. The field is True for a role whose policy needs a frozen
    reference model although `loss.kl_coef` of the run may be 0: because the recipe's scores use the reference model, or
    because a stage sets kl_coef above 0. `parts`: {role name: the recipe's description of the role}."""
    read = {role.owner for name, role in roles.items() if name in parts and parts[name].reference}
    for stage_roles in (stage.spec.roles for stage in stages):
        trained = [name for name, part in parts.items() if part.trained and stage_roles[name].loss.kl_coef]
        read |= {roles[name].owner for name in trained if not roles[name].loss.kl_coef}
    return {name: dataclasses.replace(role, reference=name in read) for name, role in roles.items()}


def engine_of(config: TrainConfig | EvalConfig | GenerateConfig) -> EngineSpec:
    """Returns the specification of a run's engines. Server processes call this function, so it does not import or build
    the training recipe."""
    registry.add(config.families, "families")
    roles = {name: role for name, role in roles_of(config).items() if role.owner == name and role.head is None}
    more: dict[str, Any] = {}
    if isinstance(config, TrainConfig):
        roles = {} if config.debug.replay else roles
        ahead, refit = config.rollouts.ahead > 0, config.refit
        if refit.staging == "auto":
            apart = isinstance(config.engine, Servers) and not config.engine.colocate
            refit = dataclasses.replace(refit, staging="host" if ahead and apart else "off")
        more = {"refit": refit, "trains": True, "by_priority": ahead}
    else:
        more = {"hosts": config.job.nodes} if isinstance(config, GenerateConfig) else {}
        roles.pop("base", None)  # the base model needs no engine: only its probabilities are compared
    output = Path(config.output) if isinstance(config, GenerateConfig) else config.directory
    return EngineSpec(settings=config.engine, roles=roles, directory=output, families=config.families, **more)


def roles_of(config: Config) -> dict[str, RoleSpec]:
    """Returns the roles of a training run by name.

    For other commands, returns one role per model, named after the model's setting: `model`, `junior`, `verifier` or
    `base`. Roles whose models have equal settings share one engine."""
    corrected = served = False
    config = settled(config)
    if isinstance(config, TrainConfig):
        corrected, roles = config.rollouts.ahead > 0 or config.engine.low_precision, config.roles
        served = isinstance(config.engine, Servers) and config.engine.serves_adapters
    elif isinstance(config, SftConfig):
        roles = {"model": config.trained}
    else:
        first_of: dict[Model, str] = {}
        roles = {}
        for setting, model in models_of(config).items():
            name = setting.removesuffix(".model")
            owner = first_of.setdefault(model, name)
            roles[name] = RoleConfig(model=model, policy="none", same_as=None if owner == name else owner)
    # {key: role that owns the servers}; the key is (path, dtype) of a base model if its adapters share servers, else
    # (name of the role that owns the policy,)
    first: dict[Any, str] = {}
    role_specs: dict[str, RoleSpec] = {}
    for name, role in roles.items():
        owner = role.same_as or name
        shared = served and role.lora is not None and role.head is None
        servers = first.setdefault((role.model.path, role.model.dtype) if shared else (owner,), owner)
        loss = dataclasses.replace(role.loss, max_tokens=role.loss.max_tokens or role.sampling.max_tokens)
        if corrected and loss.correction is None and role.head is None:
            loss = dataclasses.replace(loss, correction=CORRECTION_AHEAD)
        role_specs[name] = RoleSpec(**{**vars(role), "loss": loss}, name=name, owner=owner, servers=servers)
    return role_specs
