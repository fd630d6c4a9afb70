"""Chooses values for settings that say auto: the ranks of roles (roles.NAME.ranks), and rollouts.max_staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.config import files as config_files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.lib.leaf_modules import leaf
from megatron_rl.lib.regular_files import read_text
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunDirectory, config_changes
from megatron_rl.spec.checks import problems
from megatron_rl.spec.rank_sets import rank_sets
from megatron_rl.spec.resolve import AnyConfig, roles_of, settled, specify
from megatron_rl.spec.run_spec import RunSpec

STALENESS = "rollouts.max_staleness = auto"
RANKS = "roles.NAME.ranks = auto"


def chosen(config: AnyConfig, ranks: int, say: Callable[[str], object] = lambda text: None) -> AnyConfig:
    """Returns the config with each `auto` replaced by a value, and passes a message with the value and the reason to
    the function `say`.

    A run that is started again keeps the values of its first start (see `_recorded`). Otherwise, the values depend only
    on the config. `ranks`: number of ranks of the run. Raises ConfigError if the plan cannot predict the time of an
    iteration.
    """
    if settled(config) is config or not isinstance(config, TrainConfig):
        return config
    recorded = _recorded(RunDirectory(config.directory), config_files.dump(config))
    config = _with_ranks(config, ranks, recorded, say)
    return _with_staleness(config, ranks, recorded, say)


def _with_ranks(
    config: TrainConfig, ranks: int, recorded: Mapping[str, Any], say: Callable[[str], object]
) -> TrainConfig:  # fmt: skip
    automatic = [name for name, role in config.roles.items() if role.ranks == "auto"]
    if not automatic:
        return config
    old = {name: str(part["ranks"]) for name, part in recorded.get("roles", {}).items() if "ranks" in part}
    same = settled(config, ranks={name: old[name] for name in automatic if name in old})
    if old.keys() >= {*automatic} and not rank_sets(roles_of(same), ranks)[1]:
        say(f"{RANKS} takes {_words(old, automatic)}, because the run was started with these values")
        return same
    spec, wrong = specify(settled(config), ranks)
    if wrong or problems(spec, to_come=True):
        return settled(config)  # the config has errors, which the command reports later
    assert isinstance(spec, RunSpec)
    if fixed := [name for name, role in spec.roles.items() if role.has_policy and name not in automatic]:
        raise ConfigError(f"{RANKS} with ranks of {', '.join(fixed)} that are not auto: give each role auto, or none")
    planning, search = leaf("planning.schedule", RANKS), leaf("planning.search", RANKS)
    try:
        case = planning.case_of(spec)
        if case.ranks != ranks:
            raise ConfigError(f"job.nodes and the engines leave {case.ranks} ranks to the trainer, and it has {ranks}")
        best, seconds, shared = search.best_ranks(case)
    except ConfigError as error:
        raise ConfigError(f"{RANKS}: the times cannot be predicted, set ranks instead: {error}") from error
    beside = "" if shared in (None, seconds) else f", and {shared:.3g} s with all roles on all ranks"
    say(f"{RANKS} takes {_words(best, automatic)}: {seconds:.3g} s a cycle are predicted on {case.cluster}{beside}")
    return settled(config, ranks=best)


def _with_staleness(
    config: TrainConfig, ranks: int, recorded: Mapping[str, Any], say: Callable[[str], object]
) -> TrainConfig:  # fmt: skip
    only = settled(config)
    if only is config:
        return config
    number = recorded.get("rollouts", {}).get("max_staleness")
    if isinstance(number, int):
        say(f"{STALENESS} takes {number}, because the run was started with this value")
        return settled(config, staleness=number)
    if not only.rollouts.ahead:
        say(f"{STALENESS} takes 0: the engines share the trainer's GPUs, and cannot generate while it trains")
        return only
    spec, wrong = specify(only, ranks)
    if wrong or problems(spec, to_come=True):
        return only  # the config has errors, which the command reports later
    assert isinstance(spec, RunSpec)
    planning = leaf("planning.schedule", STALENESS)
    try:
        cluster, schedules = planning.predicted(spec)
    except ConfigError as error:
        raise ConfigError(f"{STALENESS}: the rates cannot be predicted, set a number instead: {error}") from error
    allowed = [
        schedule for schedule in schedules
        if not problems(specify(settled(config, staleness=schedule.max_staleness), ranks)[0], to_come=True)
    ]  # fmt: skip
    best = planning.best_staleness(allowed)
    rates = ", ".join(f"{schedule.iterations_per_hour:.3g}" for schedule in allowed)
    numbers = ", ".join(str(schedule.max_staleness) for schedule in allowed)
    say(f"{STALENESS} takes {best}: {rates} iterations an hour are predicted for {numbers} on {cluster}")
    return settled(config, staleness=best)


def _recorded(directory: RunDirectory, config_text: str) -> Mapping[str, Any]:
    """Returns the settings with which the run was started before. Returns {} if the run was not started before, or if
    the earlier start had a different config and saved no checkpoint.
    """
    if not directory.config.exists():
        return {}
    text = read_text(directory.config, errors="replace")
    same = Checkpoints(directory.checkpoints).newest() is not None or not config_changes(text, config_text)
    try:
        settings = config_files.parse(text, str(directory.config))
    except ConfigError:
        return {}
    return settings if same and isinstance(settings, dict) else {}


def _words(ranks: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {ranks[name]}" for name in names)
