"""Llama 2 and 3, and models of the same shape that name its model_type: SmolLM2.

Base models of Llama 3 end with <|end_of_text|>, instruct models end a turn with <|eot_id|>: generation_config.json
lists both. The tokenizer puts <|begin_of_text|> before a text, and the chat template writes it too: a rendered dialogue
is tokenized without special tokens, or it begins with two.
"""

from megatron_rl.models.family import Family


class Llama(Family):
    """The family that all defaults are of."""

    model_type = "llama"


FAMILY = Llama()
