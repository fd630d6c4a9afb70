"""Says what is wrong with `engine.gpus`, the GPUs that servers get by number."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.schema import ConfigError, EvalConfig, GenerateConfig, Servers, TrainConfig

ServedConfig = TrainConfig | EvalConfig | GenerateConfig  # configs whose answers servers may write


def number_problems(config: Any) -> list[str]:
    """Returns a sentence for each thing that is wrong with the numbers of a config, whatever the machine is: numbers
    that stand there twice, and fewer numbers than the servers need. No numbers at all are right on a CPU.
    """
    if not isinstance(config, ServedConfig) or not isinstance(config.engine, Servers):
        return []
    problems, settings = doubled_gpus(config.engine), _started(config)
    if settings is not None and settings.gpus:
        problems += _too_few(settings, _sets_of_servers(config), _word_for_sets(config))
    return problems


def device_problems(config: Any, ranks_here: int) -> list[str]:
    """Returns what is wrong with the numbers of a config on a machine that has GPUs.

    `ranks_here`: how many ranks are known to run on the machine where the servers are started. Local rank k uses GPU k.
    """
    settings = _started(config)
    if settings is None:
        return []
    if isinstance(config, TrainConfig):
        return _shared_with_ranks(settings, ranks_here) if settings.gpus else _without_numbers(config, settings)
    count = _sets_of_servers(config) * settings.replicas
    if settings.gpus or count == 1:
        return []
    return [
        f"engine.gpus is empty: all {count} servers would take the first GPU. Name {count * settings.tp} GPUs "
        f"({_word_for_sets(config)} x engine.replicas x engine.tp)"
    ]


def refuse(config: Any, ranks_here: int) -> None:
    """Raises ConfigError for what `device_problems` finds."""
    if problems := device_problems(config, ranks_here):
        raise ConfigError("\n  ".join(problems))


def doubled_gpus(settings: Servers) -> list[str]:
    """Returns a sentence about GPUs that engine.gpus names more than once; nothing where each stands there once."""
    twice = sorted({number for number in settings.gpus if settings.gpus.count(number) > 1})
    said = f"engine.gpus = {list(settings.gpus)}: {twice} stand there twice; two servers cannot share a GPU"
    return [said] if twice else []


def _started(config: Any) -> Servers | None:
    """Returns the settings of the servers that the command itself starts by number; None where there are none."""
    if not isinstance(config, ServedConfig) or not isinstance(config.engine, Servers):
        return None
    settings = config.engine
    elsewhere = bool(settings.urls) or (isinstance(config, TrainConfig) and not settings.start)
    return None if elsewhere or settings.colocate else settings


def _sets_of_servers(config: ServedConfig) -> int:
    """Returns how many times engine.replicas servers are started: for each role, or each model."""
    if isinstance(config, TrainConfig):
        return len(config.server_roles)
    if isinstance(config, GenerateConfig):
        return 1
    judging = None if config.verifier is None else config.verifier.model
    return len({config.model, config.junior, judging} - {None})


def _word_for_sets(config: ServedConfig) -> str:
    return "roles" if isinstance(config, TrainConfig) else "models"


def _too_few(settings: Servers, sets: int, word: str) -> list[str]:
    wanted = sets * settings.replicas * settings.tp
    said = f"engine.gpus = {list(settings.gpus)}: {wanted} are needed ({word} x engine.replicas x engine.tp)"
    return [said] if len(settings.gpus) < wanted else []


def _without_numbers(config: TrainConfig, settings: Servers) -> list[str]:
    wanted = _sets_of_servers(config) * settings.replicas * settings.tp
    said = (
        f"engine.gpus is empty: every server would take the first GPU, as the first rank does. Name {wanted} GPUs "
        "(roles x engine.replicas x engine.tp) that no rank has; or set engine.colocate to true, and servers and "
        "trainer have the GPUs in turns; or start the servers in jobs of their own (engine.start = false)"
    )
    return [said] if wanted else []


def _shared_with_ranks(settings: Servers, ranks_here: int) -> list[str]:
    shared = sorted({number for number in settings.gpus if number < ranks_here})
    ranks = "rank 0 has GPU 0" if ranks_here == 1 else f"its ranks have GPUs 0 to {ranks_here - 1}"
    said = (
        f"engine.gpus = {list(settings.gpus)}: {shared} are the trainer's as well ({ranks}), and both would hold "
        f"memory there all the time. Name GPUs from {ranks_here} on; or leave engine.gpus out and set engine.colocate "
        "to true, and they have the GPUs in turns"
    )
    return [said] if shared else []
