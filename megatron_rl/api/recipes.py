"""Resolves the recipe that is passed to a Trainer, and the names of the recipe's arguments."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import pydantic

from megatron_rl.api import by_value
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use, hint
from megatron_rl.config.other_names import RECIPES

# Names of recipe arguments that set the length of a run; the first argument that a recipe has is used
_COUNTS = ("updates", "generator_updates")


def use_of(recipe: Any) -> dict[str, Any]:
    """Returns the config section `recipe` {target, args} for a short name, package.module:Class, a section, or a recipe
    object.

    Raises ConfigError for an unknown short name, and for an object whose class cannot be imported by other processes.
    """
    if isinstance(recipe, str) and ":" in recipe:
        return {"target": recipe}
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            close = hint(recipe, RECIPES, f"known: {', '.join(RECIPES)};")
            raise ConfigError(f"recipe {recipe!r} is not known; {close} Others are named as package.module:Class")
        return {"target": RECIPES[recipe]}
    if isinstance(recipe, Mapping):
        return dict(recipe)
    if isinstance(recipe, Use):
        return {"target": recipe.target, "args": recipe.args}
    if not dataclasses.is_dataclass(recipe) or isinstance(recipe, type):
        raise ConfigError(
            f"recipe {recipe!r}: give a word ({', '.join(RECIPES)}), package.module:Class, or an object such as "
            "Grpo(updates=100)"
        )
    kind = type(recipe)
    module = sys.modules.get(kind.__module__)
    held = module is not None and vars(module).get(kind.__qualname__) is kind
    if not held or module is None or not by_value.findable(module):
        raise ConfigError(
            f"recipe {kind.__qualname__} is defined in {kind.__module__}: put the class into a module beside the "
            "program, so that the ranks can import it"
        )
    args = json.loads(pydantic.TypeAdapter(kind).dump_json(recipe))
    return {"target": f"{kind.__module__}:{kind.__qualname__}", "args": args}


def fields_of(target: str) -> set[str]:
    """Returns the names of a recipe's arguments. Raises ConfigError if the target is not a dataclass."""
    recipe = plugins.find(target)
    if not isinstance(recipe, type) or not dataclasses.is_dataclass(recipe):
        raise ConfigError(f"recipe {target!r} is no recipe: name a dataclass that is a Recipe")
    return {field.name for field in dataclasses.fields(recipe) if field.init}


def count_of(target: str) -> str:
    """Returns the dotted key of the recipe's argument that sets the number of updates. Raises ConfigError if the recipe
    has no such argument."""
    fields = fields_of(target)
    for name in _COUNTS:
        if name in fields:
            return f"recipe.args.{name}"
    raise ConfigError(f"updates: recipe {target} has no such argument; it takes {', '.join(sorted(fields))}")
