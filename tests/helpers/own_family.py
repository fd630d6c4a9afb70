"""A model family in a package of a user's own: Seed-OSS, Llama with a bias on query, key and value."""

from megatron_rl.models.family import SETTLED, Family
from megatron_rl.models.sizes import Features

_36B = {
    "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 80, "num_key_value_heads": 8,
    "intermediate_size": 27648, "vocab_size": 155136, "head_dim": 128,
}  # fmt: skip


class SeedOss(Family):
    """Its config.json spells the biases out: one key for query, key and value, one for the projection back."""

    model_type = "seed_oss"
    settled = {**SETTLED, "attention_bias": True, "attention_out_bias": False}
    common = Features(qkv_bias=True)
    known = {"seed-oss-36b": _36B}


class Twin(SeedOss):
    """A family with the name of one that is there."""

    model_type = "qwen2"


FAMILY = SeedOss()
TWIN = Twin()
NOTHING = 3
