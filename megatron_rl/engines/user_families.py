"""Registers user-defined model families inside an engine's server, whose process reads no config."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_rl.models import registry

# Environment variable of the server: names such as package.module:FAMILY, separated by spaces.
VARIABLE = "MEGATRON_RL_FAMILIES"


def variables(targets: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables of a server for the config's `families`."""
    return {VARIABLE: " ".join(targets)} if targets else {}


def learn() -> None:
    """Registers the model families that this process's environment names.

    Raises ConfigError, a ValueError, if a name cannot be imported.
    """
    registry.add(os.environ.get(VARIABLE, "").split(), VARIABLE)
