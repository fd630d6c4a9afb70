"""Chooses a number for rollouts.max_staleness = auto."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config import files as config_files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.planning.schedule import Schedule, best_staleness, predicted
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunDirectory, config_changes
from megatron_rl.spec.checks import problems
from megatron_rl.spec.resolve import specify, with_staleness
from megatron_rl.spec.run_spec import RunSpec

AUTO = "rollouts.max_staleness = auto"


def chosen(config: TrainConfig, ranks: int) -> tuple[TrainConfig, str]:
    """Returns the config with a number in place of rollouts.max_staleness = auto, and a sentence that says which number
    and why; "" if the config has a number.

    A run that was started before keeps its number. Otherwise, the number depends only on the config. Raises ConfigError
    if the rates cannot be predicted.
    """
    if config.rollouts.max_staleness != "auto":
        return config, ""
    recorded = _recorded(config)
    if recorded is not None:
        return recorded, f"{AUTO} stays {recorded.rollouts.max_staleness}, with which the run was started"
    only = with_staleness(config)
    if only.rollouts.max_staleness == 0:
        return only, f"{AUTO} takes 0: the engines share the trainer's GPUs, and cannot generate while it trains"
    spec, wrong = specify(only, ranks)
    assert isinstance(spec, RunSpec)
    if wrong or problems(spec, to_come=True):
        return only, ""  # the command refuses the config
    try:
        cluster, found = predicted(spec)
    except ConfigError as error:
        raise ConfigError(f"{AUTO}: the rates cannot be predicted, set a number instead: {error}") from error
    found = [one for one in found if not problems(specify(with_staleness(config, one.max_staleness), ranks)[0])]
    best = best_staleness(found)
    return with_staleness(config, best), f"{AUTO} takes {best}: {reason(found)} on {cluster}"


def reason(found: Sequence[Schedule]) -> str:
    """Returns the predicted rates as text, such as `12.3, 18.4 iterations an hour are predicted for 0, 1`."""
    rates = ", ".join(f"{one.iterations_per_hour:.3g}" for one in found)
    return f"{rates} iterations an hour are predicted for {', '.join(str(one.max_staleness) for one in found)}"


def _recorded(config: TrainConfig) -> TrainConfig | None:
    """Returns the config with the number that an earlier start of the run recorded; None if no earlier start has saved
    a checkpoint or had otherwise the same config."""
    directory = RunDirectory(config.directory)
    if not directory.config.exists():
        return None
    text = directory.config.read_text(encoding="utf-8", errors="replace")
    try:
        tree = config_files.parse(text, str(directory.config))
        number = tree["rollouts"]["max_staleness"]
    except (ConfigError, KeyError, TypeError):
        return None
    if not isinstance(number, int):
        return None
    saved = Checkpoints(directory.checkpoints).newest() is not None
    return with_staleness(config, number) if saved or not config_changes(text, config_files.dump(config)) else None
