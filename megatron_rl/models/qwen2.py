"""Qwen2 and Qwen2.5.

Base models end with <|endoftext|>, and instruct models end a turn with <|im_end|>, which base models' tokenizers have
too: a base model that is sampled through its chat template does not stop by itself unless <|im_end|> is among the ends.
The padding token is <|endoftext|>, which base models write as their end: it must not be masked by its number.
"""

from megatron_rl.models.family import SETTLED, Family
from megatron_rl.models.sizes import Features


class Qwen2(Family):
    """Llama with a bias on query, key and value."""

    model_type = "qwen2"
    settled = {key: value for key, value in SETTLED.items() if key != "attention_bias"} | {"qkv_bias": True}
    common = Features(qkv_bias=True)


FAMILY = Qwen2()
