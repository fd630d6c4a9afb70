"""Registers user-defined model families inside an engine's server, whose process reads no config."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_rl.models import registry

# Name of the server's environment variable with model families: package.module:FAMILY, separated by spaces.
VARIABLE = "MEGATRON_RL_FAMILIES"


def variables(targets: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables that make a server know the user-defined model `families` of a config."""
    return {VARIABLE: " ".join(targets)} if targets else {}


def learn() -> None:
    """Registers the user-defined model families that this process's environment names. Raises ConfigError, a
    ValueError, if a family cannot be imported.
    """
    registry.add(os.environ.get(VARIABLE, "").split(), VARIABLE)
