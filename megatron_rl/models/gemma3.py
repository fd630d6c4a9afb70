"""Gemma 3, text only: the 270M and 1B models, and text-only versions of the larger models.

Both the tokenizer and the chat template add <bos>. Therefore a rendered dialogue must be tokenized without special
tokens. Without <bos> the models hardly work. Instruct models end a turn with <end_of_turn>, and base models end a text
with <eos>. The chat template has no system turn: it puts the system message before the first user message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.models import blocks
from megatron_rl.models.family import Family
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import AttentionKind, Features, Rotary, Sizes

WINDOWED, WHOLE = "sliding_attention", "full_attention"  # values of layer_types in config.json
PERIOD = 6  # default of sliding_window_pattern: every sixth layer has no sliding window
DEFAULTS: Mapping[str, Any] = {  # the transformers library's defaults for keys that a config.json may lack
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


class Gemma3(Family):
    """The Gemma 3 family: norms before and after attention and feed-forward, GELU as activation of the gate, sliding
    windows, scaled embeddings."""

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
        """Returns the sizes of the model described by a config.json, with transformers' defaults for missing keys.
        Raises KeyError if a key without a default is missing."""
        return super().sizes({**DEFAULTS, **config})

    def features(self, config: Mapping[str, Any]) -> Features:
        """Returns the features of the model described by a config.json. The layers have two kinds of attention, each
        with a separate rotary embedding."""
        settings = {**DEFAULTS, **config}
        layers, period = int(settings["num_hidden_layers"]), int(settings.get("sliding_window_pattern") or PERIOD)
        types = settings.get("layer_types") or [WHOLE if (i + 1) % period == 0 else WINDOWED for i in range(layers)]
        return replace(
            super().features(settings),
            softmax_scale=float(settings["query_pre_attn_scalar"]) ** -0.5,
            embedding_scale=float(settings["hidden_size"]) ** 0.5,
            pattern=tuple((WINDOWED, WHOLE).index(word) for word in types),
        )

    def kinds(self, config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
        """Returns (attention of the layers with a sliding window, attention of the layers without a window).

        A config.json of an older transformers version has two keys for the two rotary bases (rope_local_base_freq and
        rope_theta), and the key rope_scaling, which applies only to layers without a window.
        """
        rope = config.get("rope_parameters") or {
            WINDOWED: {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
            WHOLE: {"rope_theta": config.get("rope_theta", 1_000_000.0), **(config.get("rope_scaling") or {})},
        }
        near, far = (Rotary.read({"rope_parameters": rope[word]}) for word in (WINDOWED, WHOLE))
        return (
            AttentionKind(rotary=near, window=config["sliding_window"], layer_type=WINDOWED),
            AttentionKind(rotary=far, layer_type=WHOLE),
        )

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of layer `number`. In Megatron's names, the norms after attention and feed-forward
        belong to the residual modules (*_bda)."""
        width = sizes.hidden
        return [
            *blocks.attention(sizes, head_norms=True),
            blocks.norm("self_attn_bda.weight", "post_attention_layernorm.weight", width),
            *blocks.feed_forward(sizes, norm_name="pre_feedforward_layernorm.weight"),
            blocks.norm("mlp_bda.weight", "post_feedforward_layernorm.weight", width),
        ]


FAMILY = Gemma3()
