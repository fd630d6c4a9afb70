"""Qwen3-MoE: Qwen3 with experts in every layer. The chat template is the same as in Qwen3."""

from megatron_rl.models.family import EVERY_LAYER, SETTLED
from megatron_rl.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """The Qwen3-MoE family: Qwen3 with experts."""

    model_type = "qwen3_moe"
    settled = {**SETTLED, **EVERY_LAYER}
    has_experts = True


FAMILY = Qwen3Moe()
