"""OLMo 2: base and instruct models of 1B to 32B.

Its tokenizer puts nothing before a text. One token, <|endoftext|>, both begins a rendered dialogue and ends a turn of
the assistant: a dialogue is tokenized without special tokens, and the first of its tokens does not end it.
"""

from collections.abc import Sequence
from typing import Any

from megatron_rl.models import blocks
from megatron_rl.models.family import Family, dims
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Features, Sizes


def _olmo(numbers: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Returns a config.json's keys, which differ in `numbers` alone. Sources: allenai/OLMo's configs/official-1124
    (7B) and allenai/OLMo-core's TransformerConfig.olmo2_32B, fairseq2's models/olmo2/config.py (1B, 7B, 13B)."""
    return dims(numbers, vocab=100352, rms_norm_eps=1e-6, rope_theta=500_000.0, max_position_embeddings=4096)


class Olmo2(Family):
    """Norms behind attention and feed-forward and none before them; queries and keys are normed over all heads."""

    model_type = "olmo2"
    common = Features(norm_eps=1e-5, norms_before=False, norms_after=True, qk_norm_joint=True)
    known = {
        "olmo-2-1b": _olmo((16, 2048, 16, 16, 8192)),
        "olmo-2-7b": _olmo((32, 4096, 32, 32, 11008)),
        "olmo-2-13b": _olmo((40, 5120, 40, 40, 13824)),
        "olmo-2-32b": _olmo((64, 5120, 40, 8, 27648)),
    }

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of a layer: its norms stand where core adds residuals."""
        width = sizes.hidden
        return [
            *blocks.attention(sizes, norm_before=False, joint_norms=True),
            blocks.norm("self_attn_bda.weight", "post_attention_layernorm.weight", width),
            *blocks.gated("mlp", "mlp", sizes.ffn, width),
            blocks.norm("mlp_bda.weight", "post_feedforward_layernorm.weight", width),
        ]


FAMILY = Olmo2()
