"""Chooses a number for rollouts.max_staleness = auto."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config import files as config_files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.lib.leaf_modules import leaf
from megatron_rl.lib.regular_files import read_text
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunDirectory, config_changes
from megatron_rl.spec.checks import problems
from megatron_rl.spec.resolve import AnyConfig, specify, with_staleness
from megatron_rl.spec.run_spec import RunSpec

AUTO = "rollouts.max_staleness = auto"


def chosen(config: AnyConfig, ranks: int, say: Callable[[str], object] = lambda text: None) -> AnyConfig:
    """Replaces rollouts.max_staleness = auto by a number. Returns the config with the number, and passes a message with
    the number and the reason to the function `say`.

    A run that is started again keeps the number of its first start (see `_recorded`). Otherwise, the number depends
    only on the config. `ranks`: number of ranks of the run. Raises ConfigError if the plan cannot predict the
    iterations per hour.
    """
    only = with_staleness(config)
    if only is config or not isinstance(only, TrainConfig):
        return config
    recorded = _recorded(RunDirectory(only.directory), config_files.dump(config))
    if recorded is not None:
        say(f"{AUTO} takes {recorded}, because the run was started with this value")
        return with_staleness(config, recorded)
    if not only.rollouts.ahead:
        say(f"{AUTO} takes 0: the engines share the trainer's GPUs, and cannot generate while it trains")
        return only
    spec, wrong = specify(only, ranks)
    if wrong or problems(spec, to_come=True):
        return only  # the config has errors, which the command reports later
    assert isinstance(spec, RunSpec)
    planning = leaf("planning.schedule", AUTO)
    try:
        cluster, schedules = planning.predicted(spec)
    except ConfigError as error:
        raise ConfigError(f"{AUTO}: the rates cannot be predicted, set a number instead: {error}") from error
    allowed = [
        schedule for schedule in schedules
        if not problems(specify(with_staleness(config, schedule.max_staleness), ranks)[0], to_come=True)
    ]  # fmt: skip
    best = planning.best_staleness(allowed)
    rates = ", ".join(f"{schedule.iterations_per_hour:.3g}" for schedule in allowed)
    numbers = ", ".join(str(schedule.max_staleness) for schedule in allowed)
    say(f"{AUTO} takes {best}: {rates} iterations an hour are predicted for {numbers} on {cluster}")
    return with_staleness(config, best)


def _recorded(directory: RunDirectory, config_text: str) -> int | None:
    """Returns the max_staleness with which the run was started before. Returns None if the run was not started before,
    or if the earlier start had a different config and saved no checkpoint.
    """
    if not directory.config.exists():
        return None
    text = read_text(directory.config, errors="replace")
    try:
        number = config_files.parse(text, str(directory.config))["rollouts"]["max_staleness"]
    except (ConfigError, KeyError, TypeError):
        return None
    same = Checkpoints(directory.checkpoints).newest() is not None or not config_changes(text, config_text)
    return number if isinstance(number, int) and same else None
