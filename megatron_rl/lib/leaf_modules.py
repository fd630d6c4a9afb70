"""The door to the leaves: parts of the package without which the others import and train (tests/unit/project)."""

from __future__ import annotations

import importlib
from types import ModuleType

from megatron_rl.config.base import ConfigError


def leaf(name: str, needed_by: str) -> ModuleType:
    """Imports a module of a leaf, such as `planning.schedule`. `needed_by`: the setting or command that needs it.

    Raises ConfigError if this installation lacks the leaf.
    """
    try:
        return importlib.import_module(f"megatron_rl.{name}")
    except ModuleNotFoundError as error:
        if not f"megatron_rl.{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{needed_by} needs {error.name}, which this installation of megatron_rl lacks") from None
