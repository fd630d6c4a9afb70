"""DeepSeek-V2 and V2-Lite: attention through a latent, dense layers in front, shared experts without a gate.

The tokenizer puts the begin-of-sentence token before a text, and the chat template writes it too: a rendered dialogue
is tokenized without special tokens. A turn ends with the end-of-sentence token.
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

LATENT = {  # keys of config.json, by the field of Sizes that they give
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
NOPE = "qk_nope_head_dim"  # elements of a head's query and key that are not rotated
EVERYWHERE: Mapping[str, Any] = {**SETTLED, "moe_layer_freq": 1, "quantization_config": None}


class DeepseekV2(Family):
    """Routers choose by a softmax, some of them in the best groups alone, and weigh without making it sum to 1."""

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
        """Returns the sizes. Raises ConfigError as the base does, and for a routing that is not known here."""
        found = super().read(config, where)
        method = config.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(
                f"{where}: topk_method = {method!r} is not supported, greedy and group_limited_greedy are"
            )
        self.check_groups(config, found, where)
        return found

    def check_groups(self, config: Mapping[str, Any], sizes: Sizes, where: str, *, best: int = 1) -> None:
        """Raises ConfigError for groups of experts in which a router could not choose, by the `best` of each."""
        groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
        wanted = int(config.get("num_experts_per_tok") or 1)
        each = sizes.experts // groups
        if sizes.experts % groups or each < best or not 1 <= chosen <= groups or wanted > each * chosen:
            raise ConfigError(
                f"{where}: n_group = {groups} with topk_group = {chosen} does not hold num_experts_per_tok = {wanted} "
                f"of {sizes.experts} experts: give groups of {best} or more that divide the experts, and enough of them"
            )

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """Returns the sizes in a config.json. Its head_dim is not looked at: some files give that of the rotated part.

        Raises KeyError for a key that is missing.
        """
        found = super().sizes({name: value for name, value in config.items() if name != KEYS["head_dim"]})
        told = {field: int(config[key] or 0) for field, key in LATENT.items()}
        return replace(
            found,
            kv_heads=found.heads,
            head_dim=int(config[NOPE]) + told["rope_dim"],
            shared_ffn=found.expert_ffn * int(config.get("n_shared_experts") or 0),
            dense_layers=min(found.num_layers, int(config.get("first_k_dense_replace") or 0)),
            **told,
        )

    def key(self, field: str, config: Mapping[str, Any]) -> str:
        """Returns the key of config.json that gives a field of Sizes."""
        return self.keys[field]

    def features(self, config: Mapping[str, Any]) -> Features:
        """Returns the features, with the scale of attention's scores that YaRN sharpens."""
        found = super().features(config)
        rotary = found.kinds[0].rotary
        told = config.get("rope_parameters") or config.get("rope_scaling") or {}
        over = float(told.get("mscale_all_dim") or 0.0) if rotary.kind != "default" else 0.0
        sharper = 0.1 * over * math.log(rotary.factor) + 1.0 if over and rotary.factor > 1 else 1.0
        head_dim = int(config[NOPE]) + int(config["qk_rope_head_dim"])
        return replace(found, softmax_scale=head_dim**-0.5 * sharper**2)

    def routing(self, config: Mapping[str, Any]) -> Routing:
        """Returns how its routers choose. A group is as good as its best expert."""
        limited = config.get("topk_method") == "group_limited_greedy"
        return Routing(
            chosen=int(config["num_experts_per_tok"]),
            renormalised=False,
            shared_gate=False,
            scale=float(config.get("routed_scaling_factor") or 1.0),
            **(groups_of(config, best=1) if limited else {}),
        )

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of a layer: a dense one in front, else one with experts."""
        rows = blocks.latent_attention(sizes)
        if not sizes.is_sparse(number):
            return rows + blocks.feed_forward(sizes)
        rows += [*blocks.experts(sizes), *self.beside(sizes)]
        return rows + blocks.shared_expert(sizes, module="mlp.shared_experts", gate=False) if sizes.shared_ffn else rows

    def beside(self, sizes: Sizes) -> Sequence[Row]:
        """Returns the further parameters of a router."""
        return ()


def groups_of(config: Mapping[str, Any], *, best: int) -> dict[str, Any]:
    """Returns the fields of Routing for groups of experts; none where a token may see all groups."""
    groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    return {"groups": groups, "groups_chosen": chosen, "group_best": best} if chosen < groups else {}


FAMILY: Family = DeepseekV2()
