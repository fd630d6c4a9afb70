"""Registers user-defined model families in the process of an engine's server. The families are passed in an environment
variable, because this process reads no config.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_rl.models import registry

# Name of the environment variable with the model families, each as package.module:FAMILY, separated by spaces.
VARIABLE = "MEGATRON_RL_FAMILIES"


def variables(targets: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables that pass user-defined model families to a server. `targets`: the setting
    `families` of a config, each as package.module:FAMILY.
    """
    return {VARIABLE: " ".join(targets)} if targets else {}


def learn() -> None:
    """Registers the user-defined model families that this process's environment names. Raises ConfigError (a subclass
    of ValueError) if a family cannot be imported.
    """
    registry.add(os.environ.get(VARIABLE, "").split(), VARIABLE)
