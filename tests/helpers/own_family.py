"""A model family in a package of a user's own: Seed-OSS, Llama with a bias on query, key and value."""

from megatron_rl.models.family import SETTLED, Family, dims
from megatron_rl.models.sizes import Features

_36B = dims((64, 5120, 80, 8, 27648), vocab=155136, head_dim=128)


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
