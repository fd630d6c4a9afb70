"""Chooses values for settings that say auto: the ranks of roles (roles.NAME.ranks), and rollouts.max_staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    choice = _Choice(config, ranks, recorded, say)
    sets = choice.sets()
    return settled(config, ranks=sets, staleness=choice.staleness(sets))


@dataclass(frozen=True)
class _Choice:
    """Chooses the values of a run. `recorded`: settings of its first start, see `_recorded`."""

    config: TrainConfig
    ranks: int
    recorded: Mapping[str, Any]
    say: Callable[[str], object]

    def sets(self) -> Mapping[str, str]:
        """Returns {role: its ranks} of the roles whose ranks are auto. Returns {} if the config has errors, which the
        command reports later."""
        automatic = [name for name, role in self.config.roles.items() if role.ranks == "auto"]
        if not automatic:
            return {}
        roles = self.recorded.get("roles", {})
        old = {name: str(roles[name]["ranks"]) for name in automatic if "ranks" in roles.get(name, {})}
        if len(old) == len(automatic) and not rank_sets(roles_of(settled(self.config, ranks=old)), self.ranks)[1]:
            self.say(f"{RANKS} takes {_words(old)}, because the run was started with these values")
            return old
        if (spec := self._valid()) is None:
            return {}
        if fixed := [name for name, role in spec.roles.items() if role.has_policy and name not in automatic]:
            raise ConfigError(
                f"{RANKS} with ranks of {', '.join(fixed)} that are not auto: give each role auto, or none"
            )
        planning, search = leaf("planning.schedule", RANKS), leaf("planning.search", RANKS)
        try:
            case = planning.case_of(spec)
            if case.ranks != self.ranks:
                found = f"leave {case.ranks} ranks to the trainer, and it has {self.ranks}"
                raise ConfigError(f"job.nodes and the engines {found}")
            best, seconds, shared = search.best_ranks(case)
        except ConfigError as error:
            raise ConfigError(f"{RANKS}: the times cannot be predicted, set ranks instead: {error}") from error
        best = {name: best[name] for name in automatic}
        beside = "" if shared in (None, seconds) else f", and {shared:.3g} s with all roles on all ranks"
        self.say(f"{RANKS} takes {_words(best)}: {seconds:.3g} s a cycle are predicted on {case.cluster}{beside}")
        return best

    def staleness(self, sets: Mapping[str, str]) -> int | None:
        """Returns the number for rollouts.max_staleness, if it is auto: None for the number that `settled` takes.
        `sets`: result of `sets`."""
        if self.config.rollouts.max_staleness != "auto":
            return None
        number = self.recorded.get("rollouts", {}).get("max_staleness")
        if isinstance(number, int):
            self.say(f"{STALENESS} takes {number}, because the run was started with this value")
            return number
        if not settled(self.config).rollouts.ahead:
            self.say(f"{STALENESS} takes 0: the engines share the trainer's GPUs, and cannot generate while it trains")
            return None
        if (spec := self._valid(sets)) is None:
            return None
        planning = leaf("planning.schedule", STALENESS)
        try:
            cluster, schedules, _ = planning.predicted(spec)
        except ConfigError as error:
            raise ConfigError(f"{STALENESS}: the rates cannot be predicted, set a number instead: {error}") from error
        allowed = [schedule for schedule in schedules if self._valid(sets, schedule.max_staleness) is not None]
        best = planning.best_staleness(allowed)
        rates = ", ".join(f"{schedule.iterations_per_hour:.3g}" for schedule in allowed)
        numbers = ", ".join(str(schedule.max_staleness) for schedule in allowed)
        self.say(f"{STALENESS} takes {best}: {rates} iterations an hour are predicted for {numbers} on {cluster}")
        return best

    def _valid(self, ranks: Mapping[str, str] | None = None, staleness: int | None = None) -> RunSpec | None:
        """Returns the specification with these values, see `settled`; None if it has errors."""
        spec, wrong = specify(settled(self.config, ranks=ranks, staleness=staleness), self.ranks)
        return spec if isinstance(spec, RunSpec) and not wrong and not problems(spec, to_come=True) else None


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


def _words(ranks: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {own}" for name, own in ranks.items())
