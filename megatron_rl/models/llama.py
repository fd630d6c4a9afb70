"""Llama 2 and 3, and models of the same architecture and model_type, such as SmolLM2.

Base models of Llama 3 end with <|end_of_text|>, and instruct models end a turn with <|eot_id|>. generation_config.json
lists both. Both the tokenizer and the chat template add <|begin_of_text|>. Therefore a rendered dialogue must be
tokenized without special tokens. Otherwise it begins with <|begin_of_text|> twice.
"""

from megatron_rl.models.family import Family


class Llama(Family):
    """The Llama family, which uses all defaults of the base class Family."""

    model_type = "llama"


FAMILY = Llama()
