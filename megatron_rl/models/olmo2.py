"""OLMo 2: base and instruct models of 1B to 32B.

The tokenizer adds no special token before a text. The same token, <|endoftext|>, begins a rendered dialogue and ends an
assistant turn. Therefore a dialogue must be tokenized without special tokens, and its first token must not be taken for
an end.
"""

from collections.abc import Sequence

from megatron_rl.models import blocks
from megatron_rl.models.family import Family
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Features, Sizes


class Olmo2(Family):
    """The OLMo 2 family: norms after attention and feed-forward only; queries and keys are normalised over all heads
    together."""

    model_type = "olmo2"
    common = Features(norm_eps=1e-5, norms_before=False, norms_after=True, qk_norm_joint=True)

    def layer(self, sizes: Sizes, number: int) -> Sequence[Row]:
        """Returns the parameters of layer `number`. In Megatron's names, the layer's norms belong to the residual
        modules (*_bda)."""
        width = sizes.hidden
        return [
            *blocks.attention(sizes, norm_before=False, joint_norms=True),
            blocks.norm("self_attn_bda.weight", "post_attention_layernorm.weight", width),
            *blocks.gated("mlp", "mlp", sizes.ffn, width),
            blocks.norm("mlp_bda.weight", "post_feedforward_layernorm.weight", width),
        ]


FAMILY = Olmo2()
