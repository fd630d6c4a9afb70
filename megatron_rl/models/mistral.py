"""Mistral 7B and models of the same architecture, if they have no sliding window shorter than their context.

Older chat templates refuse a system message. All Mistral chat templates refuse two consecutive messages of the same
role.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.family import Family, windowless
from megatron_rl.models.sizes import Sizes


class Mistral(Family):
    """The Mistral family: Llama, with a `sliding_window` in config.json that takes effect whenever it is not null."""

    model_type = "mistral"

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes of the model that a config.json describes. Raises ConfigError if a key is missing or its
        value is not supported, for example a sliding window that is shorter than the maximum context."""
        windowless(config, where)
        return super().read(config, where)


FAMILY = Mistral()
