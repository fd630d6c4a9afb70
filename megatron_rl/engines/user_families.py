"""Makes families of a user's own known inside an engine's server, whose process reads no config."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_rl.models import registry

VARIABLE = "MEGATRON_RL_FAMILIES"  # of the server's environment: names like package.module:FAMILY, with spaces between


def variables(targets: Sequence[str]) -> dict[str, str]:
    """Returns what the environment of a server needs, for the config's `families`."""
    return {VARIABLE: " ".join(targets)} if targets else {}


def learn() -> None:
    """Makes the families known that this process's environment names.

    Raises ConfigError, a ValueError, for a name that cannot be imported here.
    """
    registry.add(os.environ.get(VARIABLE, "").split(), VARIABLE)
