"""DeepSeek-V3 and R1: V2 with routers that choose by a sigmoid and a bias. The multi-token prediction layer is left
out.

Public files are quantised to 8 bits (quantization_config) and are converted to bfloat16 when they are read. In these
files, model.layers.61 is the multi-token prediction layer, which is skipped, as in the transformers library. Chat
templates of R1 begin the assistant's turn with <think>. Special tokens are handled as in V2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.models import blocks
from megatron_rl.models.deepseek_v2 import EVERYWHERE, DeepseekV2, check_quantisation, groups_of
from megatron_rl.models.family import Family
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Routing, Sizes

DEFAULTS: Mapping[str, Any] = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}


class DeepseekV3(DeepseekV2):
    """The DeepSeek-V3 family. Routers have a bias per expert. The biases keep their loaded values, because no loss
    trains them."""

    model_type = "deepseek_v3"
    settled = {**EVERYWHERE, "rope_interleave": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes of the model that a config.json describes. Raises ConfigError if a key is missing or its
        value is not supported, for example several experts per token without renormalised scores (norm_topk_prob =
        false)."""
        check_quantisation(config, where)
        sizes = Family.read(self, config, where)
        settings = {**DEFAULTS, **config}
        self.check_groups(settings, sizes, where, best=2)
        if not settings["norm_topk_prob"] and int(settings.get("num_experts_per_tok") or 1) > 1:
            raise ConfigError(
                f"{where}: norm_topk_prob = False with several experts per token is not supported: Megatron-core "
                "makes the chosen sigmoids sum to 1"
            )
        return sizes

    def routing(self, config: Mapping[str, Any]) -> Routing:
        """Returns how the routers choose experts. The score of a group of experts is the sum of the scores of the
        group's two best experts."""
        settings = {**DEFAULTS, **config}
        return Routing(
            chosen=int(settings["num_experts_per_tok"]),
            renormalised=bool(settings["norm_topk_prob"]),
            scores="sigmoid",
            biased=True,
            shared_gate=False,
            scale=float(settings["routed_scaling_factor"]),
            **groups_of(settings, best=2),
        )

    def leaves_out(self, sizes: Sizes, tensor: str) -> bool:
        """Checks whether a tensor of a public checkpoint is not part of the model and can be skipped. These are mainly
        the multi-token prediction layers, which have the layer numbers after the model's layers."""
        ahead = tensor.startswith("model.layers.") and int(tensor.split(".")[2]) >= sizes.num_layers
        return ahead or super().leaves_out(sizes, tensor)

    def beside(self, sizes: Sizes) -> Sequence[Row]:
        """Returns the parameter that a router has in addition to its weight: the expert bias."""
        return (blocks.expert_bias(sizes),)


FAMILY: Family = DeepseekV3()
