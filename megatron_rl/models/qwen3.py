"""Qwen3, dense.

Its chat template opens a thinking part by itself: `enable_thinking` of the template decides, and a dialogue's earlier
turns lose their thoughts when they are rendered again.
"""

from megatron_rl.models.family import Family, dims
from megatron_rl.models.sizes import Features


class Qwen3(Family):
    """Llama with norms of queries and keys, head by head."""

    model_type = "qwen3"
    common = Features(qk_norm=True)
    known = {
        "qwen3-0.6b": dims((28, 1024, 16, 8, 3072), vocab=151936, tied=True, head_dim=128),
        "qwen3-1.7b": dims((28, 2048, 16, 8, 6144), vocab=151936, tied=True, head_dim=128),
        "qwen3-4b": dims((36, 2560, 32, 8, 9728), vocab=151936, tied=True, head_dim=128),
        "qwen3-8b": dims((36, 4096, 32, 8, 12288), vocab=151936, head_dim=128),
        "qwen3-14b": dims((40, 5120, 40, 8, 17408), vocab=151936, head_dim=128),
        "qwen3-32b": dims((64, 5120, 64, 8, 25600), vocab=151936, head_dim=128),
    }


FAMILY = Qwen3()
