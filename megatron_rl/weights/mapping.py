"""Megatron parameter names and layouts against Hugging Face's, for dense Qwen2 / Qwen3 / Llama (pure functions on tensors).

A Megatron parameter is a *sharded* tensor over the tensor-parallel ranks; `from_hf` cuts a rank's shard out of Hugging Face
tensors and `to_hf` puts all ranks' shards together again. They are exact inverses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.weights.hf import Architecture

Get = Callable[[str], Tensor]

_WHOLE = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "decoder.final_layernorm.weight": "model.norm.weight"}
_NORMS = {  # local spec and Transformer Engine's fused names
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_ROWS = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight"}


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary size rounded up so that every tensor-parallel rank holds the same number of rows."""
    return -(-vocab // tp) * tp


def hf_names(name: str, arch: Architecture) -> list[str]:
    """Hugging Face tensors that the Megatron parameter `name` (global layer number) is made of. KeyError for an unknown name."""
    if name in _WHOLE:
        return [_WHOLE[name]]
    if name == "output_layer.weight":
        return ["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    layer, part = _split(name)
    prefix = f"model.layers.{layer}."
    if part in _NORMS:
        return [prefix + _NORMS[part]]
    if part in _ROWS:
        return [prefix + _ROWS[part]]
    if part in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        kind = part.rsplit(".", 1)[1]
        return [f"{prefix}self_attn.{p}_proj.{kind}" for p in "qkv"]
    if part == "mlp.linear_fc1.weight":
        return [prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"]
    raise KeyError(f"no Hugging Face tensor is known for the Megatron parameter {name!r}")


def check_complete(names: Iterable[str], arch: Architecture) -> None:
    """Raises ConfigError for tensors of a model directory that no Megatron parameter takes: without them it would be another model."""
    biases = [f"self_attn.{p}_proj.bias" for p in "qkv"] if arch.qkv_bias else []
    norms = [*_NORMS.values()] if arch.qk_norm else ["input_layernorm.weight", "post_attention_layernorm.weight"]
    weights = [*(f"self_attn.{p}_proj.weight" for p in "qkvo"), *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down"))]
    known = {f"model.layers.{i}.{part}" for i in range(arch.num_layers) for part in (*norms, *weights, *biases)}
    known |= {*_WHOLE.values(), "lm_head.weight"}
    left = sorted(n for n in names if n not in known and not n.endswith("rotary_emb.inv_freq"))
    if left:
        raise ConfigError(
            f"{len(left)} tensors have no place in a dense {arch.family} model, e.g. {', '.join(left[:5])}: is it another one?"
        )


def from_hf(name: str, get: Get, arch: Architecture, *, tp_rank: int, tp: int) -> Tensor:
    """The shard of `name` on rank `tp_rank` of `tp`. `get(hf_name)` returns a full tensor."""
    sources = [get(n) for n in hf_names(name, arch)]
    if "word_embeddings" in name or name == "output_layer.weight":
        return _pad_rows(sources[0], padded_vocab(arch.vocab, tp)).chunk(tp, 0)[tp_rank]
    if name.endswith("layer_norm_weight") or "layernorm" in name:
        return sources[0]
    if "linear_qkv" in name:
        return _merge_qkv(sources, arch).chunk(tp, 0)[tp_rank]
    if "linear_fc1" in name:
        return torch.cat([s.chunk(tp, 0)[tp_rank] for s in sources])
    return sources[0].chunk(tp, 1)[tp_rank]


def to_hf(name: str, shards: Sequence[Tensor], arch: Architecture) -> list[tuple[str, Tensor]]:
    """All tensor-parallel shards of `name`, in rank order -> full Hugging Face tensors under their names."""
    names = hf_names(name, arch)
    if "word_embeddings" in name or name == "output_layer.weight":
        return [(names[0], torch.cat(list(shards))[: arch.vocab])]
    if name.endswith("layer_norm_weight") or "layernorm" in name:
        return [(names[0], shards[0])]
    if "linear_qkv" in name:
        return list(zip(names, _split_qkv(torch.cat(list(shards)), arch), strict=True))
    if "linear_fc1" in name:
        halves = [s.chunk(2, 0) for s in shards]
        return [(names[i], torch.cat([h[i] for h in halves])) for i in (0, 1)]
    return [(names[0], torch.cat(list(shards), dim=1))]


def is_sharded(name: str) -> bool:
    """False for the norms, of which every tensor-parallel rank holds the whole."""
    return not (name.endswith("layer_norm_weight") or "layernorm" in name)


def _split(name: str) -> tuple[int, str]:
    parts = name.split(".")
    if len(parts) < 4 or parts[:2] != ["decoder", "layers"]:
        raise KeyError(f"no Hugging Face tensor is known for the Megatron parameter {name!r}")
    return int(parts[2]), ".".join(parts[3:])


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _merge_qkv(parts: Sequence[Tensor], arch: Architecture) -> Tensor:
    """q, k, v -> Megatron's order: for every key/value head its query heads, its key, its value."""
    groups = [t.reshape(arch.kv_heads, -1, *t.shape[1:]) for t in parts]
    merged = torch.cat(groups, dim=1)
    return merged.reshape(-1, *parts[0].shape[1:])


def _split_qkv(merged: Tensor, arch: Architecture) -> list[Tensor]:
    per_group = arch.heads // arch.kv_heads * arch.head_dim
    grouped = merged.reshape(arch.kv_heads, per_group + 2 * arch.head_dim, *merged.shape[1:])
    parts = grouped.split([per_group, arch.head_dim, arch.head_dim], dim=1)
    return [p.reshape(-1, *merged.shape[1:]) for p in parts]
