"""Qwen3-MoE: Qwen3 with experts in every layer. Its template is that of Qwen3."""

from typing import Any

from megatron_rl.models.family import EVERY_LAYER, SETTLED, dims
from megatron_rl.models.qwen3 import Qwen3


def _sparse(numbers: tuple[int, int, int, int, int], experts: int, vocab: int = 151936) -> dict[str, Any]:
    """Returns a config.json's keys; the last of `numbers` is an expert's width, and a token sees 8 experts."""
    return dims(
        numbers,
        vocab=vocab,
        head_dim=128,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=numbers[-1],
        norm_topk_prob=True,
    )


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    model_type = "qwen3_moe"
    settled = {**SETTLED, **EVERY_LAYER}
    has_experts = True
    known = {
        "qwen3-30b-a3b": _sparse((48, 2048, 32, 4, 768), 128),
        "qwen3-235b-a22b": _sparse((94, 4096, 64, 4, 1536), 128),
        # This model does not exist: it has 1.05 T parameters.
        "moe-1t": _sparse((61, 7168, 64, 8, 2048), 384, vocab=163840),
    }


FAMILY = Qwen3Moe()
