"""Checks `engine.gpus`, the indices of the GPUs that the servers run on."""

from __future__ import annotations

from megatron_rl.config.engines import Servers
from megatron_rl.spec.run_spec import EngineSpec


def number_problems(engine: EngineSpec) -> list[str]:
    """Returns error messages about GPU indices in `engine.gpus` that are wrong on every machine.

    Checks that the servers can be divided equally among the hosts, that no GPU index is repeated, and that there are
    enough indices for the servers of a host. An empty `engine.gpus` is accepted, because it is correct on a machine
    without GPUs.
    """
    settings, needed = engine.settings, engine.num_server_gpus // engine.hosts
    if not isinstance(settings, Servers):
        return []
    gpus, problems = list(settings.gpus), list[str]()
    if settings.replicas % engine.hosts:
        problems.append(
            f"engine.replicas = {settings.replicas} on job.nodes = {engine.hosts}: each host starts as many servers; "
            "give a multiple of job.nodes"
        )
    if twice := sorted({number for number in gpus if gpus.count(number) > 1}):
        problems.append(f"engine.gpus = {gpus}: {twice} stand there twice; two servers cannot share a GPU")
    if gpus and _started_by_number(engine, settings) and len(gpus) < needed:
        needs, on = "roles" if engine.trains else "models", " / job.nodes" * (engine.hosts > 1)
        problems.append(f"engine.gpus = {gpus}: {needed} are needed ({needs} x engine.replicas x engine.tp{on})")
    return problems


def device_problems(engine: EngineSpec | None, ranks_here: int) -> list[str]:
    """Returns error messages about wrong GPU indices in `engine.gpus` on a machine that has GPUs.

    `ranks_here`: number of ranks on the machine where the servers are started. Servers must not use the GPUs of the
    trainer, whose local rank k uses GPU k.
    """
    settings = None if engine is None else engine.settings
    if engine is None or not isinstance(settings, Servers) or not _started_by_number(engine, settings):
        return []
    needed, gpus = engine.num_server_gpus // engine.hosts, list(settings.gpus)
    if not engine.trains:
        if gpus or needed == settings.tp:
            return []
        return [
            f"engine.gpus is empty: all {needed // settings.tp} servers would take the first GPU. Name {needed} GPUs "
            "(models x engine.replicas x engine.tp)"
        ]
    if not gpus:
        error = (
            "engine.gpus is empty: every server would take the first GPU, as the first rank does. Name "
            f"{needed} GPUs (roles x engine.replicas x engine.tp) that no rank has; or set engine.colocate to true, "
            "and servers and trainer have the GPUs in turns; or start the servers in jobs of their own (engine.start "
            "= false)"
        )
        return [error] if needed else []
    shared = sorted({number for number in gpus if number < ranks_here})
    ranks = "rank 0 has GPU 0" if ranks_here == 1 else f"its ranks have GPUs 0 to {ranks_here - 1}"
    error = (
        f"engine.gpus = {gpus}: {shared} are the trainer's as well ({ranks}), and both would hold memory there all the "
        f"time. Name GPUs from {ranks_here} on; or leave engine.gpus out and set engine.colocate to true, and they "
        "have the GPUs in turns"
    )
    return [error] if shared else []


def _started_by_number(engine: EngineSpec, settings: Servers) -> bool:
    """Returns whether the command itself starts the servers and chooses their GPUs by the indices in `engine.gpus`."""
    return not (settings.urls or settings.colocate or (engine.trains and not settings.start))
