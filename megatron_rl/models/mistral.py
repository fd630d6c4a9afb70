"""Mistral 7B and models of the same architecture, if they have no sliding window shorter than their context.

Older chat templates refuse a system message. All of them refuse two consecutive messages of the same role.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.family import Family, windowless
from megatron_rl.models.sizes import Sizes


class Mistral(Family):
    """The Mistral family: Llama, with a `sliding_window` that takes effect whenever it is set."""

    model_type = "mistral"

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes. Raises ConfigError as the base class does, and for a window shorter than the context."""
        windowless(config, where)
        return super().read(config, where)


FAMILY = Mistral()
