"""gpt-oss 20b and 120b: attention sinks, sliding windows in every second layer, experts with biases and clamped gates.

Published experts are quantised (MXFP4) and are converted to bfloat16 when the files are read. Files hold all experts in
one tensor, transposed. In this project every expert has separate tensors, with names that only this project uses:
gate_up_proj [2 f, h], down_proj [h, f] and their biases. The rows of gate_up_proj alternate between gate and up, as in
the files, in vLLM and in the trainer. The chat template writes channels (analysis, final), which
`response_forms` reads, and starts a dialogue with a system turn. Generation ends with <|return|>.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.models import blocks
from megatron_rl.models.family import KEYS, Family
from megatron_rl.models.partitions import ByColumns, ByRows, Partition, Whole
from megatron_rl.models.rows import EXPERT, OuterRows, Row
from megatron_rl.models.sizes import ALPHA, CLAMP, AttentionKind, Features, Rotary, Routing, Sizes

KINDS = ("sliding_attention", "full_attention")  # values of layer_types in config.json


class GptOss(Family):
    """The gpt-oss family. In config.json, intermediate_size is the width of an expert."""

    model_type = "gpt_oss"
    keys = {**KEYS, "expert_ffn": "intermediate_size"}
    settled = {"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": ALPHA, "swiglu_limit": CLAMP}
    has_experts = True
    common = Features(norm_eps=1e-5, activation="clamped_silu", qkv_bias=True, bias=True, sinks=True)

    def read(self, config: Mapping[str, Any], where: str = "config.json") -> Sizes:
        """Returns the sizes of the model that a config.json describes. Raises ConfigError if a key is missing or its
        value is not supported, for example files that are quantised in another format than MXFP4."""
        method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise ConfigError(f"{where}: quantization_config with quant_method {method!r} is not supported, mxfp4 is")
        return super().read(config, where)

    def features(self, config: Mapping[str, Any]) -> Features:
        """Returns the features of the model described by a config.json. The first layer and every second layer after it
        have a sliding window. Raises ConfigError if `layer_types` in config.json says otherwise, because vLLM ignores
        this key."""
        pattern = tuple(i % 2 for i in range(int(config["num_hidden_layers"])))
        types = [KINDS[kind] for kind in pattern]
        if (config.get("layer_types") or types) != types:
            raise ConfigError(f"layer_types = {config['layer_types']!r} is not supported, only {types!r} is")
        return replace(super().features(config), pattern=pattern)

    def kinds(self, config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
        """Returns the two kinds of attention, with and without a sliding window. They have the same rotary
        embedding."""
        return tuple(AttentionKind(rotary=Rotary.read(config), window=w) for w in (config.get("sliding_window"), None))

    def routing(self, config: Mapping[str, Any]) -> Routing:
        """Returns how the routers choose experts: the scores are a softmax over the chosen experts."""
        return Routing(chosen=int(config["num_experts_per_tok"]), renormalised=True)

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of layer `number`. In engines, the attention module is named `attn`."""
        width, hidden, count, router = sizes.expert_ffn, sizes.hidden, sizes.experts, "mlp.router."
        rows = [
            *blocks.attention(sizes, bias=True),
            blocks.single("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (hidden, 1), Whole()),
            blocks.single(
                "self_attention.core_attention.softmax_offset", "self_attn.sinks", (sizes.heads, 1), ByRows()
            ),
            blocks.norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
            blocks.single(router + "weight", router + "weight", (count, hidden), Whole()),
            blocks.single(router + "bias", router + "bias", (count, 1), Whole()),
            _experts(sizes, "linear_fc1.weight", "gate_up_proj", (2 * width, hidden), ByRows(), "w13_weight"),
            _experts(sizes, "linear_fc1.bias", "gate_up_proj_bias", (2 * width, 1), ByRows(), "w13_bias"),
            _experts(sizes, "linear_fc2.weight", "down_proj", (hidden, width), ByColumns(), "w2_weight"),
            _experts(sizes, "linear_fc2.bias", "down_proj_bias", (hidden, 1), Whole(), "w2_bias"),
        ]
        return [replace(row, engine=row.engine and row.engine.replace("self_attn.", "attn.")) for row in rows]

    def ends(self, sizes: Sizes) -> OuterRows:
        """Returns the `Row`s (descriptions of Megatron parameters) of the embedding, the final norm and the output
        layer. Engines name the embedding module `embedding`."""
        (embedding,), last = blocks.ends(sizes)
        return OuterRows(first=(replace(embedding, engine="model.embedding.weight"),), last=last)


def _experts(sizes: Sizes, name: str, tensor: str, shape: tuple[int, int], partition: Partition, engine: str) -> Row:
    """Returns the `Row` (description of a Megatron parameter) for one parameter of every expert."""
    return blocks.single(
        f"mlp.experts.local_experts.{EXPERT}.{name}", f"mlp.experts.{EXPERT}.{tensor}", shape, partition,
        fused=f"mlp.experts.{name}{EXPERT}", engine=f"mlp.experts.{engine}", in_memory=f"mlp.experts.{tensor}",
        experts=sizes.experts, stacked=True,
    )  # fmt: skip


FAMILY = GptOss()
