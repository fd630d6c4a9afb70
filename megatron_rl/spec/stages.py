"""Resolves the stages of a run (parts of the run that override settings), and checks which settings a stage changes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig

# Patterns of setting names: a stage may change a setting if the name matches CHANGING and does not match FIXED
CHANGING = (
    "data.sources.*.weight", "recipe.args.*", "roles.*.loss.*", "roles.*.max_prompt_tokens",
    *(f"roles.*.optimizer.{name}" for name in ("lr", "min_lr", "betas", "eps", "weight_decay", "clip_grad")),
    "roles.*.samples_per_optimizer_step", "roles.*.sampling.*", "run.prompts_per_iteration",
)  # fmt: skip
FIXED = (
    "recipe.args.*template",
    *(f"roles.*.loss.{name}" for name in ("objective", "value_coef", "centering", "reset_reference_every")),
)
LENGTHS = ("roles.*.max_prompt_tokens", "roles.*.sampling.max_tokens")  # settings that a stage may only lower


def config_of(settings: Mapping[str, Any], overrides: Mapping[str, Any], place: str) -> TrainConfig:
    """Returns the config of a stage: the run's config with the stage's overrides and without stages. Raises ConfigError
    if a setting does not exist, has an invalid value or cannot change during a run.

    `settings`: the run's config as plain values. `place`: name of the stage, for error messages.
    """
    run_settings = {**settings, "stages": []}
    trees = [("the config", run_settings)]
    for name, value in overrides.items():
        tree: Any = value
        for part in reversed(name.split(".")):
            tree = {part: tree}
        trees.append((place, tree))
    stage_config = files.load(TrainConfig, trees=trees)
    changed = {name: pair for name, *pair in _changed(run_settings, files.tree_of(stage_config))}
    fixed = [name for name in changed if not _matches(name, CHANGING) or _matches(name, FIXED)]
    longer = {name: pair for name, pair in changed.items() if _matches(name, LENGTHS) and pair[1] > pair[0]}
    if fixed:
        more = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
        raise ConfigError(
            f"{place}: {', '.join(fixed[:3])}{more} cannot change during a run; a stage may change "
            f"{', '.join(CHANGING)}, without {', '.join(FIXED)}"
        )
    for name, (old, new) in longer.items():
        raise ConfigError(
            f"{place}: {name} = {new} is above {old}, for which memory and engines are set up: give the longest length "
            "outside of `stages`, and shorter ones in stages"
        )
    return stage_config


def _changed(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted name, value in the run, value in the stage) for each setting that has different values in `old`,
    the run's config, and `new`, the stage's config."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            yield from _changed(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def recipe_differences(recipe: Any, stage_recipe: Any) -> Iterator[str]:
    """Yields an error message if a stage's recipe differs from the run's recipe in its roles, scores or schedule."""

    def fixed(recipe: Any) -> tuple[object, ...]:
        roles = [(name, part.trained, part.head, part.gives) for name, part in recipe.roles().items()]
        kinds = sorted({roles for cycle in recipe.schedule() for roles in cycle})
        return roles, recipe.schedule(), [recipe.scores_of(roles) for roles in kinds]

    if None not in (recipe, stage_recipe) and fixed(recipe) != fixed(stage_recipe):
        yield "recipe.args: the recipe then has other roles, scores or iterations, which cannot change during a run"
