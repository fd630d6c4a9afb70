"""Holds the sizes of well-known models, from their published config.json, to plan a refit without their files."""

from __future__ import annotations

from megatron_rl.weights.sizes import Sizes


def _dense(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, head_dim: int = 128
) -> Sizes:
    """Returns the sizes of a model without experts."""
    return Sizes(
        family=family,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        tied=False,
    )


def _moe(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, experts: int, expert_ffn: int
) -> Sizes:
    """Returns the sizes of a model whose layers all have experts."""
    return Sizes(
        family=family,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=expert_ffn,
        vocab=vocab,
        tied=False,
        experts=experts,
        expert_ffn=expert_ffn,
    )


KNOWN = {
    "qwen2.5-7b": _dense("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-32b": _dense("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "llama3-8b": _dense("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _dense("llama", 80, 8192, 64, 8, 28672, 128256),
    "mixtral-8x7b": _moe("mixtral", 32, 4096, 32, 8, 32000, 8, 14336),
    "qwen3-30b-a3b": _moe("qwen3_moe", 48, 2048, 32, 4, 151936, 128, 768),
    "qwen3-235b-a22b": _moe("qwen3_moe", 94, 4096, 64, 4, 151936, 128, 1536),
    # This model does not exist: it is a Qwen3-MoE of 1.05 T parameters.
    "moe-1t": _moe("qwen3_moe", 61, 7168, 64, 8, 163840, 384, 2048),
}
