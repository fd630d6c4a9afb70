"""Checks the settings of engines against the other settings of a run: engines with low precision, LoRA adapters that
servers apply, and servers that share the trainer's GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.algorithms import objectives
from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.base import refusal_of
from megatron_rl.config.engines import Embedded, Servers
from megatron_rl.config.model import CorrectionConfig
from megatron_rl.spec.run_spec import EngineSpec, RoleSpec


def low_precision_problems(roles: Mapping[str, RoleSpec], settings: Embedded | Servers) -> Iterator[str]:
    """Yields an error message for each role that is trained without importance weights, although its engine has
    quantised weights or a quantised KV cache. Roles with a loss per rollout, such as DPO, are not checked, because such
    losses have no importance weights.
    """
    for name, role in roles.items() if settings.low_precision else ():
        uncorrected = role.has_policy and role.head is None and role.loss.correction == CorrectionConfig(kind="none")
        if not uncorrected or refusal_of(loss_of, role):  # skipped: another check reports an invalid objective
            continue
        if not objectives.find(role.loss.objective, role.loss.objective_args).per_rollout:
            yield (
                f"roles.{name}.loss.correction.kind = 'none' with engine.quantization or engine.kv_cache_dtype: the "
                "engine's probabilities are not the trainer's, and training without importance weights is biased; "
                "leave loss.correction out, whose default then is {kind: truncate, high: 2.0}"
            )


def served_adapter_problems(
    roles: Mapping[str, RoleSpec], opened: Mapping[str, RoleSpec], settings: Servers, *, ahead: int
) -> Iterator[str]:
    """Yields error messages about settings that are invalid if servers apply LoRA adapters at inference
    (engine.adapters = 'served'). `opened`: the roles whose engines the run opens. `ahead`: see Rollouts.ahead."""
    if all(role.lora is None for role in roles.values()):
        yield ("engine.adapters = 'served', and no role has lora: set it to merged")
    if settings.urls:
        yield (
            "engine.adapters = 'served' with engine.urls: those servers share no directory with the run, where "
            "adapters are written; set it to merged, or leave urls out"
        )
    if settings.pause == "keep" and ahead > 1:
        yield (
            f"engine.pause = 'keep' with engine.adapters = 'served' and rollouts.max_staleness = {ahead}: answers "
            "under way would need adapters that are gone; set engine.pause to abort or wait"
        )
    sharing = [name for name, role in opened.items() if role.servers != name]
    if sharing and ahead > 1:
        yield (
            f"roles.{sharing[0]} and roles.{roles[sharing[0]].servers} share servers (engine.adapters = "
            f"'served'), and rollouts.max_staleness = {ahead}: a refit does not cut answers of shared servers short, "
            "and they would need adapters that are gone; set it to 1, or engine.adapters to merged"
        )


def colocation_problems(
    roles: Mapping[str, RoleSpec], engine: EngineSpec, settings: Servers, *, ahead: int, ranks: int
) -> Iterator[str]:
    """Yields error messages about settings that are invalid if servers share the trainer's GPUs (engine.colocate =
    true)."""
    sets, place = len(engine.server_roles), "engine.colocate = true with"
    if not settings.start or settings.urls:
        yield (
            f"{place} engine.start = false or engine.urls: each of the trainer's nodes starts the servers in its own "
            "GPUs; set engine.start to true and leave engine.urls out"
        )
    if settings.gpus:
        yield (
            f"{place} engine.gpus = {list(settings.gpus)}: the servers stand in the trainer's GPUs, replica 0 in the "
            "first engine.tp of them; leave engine.gpus out"
        )
    if apart := [name for name, role in roles.items() if role.ranks != "all"]:
        yield (
            f"{place} roles.{apart[0]}.ranks = {roles[apart[0]].ranks!r}: these servers and the trainer take turns on "
            "all GPUs; leave the ranks of roles out, or give the servers GPUs of their own"
        )
    if settings.replicas * settings.tp > ranks:
        yield (
            f"{place} engine.replicas = {settings.replicas} x engine.tp = {settings.tp} on {ranks} ranks: a role has "
            "at most one server in a GPU; lower engine.replicas or engine.tp"
        )
    if (shares := settings.memory_share * sets) > 1:
        yield (
            f"{place} engine.memory_share = {settings.memory_share}: servers of {sets} roles stand in each GPU and "
            f"would take {shares:g} of it; lower it to {0.9 / sets:.2g}"
        )
    if ahead:
        yield (
            f"{place} rollouts.max_staleness = {ahead}: servers in the trainer's GPUs sleep "
            "while it trains, so that no iteration can be written beside training; set one of them to its default"
        )
    if engine.refit.staging != "off":
        yield f"{place} refit.staging = {engine.refit.staging!r}: these servers sleep till a refit; set it to auto"
    if engine.refit.delta:
        yield (
            f"{place} refit.delta = true: servers that drop their weights have nothing that a difference could be "
            "added to; set refit.delta to false"
        )
    yield from [
        f"{place} roles.{name}.lora: roles with adapters may share one model in the trainer, which does not leave the "
        "GPU; set engine.colocate to false"
        for name, role in roles.items()
        if role.lora is not None
    ]
