"""Gemma 3, text only: the 270M and 1B models, and text models made of the larger ones.

The tokenizer puts <bos> before a text, and the chat template writes it too: a rendered dialogue is tokenized without
special tokens. The models hardly work without it. Instruct models end a turn with <end_of_turn>, base models a text
with <eos>. The template has no system's turn of its own: it puts the system's message before the first user's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.models import blocks
from megatron_rl.models.family import Family
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import AttentionKind, Features, Rotary, Sizes

WINDOWED, WHOLE = "sliding_attention", "full_attention"  # config.json's words
PERIOD = 6  # of layers the last of so many sees the whole text
DEFAULTS: Mapping[str, Any] = {  # of transformers, for keys that a config.json may leave out
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


class Gemma3(Family):
    """Norms before and after attention and feed-forward, a GELU gate, windows in most layers, scaled embeddings."""

    model_type = "gemma3_text"
    settled = {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    common = Features(norm_from_one=True, norms_after=True, activation="gelu_tanh", qk_norm=True)

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """Returns the sizes, with transformers' defaults. Raises KeyError for a key that is missing."""
        return super().sizes({**DEFAULTS, **config})

    def features(self, config: Mapping[str, Any]) -> Features:
        """Returns the features: two kinds of attention, each with a rotary embedding of its own."""
        told = {**DEFAULTS, **config}
        layers, period = int(told["num_hidden_layers"]), int(told.get("sliding_window_pattern") or PERIOD)
        types = told.get("layer_types") or [WHOLE if (i + 1) % period == 0 else WINDOWED for i in range(layers)]
        return replace(
            super().features(told),
            softmax_scale=float(told["query_pre_attn_scalar"]) ** -0.5,
            embedding_scale=float(told["hidden_size"]) ** 0.5,
            pattern=tuple((WINDOWED, WHOLE).index(word) for word in types),
        )

    def kinds(self, config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
        """Returns what layers with a window and layers without see.

        Older files have one key for each base, and their rope_scaling is that of layers without a window.
        """
        told = config.get("rope_parameters") or {
            WINDOWED: {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
            WHOLE: {"rope_theta": config.get("rope_theta", 1_000_000.0), **(config.get("rope_scaling") or {})},
        }
        near, far = (Rotary.read({"rope_parameters": told[word]}) for word in (WINDOWED, WHOLE))
        return (
            AttentionKind(rotary=near, window=config["sliding_window"], layer_type=WINDOWED),
            AttentionKind(rotary=far, layer_type=WHOLE),
        )

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of a layer: the norms after its two parts stand where core adds residuals."""
        width = sizes.hidden
        return [
            *blocks.attention(sizes, head_norms=True),
            blocks.norm("self_attn_bda.weight", "post_attention_layernorm.weight", width),
            *blocks.feed_forward(sizes, before="pre_feedforward_layernorm.weight"),
            blocks.norm("mlp_bda.weight", "post_feedforward_layernorm.weight", width),
        ]


FAMILY = Gemma3()
