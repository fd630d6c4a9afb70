"""Short names of recipes and of settings, and tables that map the names of settings in TRL (with transformers and peft)
and in verl to settings of this project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.base import Use, config, hint, refuse

_NAMES = yaml.load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
RECIPES: Mapping[str, str] = _NAMES["RECIPES"]  # {short name of a recipe: its class}
SHORT: Mapping[str, str] = _NAMES["SHORT"]  # {short name of a setting: its dotted key}
TRAINER: Mapping[str, str] = _NAMES["TRAINER"]  # {argument or setting in TRL: argument of this package's Trainer}
TRL: Mapping[str, str] = _NAMES["TRL"]  # {setting of TRL: corresponding setting of this package}
VERL: Mapping[str, str] = _NAMES["VERL"]  # {setting of verl: corresponding setting of this package}
VERL_ROOTS = ("actor_rollout_ref", "critic", "algorithm", "custom_reward_function", "trainer")


@config
class RecipeUse(Use):
    """A recipe: its class, and the arguments with which it is built."""

    target: str  # package.module:Class, or a short name: grpo, dapo, ppo, tango, ... (config/other_names.yaml has all)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", RECIPES.get(self.target, self.target))
        refuse(*self.problems())

    def problems(self) -> Iterator[str]:
        """Yields an error message for a `target` that is neither a known short name nor of the form
        package.module:Class, and for each argument that is not a finite number.
        """
        yield from super().problems()
        if self.target and ":" not in self.target:  # empty is allowed: a Config built in Python may be incomplete
            cure = hint(self.target, RECIPES, f"known: {', '.join(RECIPES)}.")
            yield f"target = {self.target!r} is no recipe; {cure} Others are named as package.module:Class"


def named_elsewhere(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, hint that names the corresponding setting of this package) for each name of TRL or verl in an
    unknown setting.

    `key`: dotted name of the unknown setting. `value`: the setting's value; if it is a mapping, its keys are searched.
    """
    name = key.rpartition(".")[2]
    if name_here := VERL.get(key) or TRL.get(name):
        yield key, f"this is {'verl' if key in VERL else 'TRL'}'s name; here it is {name_here.replace('*', 'NAME')}"
    elif key in ("recipe", "roles"):
        yield key, "only configs of `train` have it; `eval` needs model, sets and reward (docs/how_to/evaluation.md)"
    elif isinstance(value, Mapping):
        for inner, inner_value in value.items():
            yield from named_elsewhere(f"{key}.{inner}", inner_value)
    elif key.partition(".")[0] in VERL_ROOTS:
        yield key, "this is verl's name; list the settings here by `megatron-rl settings`, with a word of the name"
