"""Plans the same run with other engines, so that the choice of one is seen beside what the others would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.schema import ConfigError, Embedded, Servers, TrainConfig
from megatron_rl.models.shape import Shape
from megatron_rl.planning import plan as plans
from megatron_rl.planning.hardware import Cluster
from megatron_rl.planning.plan import RunPlan
from megatron_rl.planning.search import engine_choices, engine_words, nodes_words, passes
from megatron_rl.planning.workload import IterationWork

SERVED = 3  # choices of servers that are shown, fastest first
STALENESS = "rollouts.max_staleness"
AHEAD = "iterations generated beside training (rollouts.max_staleness=1)"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The run with one engine: where it stands, what it costs, and the settings that make it of the config asked
    about."""

    engine: str  # in words
    trainer_gpus: int
    engine_gpus: int  # GPUs of servers; 0 of the embedded engine
    cycle_s: float  # seconds of a cycle
    problem: str  # why it does not fit; empty where it does
    overrides: Sequence[str]  # empty of the config as it is


def alternatives(
    config: TrainConfig, cluster: Cluster, models: Mapping[str, Shape], work: Sequence[IterationWork]
) -> list[Alternative]:
    """Returns the config as it is, then the embedded engine, the fastest servers, on GPUs of their own and in the
    trainer's, and the fastest of those on their own while it generates the next iteration beside training.

    Layouts are those of the config. An engine beside which the trainer does not fit is planned with full
    recomputation. Engines that leave GPUs the layouts cannot be cut for are left out, and those that `check` refuses.
    """
    asked = _alternative(config, config, cluster, models, work, [])
    if asked is None:
        return []
    embedded, served, asked_engine = [], [], None
    if isinstance(config.engine, Servers):
        asked_engine = _anywhere(config.engine)
        words = ["engine={kind: embedded}"]
        own = replace(config, engine=Embedded())
        if config.rollouts.max_staleness:  # which it cannot have
            own, words = replace(own, rollouts=replace(own.rollouts, max_staleness=0)), [*words, f"{STALENESS}=0"]
        embedded = [_alternative(own, config, cluster, models, work, words)]
    for choice in engine_choices(config, cluster, models):
        engine = choice.engine
        if not isinstance(engine, Servers) or _anywhere(engine) == asked_engine:
            continue
        words = engine_words(engine, config.engine)
        served.append(_alternative(choice, config, cluster, models, work, words))
    fitting = [one for one in served if one is not None and not one.problem]
    found = [asked, *(one for one in embedded if one is not None)]
    found += sorted(fitting, key=lambda one: one.cycle_s)[:SERVED]
    if not config.rollouts.max_staleness:
        found += _ahead(config, cluster, models, work)
    return found


def _ahead(
    config: TrainConfig, cluster: Cluster, models: Mapping[str, Shape], work: Sequence[IterationWork]
) -> list[Alternative]:
    """Returns the fastest run with servers that generates beside training; none where nothing fits."""
    word, ahead = f"{STALENESS}=1", replace(config.rollouts, max_staleness=1)
    tried = []
    if isinstance(config.engine, Servers) and not config.engine.colocate:
        tried.append(_alternative(replace(config, rollouts=ahead), config, cluster, models, work, [word]))
    for choice in engine_choices(config, cluster, models):
        engine = choice.engine
        if isinstance(engine, Servers) and not engine.colocate:
            own = [*engine_words(engine, config.engine), word]
            tried.append(_alternative(replace(choice, rollouts=ahead), config, cluster, models, work, own))
    fitting = [one for one in tried if one is not None and not one.problem]
    return sorted(fitting, key=lambda one: one.cycle_s)[:1]


def _alternative(
    config: TrainConfig, asked: TrainConfig, cluster: Cluster, models: Mapping[str, Shape],
    work: Sequence[IterationWork], overrides: Sequence[str],
) -> Alternative | None:  # fmt: skip
    """Returns the plan of `config` in short; None where its layouts cannot be cut so, and where `check` refuses it
    though not the config asked about."""
    made = _made(config, cluster, models, work)
    if made is None:
        return None
    if made.problems and config is not asked:
        names = [name for name, role in config.roles.items() if role.has_policy and role.model.recompute != "full"]
        roles = {
            name: replace(config.roles[name], model=replace(config.roles[name].model, recompute="full"))
            for name in names
        }
        smaller = replace(config, roles={**config.roles, **roles})
        other = _made(smaller, cluster, models, work)
        if other is not None and not other.problems:
            made, config = other, smaller
            overrides = [*overrides, *(f"roles.{name}.model.recompute=full" for name in names)]
    if config is not asked:
        own = _made(asked, cluster, models, work)
        if own is not None and passes(asked, own.ranks) and not passes(config, made.ranks):
            return None
        overrides = [*overrides, *nodes_words(asked, config, made)]
    return Alternative(
        engine=_words(config), trainer_gpus=made.ranks, engine_gpus=plans.server_gpus(config), cycle_s=made.cycle_s,
        problem=next(iter(made.problems), ""), overrides=overrides,
    )  # fmt: skip


def _anywhere(engine: Servers) -> Servers:
    """Returns the servers without where they stand and who starts them."""
    return replace(engine, gpus=(), urls={}, start=True)


def _made(
    config: TrainConfig, cluster: Cluster, models: Mapping[str, Shape], work: Sequence[IterationWork]
) -> RunPlan | None:
    try:
        return plans.make(config, cluster, models, work)
    except ConfigError:
        return None


def _words(config: TrainConfig) -> str:
    """Returns the engine in words: `4 vllm servers of 2 GPUs for each role`."""
    engine = config.engine
    if not isinstance(engine, Servers):
        return "embedded, in the trainer's GPUs"
    many, gpus = "s" * (engine.replicas > 1), f"{engine.tp} GPU{'s' * (engine.tp > 1)}"
    whom = " for each role" if len(config.server_roles) > 1 else ""
    where = ", in the trainer's GPUs" * engine.colocate
    said = f"{engine.replicas} {engine.kind} server{many} of {gpus}{whom}{where}"
    return f"{said}; {AHEAD}" if config.rollouts.max_staleness else said
