"""Mixtral 8x7B and 8x22B: Mistral with experts in every layer. Routing probabilities are always renormalised."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.models import blocks
from megatron_rl.models.family import EVERY_LAYER, KEYS, SETTLED, Family, windowless
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Routing, Sizes


class Mixtral(Family):
    """The Mixtral family. In config.json, intermediate_size is the width of an expert. In Hugging Face files, the
    module with router and experts is block_sparse_moe."""

    model_type = "mixtral"
    keys = {**KEYS, "expert_ffn": "intermediate_size"}
    settled = {**SETTLED, **EVERY_LAYER}
    has_experts = True

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes of the model that a config.json describes. Raises ConfigError if a key is missing or its
        value is not supported, for example a sliding window that is shorter than the maximum context."""
        windowless(config, where)
        return super().read(config, where)

    def routing(self, config: Mapping[str, Any]) -> Routing:
        """Returns how the routers choose experts. Renormalisation of the chosen experts' probabilities is not read from
        config.json, because every Mixtral model renormalises and the file has no key for it."""
        return Routing(chosen=int(config["num_experts_per_tok"]), renormalised=True)

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of layer `number`. In Hugging Face files, an expert's gate, up and down projections
        are called w1, w3 and w2."""
        return [*blocks.attention(sizes), *blocks.experts(sizes, module="block_sparse_moe", parts=("w1", "w3", "w2"))]


FAMILY = Mixtral()
