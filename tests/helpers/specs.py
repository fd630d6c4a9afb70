"""Specifications for tests: without the checks, or the checks without a recipe that can be built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.config.base import ConfigError
from megatron_rl.spec import checks
from megatron_rl.spec.explain import explain, explain_recipe
from megatron_rl.spec.resolve import specify

__all__ = ["check", "check_recipe", "explain", "explain_recipe", "problems", "spec_of"]


def spec_of(config: Any, ranks: int = 1, *, recipe: Any = None) -> Any:
    """Returns the specification of a config without checking it. `recipe`: None means the recipe of the config."""
    spec: Any = specify(config, ranks)[0]
    return spec if recipe is None else replace(spec, recipe=recipe)


def problems(config: Any, ranks: int = 1, *, to_come: bool = False) -> list[str]:
    """Returns what is wrong with a config, whatever its recipe is."""
    spec = specify(config, ranks)[0]
    return checks.problems(replace(spec, recipe=None) if hasattr(spec, "recipe") else spec, to_come=to_come)


def check(config: Any, ranks: int, *, to_come: bool = False) -> None:
    """Raises ConfigError for what is wrong with a config, whatever its recipe is."""
    if messages := problems(config, ranks, to_come=to_come):
        raise ConfigError("\n  ".join(messages))


def check_recipe(config: Any, recipe: Any) -> None:
    """Raises ConfigError for settings that go against a recipe."""
    spec = spec_of(config, recipe=recipe)
    if messages := checks.recipe_problems(spec):
        raise ConfigError("\n  ".join(messages))
