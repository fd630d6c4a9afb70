"""Short names of recipes and of settings, and the settings that correspond to names of TRL (with transformers and peft)
and of verl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.base import Use, config, hint, refuse

_NAMES = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
RECIPES: Mapping[str, str] = _NAMES["RECIPES"]  # {short name of a recipe: its class}
SHORT: Mapping[str, str] = _NAMES["SHORT"]  # {short name of a setting: its dotted key}
TRAINER: Mapping[str, str] = _NAMES["TRAINER"]  # {argument or setting in TRL: the Trainer's argument}
TRL: Mapping[str, str] = _NAMES["TRL"]  # {setting of TRL: the corresponding setting here}
VERL: Mapping[str, str] = _NAMES["VERL"]  # {setting of verl: the corresponding setting here}
VERL_ROOTS = ("actor_rollout_ref", "critic", "algorithm", "custom_reward_function", "trainer")


@config
class RecipeUse(Use):
    """A recipe: its class, and the arguments with which it is built."""

    target: str  # package.module:Class, or a short name: grpo, dapo, ppo, tango, ... (config/other_names.yaml has all)

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


def named_elsewhere(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, the setting that corresponds to it) for the names of TRL or verl in an unknown setting.

    `key`: dotted name of the unknown setting. `value`: its value; names may be nested in a mapping.
    """
    name = key.rpartition(".")[2]
    if found := VERL.get(key) or TRL.get(name):
        yield key, f"this is {'verl' if key in VERL else 'TRL'}'s name; here it is {found.replace('*', 'NAME')}"
    elif isinstance(value, Mapping):
        for inner, own in value.items():
            yield from named_elsewhere(f"{key}.{inner}", own)
    elif key.partition(".")[0] in VERL_ROOTS:
        yield key, "this is verl's name; list the settings here by `megatron-rl settings`, with a word of the name"
