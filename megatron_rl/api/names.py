"""Converts the keyword arguments of a Trainer to settings. An error message for a name of TRL gives the name here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.api.config import Config
from megatron_rl.api.recipes import count_of
from megatron_rl.config.base import ConfigError
from megatron_rl.config.other_names import SHORT, TRAINER, TRL, named_elsewhere
from megatron_rl.config.schema import TrainConfig

UPDATES = "updates"
OTHERS = ("model", "reward", "dataset", "eval_dataset", "recipe", "config", "callbacks")  # other Trainer arguments


def settings_of(arguments: Mapping[str, Any], target: str, roles: Iterable[str]) -> Config:
    """Converts a Trainer's keyword arguments to settings.

    `arguments`: short names, sections (`run={...}`) and dotted keys (`**{"run.seed": 1}`). `target`: the recipe's
    class. `roles`: the recipe's roles. Raises ConfigError for an invalid value and for an unknown name. The message
    about an unknown name suggests the most similar name.
    """
    sections = {field.name for field in dataclasses.fields(TrainConfig)}
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == UPDATES:
            keys = [count_of(target)]
        elif name in SHORT:
            keys = [SHORT[name].replace("*", role) for role in roles] if "*" in SHORT[name] else [SHORT[name]]
        elif name in sections or "." in name:
            keys = [name]
        else:
            raise ConfigError(f"{name} = {value!r}: {_unknown(name, value, sections)}")
        settings |= dict.fromkeys(keys, value)
    return Config(settings)


def _unknown(name: str, value: Any, sections: set[str]) -> str:
    if name in TRAINER:
        return f"this is TRL's name; here it is {TRAINER[name]}"
    if (key := TRL.get(name)) is not None:
        short = next((short for short, dotted in SHORT.items() if dotted == key), None)
        return "this is TRL's name; here it is " + (f"{short} ({key})" if short else key)
    if matches := [*named_elsewhere(name, value)]:
        return "; ".join(f"{key}: {words}" for key, words in matches)
    close = difflib.get_close_matches(name, [*SHORT, *OTHERS, *sections], n=1)
    if close:
        return f"unknown setting; did you mean {close[0]!r}?"
    return f"unknown setting; there are {', '.join(SHORT)}, the sections of the config, and dotted keys"
