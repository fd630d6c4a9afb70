"""Finds the families, by listing the files of this folder, and reads config.json with the family that it names.

Families of a user's own, in a package of their own, are added by name (`add`).
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
from megatron_rl.models.family import Family
from megatron_rl.models.rows import OuterRows, Row
from megatron_rl.models.sizes import Features, Sizes


def families() -> Mapping[str, Family]:
    """Returns {model_type: family} of every file of megatron_rl/models/ that has a FAMILY, and of those added."""
    return _table()


def add(targets: Sequence[str], setting: str) -> None:
    """Makes families known in this process that are named `package.module:NAME`, as plug-ins are.

    Like an import this is for the life of the process, and doing it again changes nothing. `setting` is where the
    names stand, for the message. Raises ConfigError for a name that is no family, and for a model_type that another
    family has.
    """
    for target in targets:
        try:
            found = plugins.find(target)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error
        if not isinstance(found, Family) or not hasattr(found, "model_type"):
            raise ConfigError(
                f"{setting}: {target} is a {type(found).__name__}: name an instance of a subclass of "
                f"{Family.__module__}:{Family.__name__} that has a model_type"
            )
        there = _table().setdefault(found.model_type, found)
        if there is not found:
            raise ConfigError(
                f"{setting}: {target} has the model_type {found.model_type!r}, which the family in "
                f"{type(there).__module__} has already: give it another one"
            )


def family_of(sizes: Sizes) -> Family:
    """Returns the family of a model."""
    return families()[sizes.family]


def read(config: Mapping[str, Any], where: str = "config.json") -> Sizes:
    """Reads the contents of a config.json. Raises ConfigError, with the key, for what is missing or unsupported."""
    return _named(config, where).read(config, where)


def features(config: Mapping[str, Any], where: str = "config.json") -> Features:
    """Returns the features in the contents of a config.json. Raises ConfigError, with the key, for what is missing."""
    family = _named(config, where)
    try:
        return family.features(config)
    except KeyError as error:
        raise ConfigError(f"{where}: {error} is missing, which a {family.model_type} model must have") from None


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """Returns {name: contents of config.json} of public models, to plan with them without their files."""
    own = {
        name: {"model_type": family.model_type, **config}
        for family in families().values()
        for name, config in family.known.items()
    }
    return read_yaml(Path(__file__).with_name("known.yaml")) | own


def known_sizes(name: str) -> Sizes:
    """Returns the sizes of a public model. Raises KeyError for a name that is not `known`."""
    return read(known()[name], name)


@lru_cache(maxsize=4096)
def layer_rows(sizes: Sizes, number: int) -> tuple[Row, ...]:
    """Returns the parameters of layer `number`.

    A layer like the one before gives the same tuple object, so that counting can take equal layers together.
    """
    rows = tuple(family_of(sizes).layer(sizes, number))
    before = layer_rows(sizes, number - 1) if number else rows
    return before if before == rows else rows


@lru_cache(maxsize=256)
def ends(sizes: Sizes) -> OuterRows:
    """Returns the parameters outside of the layers."""
    return family_of(sizes).ends(sizes)


@cache
def _table() -> dict[str, Family]:
    """Returns the families that this process knows: one dict for its life, as sys.modules is of modules."""
    names = sorted(found.name for found in pkgutil.iter_modules(models.__path__, f"{models.__name__}."))
    parts = [vars(importlib.import_module(name)) for name in names if name != __name__]
    return {part["FAMILY"].model_type: part["FAMILY"] for part in parts if "FAMILY" in part}


def _named(config: Mapping[str, Any], where: str) -> Family:
    """Returns the family of a config.json. Raises ConfigError for another model."""
    kind: Any = config.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        raise ConfigError(
            f"{where}: model_type {kind!r} is not supported; supported are {', '.join(families())}, and families of "
            "your own that `families` names in a config, --family in a conversion"
        )
    return families()[kind]
