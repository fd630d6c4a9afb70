"""The decoder of the embedded engine: Qwen2, Qwen3 and Llama in plain torch, with a key/value cache and fused projections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.weights.hf import Architecture


@dataclass(frozen=True)
class Layer:
    """One block's weights; q, k, v and gate, up are fused by rows."""

    norm: Tensor  # [h]
    qkv: Tensor  # [(H + 2 KV) d, h]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None
    out: Tensor  # [h, H d]
    mlp_norm: Tensor  # [h]
    gate_up: Tensor  # [2 f, h]
    down: Tensor  # [h, f]


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [V, h]
    layers: tuple[Layer, ...]
    norm: Tensor  # [h]
    head: Tensor  # [V, h]


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor the model is made of."""
    h, d = arch.hidden, arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab, h), "model.norm.weight": (h,)}
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab, h)
    for i in range(arch.num_layers):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        for name, heads in (("q", arch.heads), ("k", arch.kv_heads), ("v", arch.kv_heads)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (heads * d, h)
            if arch.qkv_bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (heads * d,)
        shapes[p + "self_attn.o_proj.weight"] = (h, arch.heads * d)
        if arch.qk_norm:
            shapes |= {p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,)}
        shapes |= {
            p + "mlp.gate_proj.weight": (arch.ffn, h),
            p + "mlp.up_proj.weight": (arch.ffn, h),
            p + "mlp.down_proj.weight": (h, arch.ffn),
        }
    return shapes


def gather_weights(stream: Iterable[tuple[str, Tensor]], arch: Architecture, dtype: torch.dtype, device: torch.device) -> Weights:
    """Reads a whole stream of (name, tensor) and fuses it. Raises ValueError for unknown, missing, repeated or misshapen tensors."""
    shapes, found = expected_shapes(arch), {}
    for name, tensor in stream:
        if name == "lm_head.weight" and arch.tied:
            continue
        if name not in shapes:
            raise ValueError(f"weight stream: unknown tensor {name!r} for a {arch.family} model")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"weight stream: {name} has shape {tuple(tensor.shape)}, the model needs {shapes[name]}")
        if name in found:
            raise ValueError(f"weight stream: {name} came twice")
        found[name] = tensor.detach().to(device=device, dtype=dtype, copy=True)
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        raise ValueError(f"weight stream: {len(missing)} tensors are missing, the first is {missing[0]}; the old weights stay in use")
    layers = tuple(_layer(found, f"model.layers.{i}.", arch) for i in range(arch.num_layers))
    embedding = found["model.embed_tokens.weight"]
    return Weights(embedding, layers, found["model.norm.weight"], embedding if arch.tied else found["lm_head.weight"])


def _layer(found: dict[str, Tensor], p: str, arch: Architecture) -> Layer:
    def joined(kind: str) -> Tensor:
        return torch.cat([found[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv"])

    return Layer(
        norm=found[p + "input_layernorm.weight"],
        qkv=joined("weight"),
        qkv_bias=joined("bias") if arch.qkv_bias else None,
        q_norm=found[p + "self_attn.q_norm.weight"] if arch.qk_norm else None,
        k_norm=found[p + "self_attn.k_norm.weight"] if arch.qk_norm else None,
        out=found[p + "self_attn.o_proj.weight"],
        mlp_norm=found[p + "post_attention_layernorm.weight"],
        gate_up=torch.cat([found[p + "mlp.gate_proj.weight"], found[p + "mlp.up_proj.weight"]]),
        down=found[p + "mlp.down_proj.weight"],
    )


class Decoder:
    """Stateless forward passes over `weights`; the cache is the caller's."""

    def __init__(self, arch: Architecture, weights: Weights) -> None:
        self.arch, self.weights = arch, weights
        self._cos, self._sin = (t.to(weights.norm.device, weights.norm.dtype) for t in arch.rotary(torch.arange(512)))

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Right-padded prompts [B, P] -> hidden states [B, P, h] and per layer keys and values [B, KV, P, d]."""
        rows, width = tokens.shape
        cos, sin = self._rotary(width)
        cos, sin = cos[:width, None], sin[:width, None]  # [P, 1, d]
        x, cache = F.embedding(tokens, self.weights.embedding), []
        for layer in self.weights.layers:
            q, k, v = self._project(x, layer, cos, sin)  # [B, P, heads, d]
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
            x = self._finish(x, y.transpose(1, 2).reshape(rows, width, -1), layer)
            cache.append((k, v))
        return self._norm(x, self.weights.norm), cache

    def decode(self, tokens: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]], window: int) -> Tensor:
        """One token per row: tokens and positions [B], cache rows [B, KV, L, d], of which `window` columns are looked at -> hidden [B, h].

        Keys and values of the token are written to the cache in place.
        """
        arch, rows = self.arch, len(tokens)
        cos, sin = self._rotary(window)
        cos, sin = cos[positions][:, None], sin[positions][:, None]  # [B, 1, d]
        hidden = torch.arange(window, device=tokens.device)[None] > positions[:, None]  # [B, window]
        bias = torch.zeros(rows, 1, 1, window, dtype=cos.dtype, device=tokens.device).masked_fill_(hidden[:, None, None], -torch.inf)
        index, scale = torch.arange(rows, device=tokens.device), arch.head_dim**-0.5
        x = F.embedding(tokens, self.weights.embedding)
        for layer, (keys, values) in zip(self.weights.layers, cache, strict=True):
            q, k, v = self._project(x, layer, cos, sin)  # [B, heads, d]
            keys[index, :, positions], values[index, :, positions] = k, v
            grouped = (q * scale).view(rows, arch.kv_heads, -1, arch.head_dim)
            scores = torch.matmul(grouped, keys[:, :, :window].transpose(-1, -2)).add_(bias)
            y = torch.matmul(scores.softmax(dim=-1), values[:, :, :window])
            x = self._finish(x, y.reshape(rows, -1), layer)
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., h] -> [..., V]."""
        return hidden @ self.weights.head.T

    def _project(self, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., h] -> rotated queries and keys, values: [..., heads, d]."""
        arch = self.arch
        fused = F.linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias)
        fused = fused.view(*x.shape[:-1], -1, arch.head_dim)
        if layer.q_norm is None or layer.k_norm is None:
            both, v = fused.split([arch.heads + arch.kv_heads, arch.kv_heads], dim=-2)
        else:
            q, k, v = fused.split([arch.heads, arch.kv_heads, arch.kv_heads], dim=-2)
            both = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], dim=-2)
        first, second = both.chunk(2, dim=-1)
        both = both * cos + torch.cat([-second, first], dim=-1) * sin
        q, k = both.split([arch.heads, arch.kv_heads], dim=-2)
        return q, k, v

    def _finish(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        x = x + F.linear(attended, layer.out)
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.arch.norm_eps)

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        if length > len(self._cos):
            tables = self.arch.rotary(torch.arange(2 * length))
            self._cos, self._sin = (t.to(self._cos.device, self._cos.dtype) for t in tables)
        return self._cos, self._sin
