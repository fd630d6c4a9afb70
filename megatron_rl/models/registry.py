"""Finds the model families by listing the files of this folder, and reads a config.json with the family that the file
names.

Families from a user's package are registered by name (`add`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from megatron_rl import models
from megatron_rl.config import plugins
from megatron_rl.config.files import read_yaml
from megatron_rl.config.schema import ConfigError
from megatron_rl.models import blocks
from megatron_rl.models.family import Family, requires_keys
from megatron_rl.models.rows import OuterRows, Row
from megatron_rl.models.sizes import Features, Sizes


def families() -> Mapping[str, Family]:
    """Returns {model_type: family} for the built-in families (modules in megatron_rl/models/ that define FAMILY) and
    for the families registered by `add`."""
    return _table()


def add(targets: Sequence[str], setting: str) -> None:
    """Registers model families from other packages in this process.

    A registration lasts for the life of the process. Registering a family again has no effect.

    `targets`: the families, each as `package.module:NAME`.
    `setting`: the name of the setting that lists the targets, for error messages.

    Raises ConfigError if a target is not found or is not a Family, or if another registered family has the same
    model_type.
    """
    for target in targets:
        try:
            family = plugins.find(target)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error
        if not isinstance(family, Family) or not hasattr(family, "model_type"):
            raise ConfigError(
                f"{setting}: {target} is a {type(family).__name__}: name an instance of a subclass of "
                f"{Family.__module__}:{Family.__name__} that has a model_type"
            )
        registered = _table().setdefault(family.model_type, family)
        if registered is not family:
            raise ConfigError(
                f"{setting}: {target} has the model_type {family.model_type!r}, which the family in "
                f"{type(registered).__module__} has already: give it another one"
            )


def family_of(sizes: Sizes) -> Family:
    """Returns the model family of a model with these sizes."""
    return families()[sizes.family]


def read(config: Mapping[str, Any], where: str = "config.json") -> Sizes:
    """Returns the sizes of the model that the contents of a config.json describe. Raises ConfigError, which names the
    key, if a key is missing or its value is not supported. `where`: the file, for error messages."""
    return _named(config, where).read(config, where)


def features(config: Mapping[str, Any], where: str = "config.json") -> Features:
    """Returns the features of the model that the contents of a config.json describe. Raises ConfigError, which names
    the key, if a key is missing. `where`: the file, for error messages."""
    family = _named(config, where)
    with requires_keys(family.model_type, where):
        return family.features(config)


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """Returns {name: contents of config.json} of public models, so that a run can be planned without the models'
    files."""
    family_configs = {
        name: {"model_type": family.model_type, **config}
        for family in families().values()
        for name, config in family.known.items()
    }
    return read_yaml(Path(__file__).with_name("known.yaml")) | family_configs


def known_sizes(name: str) -> Sizes:
    """Returns the sizes of a public model. Raises KeyError if the name is not in `known()`."""
    return read(known()[name], name)


@lru_cache(maxsize=4096)
def layer_rows(sizes: Sizes, number: int) -> tuple[Row, ...]:
    """Returns the `Row`s (descriptions of Megatron parameters) of layer `number`.

    If a layer has the same parameters as the previous layer, both calls return the same tuple object, so that the code
    that counts parameters can group equal layers.
    """
    rows = tuple(family_of(sizes).layer(sizes, number))
    previous_rows = layer_rows(sizes, number - 1) if number else rows
    return previous_rows if previous_rows == rows else rows


@lru_cache(maxsize=256)
def ends(sizes: Sizes) -> OuterRows:
    """Returns the `Row`s (descriptions of Megatron parameters) of the embedding, the final norm, and the output layer
    or the head that replaces the output layer."""
    first, last = family_of(sizes).ends(sizes)
    if sizes.head is not None:
        last = [*(row for row in last if row.name != blocks.OUTPUT), blocks.head(sizes)]
    return OuterRows(first, last)


@cache
def _table() -> dict[str, Family]:
    """Returns the mutable dict {model_type: registered family}. The dict is created once per process with the built-in
    families, and `add` inserts further families."""
    names = sorted(module.name for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."))
    parts = [vars(importlib.import_module(name)) for name in names if name != __name__]
    return {part["FAMILY"].model_type: part["FAMILY"] for part in parts if "FAMILY" in part}


def _named(config: Mapping[str, Any], where: str) -> Family:
    """Returns the model family for the model_type in the contents of a config.json. Raises ConfigError if no registered
    family has this model_type."""
    kind: Any = config.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        raise ConfigError(
            f"{where}: model_type {kind!r} is not supported; supported are {', '.join(families())}, and families of "
            "your own that `families` names in a config, --family in a conversion"
        )
    return families()[kind]
