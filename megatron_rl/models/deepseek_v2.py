"""DeepSeek-V2 and V2-Lite: latent attention, leading dense layers, shared experts without a gate.

Both the tokenizer and the chat template add the begin-of-sentence token. Therefore a rendered dialogue must be
tokenized without special tokens. A turn ends with the end-of-sentence token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.models import blocks
from megatron_rl.models.family import KEYS, SETTLED, Family
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Features, Routing, Sizes

LATENT = {  # field of Sizes -> key of config.json
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
NOPE = "qk_nope_head_dim"  # config.json key for the number of elements of a head's query and key that are not rotated
EVERYWHERE: Mapping[str, Any] = {**SETTLED, "moe_layer_freq": 1}


def check_quantisation(config: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if the files are quantised in another format than the 8-bit format of DeepSeek-V3's files.
    Weights in this 8-bit format are converted to bfloat16 when the files are read."""
    quant = config.get("quantization_config") or {}
    if quant and (quant.get("quant_method"), quant.get("weight_block_size")) != ("fp8", [128, 128]):
        raise ConfigError(
            f"{where}: quantization_config = {quant} is not supported, only quant_method fp8 with weight_block_size "
            "[128, 128] is: take a model that is not quantised"
        )


class DeepseekV2(Family):
    """The DeepSeek-V2 family. Routers use a softmax without renormalisation. In some models, routers choose only among
    the experts of a token's best groups."""

    model_type = "deepseek_v2"
    keys = {
        **KEYS,
        **LATENT,
        "experts": "n_routed_experts",
        "shared_ffn": "n_shared_experts x moe_intermediate_size",
        "dense_layers": "first_k_dense_replace",
    }
    settled = {**EVERYWHERE, "scoring_func": "softmax", "norm_topk_prob": False}
    has_experts = True

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes of the model that a config.json describes. Raises ConfigError if a key is missing or its
        value is not supported, for example the routing method or the number of expert groups."""
        check_quantisation(config, where)
        sizes = super().read(config, where)
        method = config.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(
                f"{where}: topk_method = {method!r} is not supported, greedy and group_limited_greedy are"
            )
        self.check_groups(config, sizes, where)
        return sizes

    def check_groups(self, config: Mapping[str, Any], sizes: Sizes, where: str, *, best: int = 1) -> None:
        """Raises ConfigError if the expert groups do not allow a router to choose enough experts.

        `best`: how many of a group's highest expert scores are summed to the score of the group. A group must have at
        least `best` experts.
        """
        groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
        top_k = int(config.get("num_experts_per_tok") or 1)
        group_size = sizes.experts // groups
        if sizes.experts % groups or group_size < best or not 1 <= chosen <= groups or top_k > group_size * chosen:
            raise ConfigError(
                f"{where}: num_experts_per_tok = {top_k}, but {sizes.experts} experts in n_group = {groups} groups, of "
                f"which a token uses topk_group = {chosen}, do not allow this: n_group must divide the experts "
                f"into groups of {best} or more, and the used groups must have {top_k} experts or more"
            )

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """Returns the sizes in a config.json. The key head_dim is ignored, because its value in some files is the size
        of the rotated part only.

        Raises KeyError if a key is missing.
        """
        sizes = super().sizes({name: value for name, value in config.items() if name != KEYS["head_dim"]})
        latent_sizes = {field: int(config[key] or 0) for field, key in LATENT.items()}
        return replace(
            sizes,
            kv_heads=sizes.heads,
            head_dim=int(config[NOPE]) + latent_sizes["rope_dim"],
            shared_ffn=sizes.expert_ffn * int(config.get("n_shared_experts") or 0),
            dense_layers=min(sizes.num_layers, int(config.get("first_k_dense_replace") or 0)),
            **latent_sizes,
        )

    def key(self, field: str, config: Mapping[str, Any]) -> str:
        """Returns the key of config.json that holds the value of a field of Sizes."""
        return self.keys[field]

    def features(self, config: Mapping[str, Any]) -> Features:
        """Returns the features of the model that a config.json describes. The scale of the attention scores includes
        the factor of YaRN (a scaling of the rotary embedding)."""
        features = super().features(config)
        rotary = features.kinds[0].rotary
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        over = float(rope.get("mscale_all_dim") or 0.0) if rotary.kind != "default" else 0.0
        sharper = 0.1 * over * math.log(rotary.factor) + 1.0 if over and rotary.factor > 1 else 1.0
        head_dim = int(config[NOPE]) + int(config["qk_rope_head_dim"])
        return replace(features, softmax_scale=head_dim**-0.5 * sharper**2)

    def routing(self, config: Mapping[str, Any]) -> Routing:
        """Returns how the routers choose experts. The score of a group of experts is the score of the group's best
        expert."""
        limited = config.get("topk_method") == "group_limited_greedy"
        return Routing(
            chosen=int(config["num_experts_per_tok"]),
            renormalised=False,
            shared_gate=False,
            scale=float(config.get("routed_scaling_factor") or 1.0),
            **(groups_of(config, best=1) if limited else {}),
        )

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of layer `number`. The leading layers are dense, and the other layers have experts."""
        rows = blocks.latent_attention(sizes)
        if not sizes.is_sparse(number):
            return rows + blocks.feed_forward(sizes)
        rows += [*blocks.experts(sizes), *self.beside(sizes)]
        return rows + blocks.shared_expert(sizes, module="mlp.shared_experts", gate=False) if sizes.shared_ffn else rows

    def beside(self, sizes: Sizes) -> Sequence[Row]:
        """Returns the parameters that a router has in addition to its weight: none. Subclasses override this method."""
        return ()


def groups_of(config: Mapping[str, Any], *, best: int) -> dict[str, Any]:
    """Returns values for the fields of Routing that limit a token to some groups of experts, or an empty dict if a
    token may use all groups. `best`: how many of a group's highest expert scores are summed to the score of the
    group."""
    groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    return {"groups": groups, "groups_chosen": chosen, "group_best": best} if chosen < groups else {}


FAMILY: Family = DeepseekV2()
