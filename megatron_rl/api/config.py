"""The settings of a training run as a Python object, complete or partial, with the same keys as its YAML file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic_core

from megatron_rl.config import files as config_files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.other_names import RECIPES
from megatron_rl.config.schema import TrainConfig
from megatron_rl.run.atomic_files import write_text

Settings = Mapping[str, Any]
_NEEDED = ("roles", "recipe", "data")  # sections without a default


class Config:
    """Settings of a training run, complete or partial: nested mappings as in its YAML file.

    The following three are equal:

        Config(run={"seed": 1, "iterations": 4})
        Config({"run.seed": 1, "run.iterations": 4})
        Config.from_yaml("my.yaml")  # with the lines `run: {seed: 1, iterations: 4}`

    Values are numbers, texts, lists, mappings, or sections of `megatron_rl.config.schema`. A Config is immutable; `|`
    returns a new Config in which values of the right operand override values of the left one, key by key.
    """

    def __init__(self, settings: Settings | None = None, /, **sections: Any) -> None:
        """`settings`: settings by dotted or nested keys. `sections`: sections of the config by name, such as
        run={"seed": 1}.

        Raises ConfigError with every unknown key, wrong type and invalid value. Missing keys are not an error.
        """
        entries = {**(settings or {}), **sections}
        trees = [("Config", _nested(key, value)) for key, value in entries.items()]
        self._tree = tree = config_files.read_tree(TrainConfig, trees=trees)
        if isinstance(recipe := tree.get("recipe"), Mapping):  # a short name, such as grpo, becomes the recipe's class
            tree["recipe"] = {k: RECIPES.get(str(v), v) if k == "target" else v for k, v in recipe.items()}
        config_files.load(TrainConfig, trees=[("Config", _with_stubs(tree))])

    @classmethod
    def from_yaml(cls, *paths: str | Path, overrides: Settings | None = None) -> Config:
        """Returns the settings of YAML files and `overrides`. Later files override earlier ones; `overrides` override
        all files. Raises ConfigError for a file that cannot be parsed or an invalid setting."""
        return cls(config_files.read_tree(TrainConfig, [Path(path) for path in paths])) | (overrides or {})

    @classmethod
    def of(cls, config: Config | TrainConfig | Settings | str | Path | None) -> Config:
        """Converts a YAML file's path, a mapping, a TrainConfig or None (no settings) to a Config. A Config is returned
        unchanged. Raises ConfigError for any other type."""
        match config:
            case None:
                return cls()
            case Config():
                return config
            case str() | Path():
                return cls.from_yaml(config)
            case TrainConfig():
                return cls(pydantic_core.to_jsonable_python(config))
            case Mapping():
                return cls(config)
        raise ConfigError(f"config is a {type(config).__name__}: give a Config, a mapping, or the path of a YAML file")

    @property
    def settings(self) -> dict[str, Any]:
        """Returns a copy of the settings, without defaults, as nested mappings of plain values."""
        return copy.deepcopy(self._tree)

    def resolve(self) -> TrainConfig:
        """Returns the complete config with all defaults, as `megatron-rl train` loads it from the YAML file. Raises
        ConfigError if roles, recipe or data are missing."""
        return config_files.load(TrainConfig, trees=[("Config", self._tree)])

    def to_yaml(self, path: str | Path) -> Path:
        """Writes the settings to a YAML file and returns its path. `from_yaml` of the file returns an equal Config.

        The file contains all defaults, unless roles, recipe or data are missing.
        """
        write_text(Path(path), str(self))
        return Path(path)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a dotted key, such as `run.seed`, or `default` if the key is not set."""
        node: Any = self._tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def __or__(self, other: Config | Settings) -> Config:
        right = other if isinstance(other, Config) else Config(other)
        return Config(config_files.read_tree(TrainConfig, trees=[("left", self._tree), ("right", right._tree)]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        """Returns the settings as YAML, with all defaults unless roles, recipe or data are missing."""
        if all(name in self._tree for name in _NEEDED):
            return config_files.dump(self.resolve())
        return config_files.dump_tree(self._tree)

    def __repr__(self) -> str:
        return f"Config({self._tree!r})"


def _nested(key: Any, value: Any) -> dict[str, Any]:
    """Returns {"a": {"b": value}} for the key a.b, with the value converted to plain values. Raises ConfigError if the
    key is malformed or the value cannot be converted."""
    if not isinstance(key, str) or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"config key {key!r}: it has the form a.b")

    def refuse(bad_value: Any) -> None:
        raise ConfigError(
            f"{key}: {repr(bad_value)[:80]} is a {type(bad_value).__name__}: give a number, a text, a list, a mapping, "
            "or an object of a class of megatron_rl.config.schema"
        )

    tree = pydantic_core.to_jsonable_python(value, fallback=refuse)
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def _with_stubs(tree: Settings) -> dict[str, Any]:
    """Returns the settings with placeholders for missing required keys, so that the schema can check the other keys. If
    a mapping is required and the value has another type, the value is not changed, so that the schema reports it."""

    def filled(value: Any, key: str) -> Any:
        return {key: "", **value} if isinstance(value, Mapping) else value

    stubbed = {"roles": {}, "recipe": {}, "data": {}, **tree}
    stubbed["recipe"] = filled(stubbed["recipe"], "target")
    stubbed["data"] = filled(stubbed["data"], "path")
    if isinstance(roles := stubbed["roles"], Mapping):
        mappings = {name: role for name, role in roles.items() if isinstance(role, Mapping)}
        owners = {str(role["same_as"]): {} for role in mappings.values() if role.get("same_as")}
        models = {
            n: {**role, "model": filled(role["model"], "path")} for n, role in mappings.items() if "model" in role
        }
        stubbed["roles"] = {**owners, **roles, **models}
    return stubbed
