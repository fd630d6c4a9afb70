"""Finds the recipe that a Trainer is given, and what its arguments and roles are called."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any

import pydantic

from megatron_rl.api import by_value
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use

# Recipes that a Trainer knows by a word. Any other is named as package.module:Class, or given as an object.
WORDS: Mapping[str, str] = {
    "grpo": "megatron_rl.recipes.grpo:Grpo",
    "dapo": "megatron_rl.recipes.dapo:Dapo",
    "remax": "megatron_rl.contrib.remax:Remax",
    "lean_tango": "megatron_rl.recipes.tango:LeanTango",
    "tango": "megatron_rl.recipes.tango:Tango",
    "agents": "megatron_rl.recipes.agents:Agents",
    "rubric": "megatron_rl.contrib.rubric:Rubric",
    "pairwise": "megatron_rl.contrib.pairwise:Pairwise",
    "distil": "megatron_rl.recipes.distil:Distil",
}
_COUNTS = ("updates", "generator_updates")  # arguments that say how long a run is, the first that a recipe has


def use_of(recipe: Any) -> dict[str, Any]:
    """Returns the section `recipe` {target, args} for a word, package.module:Class, a section, or a recipe object.

    Raises ConfigError for an unknown word, and for an object of a class that no module holds: ranks could not import
    it.
    """
    if isinstance(recipe, str) and ":" in recipe:
        return {"target": recipe}
    if isinstance(recipe, str):
        if recipe not in WORDS:
            close = difflib.get_close_matches(recipe, WORDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(WORDS)}"
            raise ConfigError(f"recipe {recipe!r} is not known; {hint} Others are named as package.module:Class")
        return {"target": WORDS[recipe]}
    if isinstance(recipe, Mapping):
        return dict(recipe)
    if isinstance(recipe, Use):
        return {"target": recipe.target, "args": recipe.args}
    if not dataclasses.is_dataclass(recipe) or isinstance(recipe, type):
        raise ConfigError(
            f"recipe {recipe!r}: give a word ({', '.join(WORDS)}), package.module:Class, or an object such as "
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
    """Returns the names of a recipe's arguments. Raises ConfigError for a target that is no recipe."""
    found = plugins.find(target)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise ConfigError(f"recipe {target!r} is no recipe: name a dataclass that is a Recipe")
    return {field.name for field in dataclasses.fields(found) if field.init}


def count_of(target: str) -> str:
    """Returns the dotted key of the argument that says how many updates a run has."""
    own = fields_of(target)
    for name in _COUNTS:
        if name in own:
            return f"recipe.args.{name}"
    raise ConfigError(f"updates: recipe {target} has no such argument; it takes {', '.join(sorted(own))}")
