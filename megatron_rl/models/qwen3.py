"""Qwen3, dense.

Its chat template opens a thinking part by itself: `enable_thinking` of the template decides, and a dialogue's earlier
turns lose their thoughts when they are rendered again.
"""

from megatron_rl.models.family import Family
from megatron_rl.models.sizes import Features


class Qwen3(Family):
    """Llama with norms of queries and keys, head by head."""

    model_type = "qwen3"
    common = Features(qk_norm=True)


FAMILY = Qwen3()
