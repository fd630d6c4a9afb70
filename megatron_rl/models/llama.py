"""Llama 2 and 3, and models of the same shape that name its model_type: SmolLM2.

Base models of Llama 3 end with <|end_of_text|>, instruct models end a turn with <|eot_id|>: generation_config.json
lists both. The tokenizer puts <|begin_of_text|> before a text, and the chat template writes it too: a rendered dialogue
is tokenized without special tokens, or it begins with two.
"""

from megatron_rl.models.family import Family, dims

_8B = dims((32, 4096, 32, 8, 14336), vocab=128256)
_70B = dims((80, 8192, 64, 8, 28672), vocab=128256)


class Llama(Family):
    """The family that all defaults are of."""

    model_type = "llama"
    known = {
        "llama3-8b": _8B,
        "llama3-70b": _70B,
        "llama-3.2-1b": dims((16, 2048, 32, 8, 8192), vocab=128256, tied=True),
        "llama-3.2-3b": dims((28, 3072, 24, 8, 8192), vocab=128256, tied=True),
        "llama-3.1-8b": _8B,
        "llama-3.1-70b": _70B,
        "smollm2-135m": dims((30, 576, 9, 3, 1536), vocab=49152, tied=True),
        "smollm2-360m": dims((32, 960, 15, 5, 2560), vocab=49152, tied=True),
        "smollm2-1.7b": dims((24, 2048, 32, 32, 8192), vocab=49152, tied=True),
    }


FAMILY = Llama()
