"""Servers in the trainer's GPUs (engine.colocate): where each stands, and which settings go against it."""

from __future__ import annotations

from megatron_rl.config.schema import RoleConfig, Servers, TrainConfig


def first_gpu(settings: Servers, replica: int) -> int:
    """Returns the number of the trainer's rank on whose GPU a replica's first rank stands; the others follow it."""
    return replica * settings.tp


def discards_weights(config: TrainConfig, role: str) -> bool:
    """Tells whether a refit of a role brings all that its servers hold, so that they may drop their weights before."""
    return config.roles[role].has_policy and config.roles[role].tandem is None


def colocation_problems(config: TrainConfig, settings: Servers, ranks: int) -> list[str]:
    """Returns a sentence for each setting that goes against servers in the trainer's `ranks` GPUs."""
    problems = _place_problems(config, settings, ranks)
    if config.rollouts.max_staleness:
        problems.append(
            f"engine.colocate = true with rollouts.max_staleness = {config.rollouts.max_staleness}: servers in the "
            "trainer's GPUs sleep while it trains, so that no turn can be written beside training; set one of them to "
            "its default"
        )
    if config.refit.delta:
        problems.append(
            "engine.colocate = true with refit.delta = true: servers that drop their weights have nothing that a "
            "difference could be added to; set refit.delta to false"
        )
    problems += [line for name, role in config.roles.items() for line in _role_problems(name, role)]
    return problems


def _place_problems(config: TrainConfig, settings: Servers, ranks: int) -> list[str]:
    """Returns what is wrong with where the servers are to stand."""
    problems = []
    if not settings.start or settings.urls:
        problems.append(
            "engine.colocate = true with engine.start = false or engine.urls: each of the trainer's nodes starts the "
            "servers in its own GPUs; set engine.start to true and leave engine.urls out"
        )
    if settings.gpus:
        problems.append(
            f"engine.colocate = true with engine.gpus = {list(settings.gpus)}: the servers stand in the trainer's "
            "GPUs, replica 0 in the first engine.tp of them; leave engine.gpus out"
        )
    if settings.replicas * settings.tp > ranks:
        problems.append(
            f"engine.colocate = true with engine.replicas = {settings.replicas} x engine.tp = {settings.tp} on {ranks} "
            "ranks: a role has at most one server in a GPU; lower engine.replicas or engine.tp"
        )
    shares = settings.memory_share * len(config.server_roles)
    if shares > 1:
        problems.append(
            f"engine.colocate = true with engine.memory_share = {settings.memory_share}: servers of "
            f"{len(config.server_roles)} roles stand in each GPU and would take {shares:g} of it; lower it to "
            f"{0.9 / len(config.server_roles):.2g}"
        )
    return problems


def _role_problems(name: str, role: RoleConfig) -> list[str]:
    if role.lora is None:
        return []
    return [
        f"engine.colocate = true with roles.{name}.lora: roles with adapters may share one model in the trainer, which "
        "does not leave the GPU; set engine.colocate to false"
    ]
