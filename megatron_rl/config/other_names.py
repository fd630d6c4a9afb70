"""Short names of recipes, and the settings that correspond to names of TRL (with transformers and peft) and of verl."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_rl.config.base import Use, config, hint, refuse

# {short name of a recipe: its class}
RECIPES: Mapping[str, str] = {
    "grpo": "megatron_rl.recipes.grpo:Grpo",
    "dapo": "megatron_rl.recipes.dapo:Dapo",
    "ppo": "megatron_rl.recipes.ppo:Ppo",
    "online_dpo": "megatron_rl.recipes.online_dpo:OnlineDpo",
    "remax": "megatron_rl.contrib.remax:Remax",
    "lean_tango": "megatron_rl.recipes.tango:LeanTango",
    "tango": "megatron_rl.recipes.tango:Tango",
    "tandem": "megatron_rl.recipes.tandem:Tandem",
    "agents": "megatron_rl.recipes.agents:Agents",
    "rubric": "megatron_rl.contrib.rubric:Rubric",
    "pairwise": "megatron_rl.contrib.pairwise:Pairwise",
    "distil": "megatron_rl.recipes.distil:Distil",
}


VERL_ROOTS = ("actor_rollout_ref", "critic", "algorithm", "custom_reward_function", "trainer")


@config
class RecipeUse(Use):
    """A recipe: its class, and the arguments with which it is built."""

    target: str  # package.module:Class, or a short name: grpo, dapo, ppo, tango, ... (config/other_names.py has all)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", RECIPES.get(self.target, self.target))
        refuse(*self.problems())

    def problems(self) -> Iterator[str]:
        """Yields an error message for a name that is no known short name and no package.module:Class, and for each
        argument that is not a finite number.
        """
        yield from super().problems()
        if self.target and ":" not in self.target:  # empty: a Config in Python that is not complete yet
            cure = hint(self.target, RECIPES, f"known: {', '.join(RECIPES)}.")
            yield f"target = {self.target!r} is no recipe; {cure} Others are named as package.module:Class"


@functools.cache
def names_of(library: Literal["TRL", "VERL"]) -> Mapping[str, str]:
    """Returns {setting of the library: setting of this project}, from other_names.yaml."""
    return yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))[library]


def named_elsewhere(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, the setting that corresponds to it) for the names of TRL or verl in an unknown setting.

    `key`: dotted name of the unknown setting. `value`: its value; names may be nested in a mapping.
    """
    name = key.rpartition(".")[2]
    verl = names_of("VERL")
    if found := verl.get(key) or names_of("TRL").get(name):
        yield key, f"this is {'verl' if key in verl else 'TRL'}'s name; here it is {found.replace('*', 'NAME')}"
    elif isinstance(value, Mapping):
        for inner, own in value.items():
            yield from named_elsewhere(f"{key}.{inner}", own)
    elif key.partition(".")[0] in VERL_ROOTS:
        yield key, "this is verl's name; list the settings here by `megatron-rl settings`, with a word of the name"
