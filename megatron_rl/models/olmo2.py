"""OLMo 2: base and instruct models of 1B to 32B.

Its tokenizer puts nothing before a text. One token, <|endoftext|>, both begins a rendered dialogue and ends a turn of
the assistant: a dialogue is tokenized without special tokens, and the first of its tokens does not end it.
"""

from collections.abc import Sequence

from megatron_rl.models import blocks
from megatron_rl.models.family import Family
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Features, Sizes


class Olmo2(Family):
    """Norms behind attention and feed-forward and none before them; queries and keys are normed over all heads."""

    model_type = "olmo2"
    common = Features(norm_eps=1e-5, norms_before=False, norms_after=True, qk_norm_joint=True)

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
