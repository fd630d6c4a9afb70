"""Qwen1.5-MoE and Qwen2-MoE: experts in every layer, and a shared expert that processes every token.

Stop and padding tokens are the same as in Qwen2.
"""

from megatron_rl.models.family import EVERY_LAYER, Family
from megatron_rl.models.qwen2 import Qwen2


class Qwen2Moe(Qwen2):
    """The Qwen2-MoE family: Qwen2 with experts and with a shared expert whose output is scaled by a gate."""

    model_type = "qwen2_moe"
    settled = {**Qwen2.settled, **EVERY_LAYER}
    has_experts = True
    has_shared_expert = True


FAMILY: Family = Qwen2Moe()
