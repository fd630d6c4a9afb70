"""Mistral 7B and models of its shape, without a sliding window within their context.

Its chat template refuses a system's message in older versions, and two messages of one speaker in a row in all.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.family import Family, windowless
from megatron_rl.models.sizes import Sizes


class Mistral(Family):
    """Llama with a `sliding_window` that takes effect without a switch."""

    model_type = "mistral"

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes. Raises ConfigError as the base does, and for a window shorter than the context."""
        windowless(config, where)
        return super().read(config, where)


FAMILY = Mistral()
