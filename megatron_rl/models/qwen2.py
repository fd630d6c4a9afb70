"""Qwen2 and Qwen2.5.

Base models end a text with <|endoftext|>, and instruct models end a turn with <|im_end|>. The tokenizers of base models
have <|im_end|> too. A base model that is sampled through its chat template only stops if <|im_end|> is among its stop
tokens. The padding token is <|endoftext|>, which base models also generate as the end of a text. Therefore padding must
not be masked by token id.
"""

from megatron_rl.models.family import SETTLED, Family
from megatron_rl.models.sizes import Features


class Qwen2(Family):
    """The Qwen2 family: Llama with a bias on query, key and value."""

    model_type = "qwen2"
    settled = {key: value for key, value in SETTLED.items() if key != "attention_bias"} | {"qkv_bias": True}
    common = Features(qkv_bias=True)


FAMILY = Qwen2()
