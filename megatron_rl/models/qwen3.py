"""Dense Qwen3 models.

The chat template opens a thinking block, as its `enable_thinking` option says. The template removes the thinking of
earlier turns when a dialogue is rendered again.
"""

from megatron_rl.models.family import Family
from megatron_rl.models.sizes import Features


class Qwen3(Family):
    """The Qwen3 family: Llama with norms of queries and keys per head."""

    model_type = "qwen3"
    common = Features(qk_norm=True)


FAMILY = Qwen3()
