"""Qwen2 and Qwen2.5.

Base models end with <|endoftext|>, and instruct models end a turn with <|im_end|>, which base models' tokenizers have
too: a base model that is sampled through its chat template does not stop by itself unless <|im_end|> is among the ends.
The padding token is <|endoftext|>, which base models write as their end: it must not be masked by its number.
"""

from megatron_rl.models.family import SETTLED, Family, dims
from megatron_rl.models.sizes import Features


class Qwen2(Family):
    """Llama with a bias on query, key and value."""

    model_type = "qwen2"
    settled = {key: value for key, value in SETTLED.items() if key != "attention_bias"} | {"qkv_bias": True}
    common = Features(qkv_bias=True)
    known = {
        "qwen2.5-0.5b": dims((24, 896, 14, 2, 4864), vocab=151936, tied=True),
        "qwen2.5-1.5b": dims((28, 1536, 12, 2, 8960), vocab=151936, tied=True),
        "qwen2.5-3b": dims((36, 2048, 16, 2, 11008), vocab=151936, tied=True),
        "qwen2.5-7b": dims((28, 3584, 28, 4, 18944), vocab=152064),
        "qwen2.5-14b": dims((48, 5120, 40, 8, 13824), vocab=152064),
        "qwen2.5-32b": dims((64, 5120, 40, 8, 27648), vocab=152064),
        "qwen2.5-72b": dims((80, 8192, 64, 8, 29568), vocab=152064),
    }


FAMILY = Qwen2()
