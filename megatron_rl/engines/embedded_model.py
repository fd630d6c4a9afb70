"""The decoder of the embedded engine: Qwen2, Qwen3 and Llama in plain torch, with a key/value cache and fused projections.

B rows   P prompt width   L cache columns   H query heads   KV key/value heads   d head size   h hidden size   f ffn size   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.weights.hf import Architecture


@dataclass(frozen=True)
class Layer:
    """One block's weights; q, k, v and gate, up are fused by rows.

    The rows of q and k (and q_norm, k_norm) stand so that the two features which a rotary angle turns are neighbours: attention is
    the same, and turning them is one complex product.
    """

    norm: Tensor  # [h]
    qkv: Tensor  # [(H + 2 KV) d, h]
    qkv_bias: Tensor | None  # [(H + 2 KV) d]
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
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


@dataclass(frozen=True)
class Place:
    """Where a Hugging Face tensor lies in the fused storage."""

    rows: Tensor  # [rows, columns] or [rows], a view
    head_dim: int | None = None  # rows of whole heads whose halves [first, second] stand as pairs; None: as they are

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    def order(self, first: int, count: int) -> Tensor | slice:
        """Where rows [first, first + count) of the Hugging Face tensor lie."""
        if self.head_dim is None:
            return slice(first, first + count)
        row, half = torch.arange(first, first + count, device=self.rows.device), self.head_dim // 2
        within = row % self.head_dim
        return row - within + within % half * 2 + within // half

    def fill(self, tensor: Tensor) -> None:
        """All of it at once."""
        if self.head_dim is None:
            self.rows.copy_(tensor)
        else:
            halves = tensor.view(-1, 2, self.head_dim // 2, *tensor.shape[1:]).transpose(1, 2)
            self.rows.view(halves.shape).copy_(halves)


class Places:
    """The storage by Hugging Face names, for a refit to write parts of it: row and column, then number of both."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    def read(self, name: str, part: tuple[int, int, int, int]) -> Tensor:
        row, column, rows, columns = part
        place = self._places[name]
        found = place.rows[place.order(row, rows)]
        return found[:, None] if found.dim() == 1 else found[:, column : column + columns]

    def write(self, name: str, part: tuple[int, int, int, int], values: Tensor) -> None:
        row, column, rows, columns = part
        place = self._places[name]
        stored = place.rows[:, None] if place.rows.dim() == 1 else place.rows[:, column : column + columns]
        stored[place.order(row, rows)] = values.to(stored.dtype)


def gather_weights(
    stream: Iterable[tuple[str, Tensor]], arch: Architecture, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Reads a whole stream of (name, tensor) into new storage. Raises ValueError for unknown, missing, repeated or misshapen tensors.

    A tied model may bring lm_head.weight; it is not read.
    """
    weights, places = storage(arch, dtype, device)
    seen: set[str] = set()
    for name, tensor in stream:
        if name == "lm_head.weight" and arch.tied:
            continue
        if name not in places:
            raise ValueError(
                f"weight stream: unknown tensor {name!r} for a {arch.family} model; give Hugging Face names"
            )
        place = places[name]
        if tuple(tensor.shape) != place.shape:
            raise ValueError(
                f"weight stream: {name} has shape {tuple(tensor.shape)}, the model needs {place.shape}; give full tensors"
            )
        if name in seen:
            raise ValueError(f"weight stream: {name} came twice; give every tensor once")
        seen.add(name)
        place.fill(tensor.detach())
    missing = sorted(places.keys() - seen)
    if missing:
        raise ValueError(
            f"weight stream: {len(missing)} tensors are missing, the first is {missing[0]}; give the whole model"
        )
    return weights


def storage(arch: Architecture, dtype: torch.dtype, device: torch.device) -> tuple[Weights, dict[str, Place]]:
    """Uninitialised weights, and where every Hugging Face tensor of the model goes in them."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    places: dict[str, Place] = {}

    def place(name: str, view: Tensor) -> Tensor:
        places[name] = Place(view)
        return view

    def paired(name: str, rows: Tensor) -> None:
        """Rows of whole heads whose halves [first, second] become pairs."""
        places[name] = Place(rows, arch.head_dim)

    def head_norm(name: str) -> Tensor | None:
        if not arch.qk_norm:
            return None
        weight = new(arch.head_dim)
        paired(name, weight)
        return weight

    layers, sizes = [], [arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.kv_heads * arch.head_dim]
    for i in range(arch.num_layers):
        p = f"model.layers.{i}."
        qkv, gate_up = new(sum(sizes), arch.hidden), new(2 * arch.ffn, arch.hidden)
        bias = new(sum(sizes)) if arch.qkv_bias else None
        for kind, fused in (("weight", qkv), ("bias", bias)):
            if fused is not None:
                q, k, v = fused.split(sizes)
                paired(f"{p}self_attn.q_proj.{kind}", q)
                paired(f"{p}self_attn.k_proj.{kind}", k)
                place(f"{p}self_attn.v_proj.{kind}", v)
        for name, part in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            place(f"{p}mlp.{name}_proj.weight", part)
        layers.append(
            Layer(
                norm=place(p + "input_layernorm.weight", new(arch.hidden)),
                qkv=qkv,
                qkv_bias=bias,
                q_norm=head_norm(p + "self_attn.q_norm.weight"),
                k_norm=head_norm(p + "self_attn.k_norm.weight"),
                out=place(p + "self_attn.o_proj.weight", new(arch.hidden, sizes[0])),
                mlp_norm=place(p + "post_attention_layernorm.weight", new(arch.hidden)),
                gate_up=gate_up,
                down=place(p + "mlp.down_proj.weight", new(arch.hidden, arch.ffn)),
            )
        )
    embedding = place("model.embed_tokens.weight", new(arch.vocab, arch.hidden))
    head = embedding if arch.tied else place("lm_head.weight", new(arch.vocab, arch.hidden))
    return Weights(embedding, tuple(layers), place("model.norm.weight", new(arch.hidden)), head), places


class Decoder:
    """Forward passes over `weights`; the cache is the caller's."""

    def __init__(self, arch: Architecture, weights: Weights) -> None:
        self.arch, self.weights = arch, weights
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self._turns = self._rotary(512)
        self._eps = torch.tensor(arch.norm_eps)

    def new_cache(self, rows: int, width: int) -> list[Tensor]:
        """One [2, B, KV, L, d] per layer, keys then values. Zeros: what is masked out is still multiplied, so it must be finite."""
        shape = (2, rows, self.arch.kv_heads, width, self.arch.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.weights.layers]

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Right-padded prompts [B, P] -> hidden states [B, P, h] before the last norm, and per layer a cache [2, B, KV, P, d]."""
        rows, width = tokens.shape
        turns = self._turns_up_to(width)[:width].repeat(rows, 1)[:, None]  # [B P, 1, d / 2]
        x, cache = F.embedding(tokens.flatten(), self.weights.embedding), []
        for layer in self.weights.layers:
            q, kv = self._project(x, layer, turns)
            keys, values = kv = kv.unflatten(0, (rows, width)).permute(2, 0, 3, 1, 4)  # [2, B, KV, P, d]
            q = q.unflatten(0, (rows, width)).transpose(1, 2)  # [B, H, P, d]
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            self._finish(x, y.transpose(1, 2).reshape(len(x), -1), layer)
            cache.append(kv)
        return x.unflatten(0, (rows, width)), cache

    def decode(self, tokens: Tensor, positions: Tensor, cache: Sequence[Tensor], window: int) -> Tensor:
        """One token per row: tokens and positions [B] -> hidden states [B, h] before the last norm.

        The first B rows and `window` columns of the cache are looked at; the token's keys and values are written to it in place.
        """
        arch, rows = self.arch, len(tokens)
        turns = self._turns_up_to(window)[positions][:, None]  # [B, 1, d / 2]
        index, scale = torch.arange(rows, device=self.device), arch.head_dim**-0.5
        later = torch.arange(window, device=self.device) > positions[:, None]  # [B, window]
        bias = torch.where(later, -torch.inf, 0.0).to(self.dtype)[:, None]
        bias = bias.expand(-1, arch.kv_heads, -1).reshape(rows * arch.kv_heads, 1, window)
        x = F.embedding(tokens, self.weights.embedding)
        for layer, held in zip(self.weights.layers, cache, strict=True):
            q, kv = self._project(x, layer, turns)
            held[:, index, :, positions] = kv
            keys, values = held[:, :rows].flatten(1, 2)[:, :, :window]  # [B KV, window, d] each
            q = q.reshape(rows * arch.kv_heads, -1, arch.head_dim)  # [B KV, H / KV, d]
            scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)  # [B KV, H / KV, window]
            self._finish(x, torch.bmm(scores.softmax(dim=-1), values).view(rows, -1), layer)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states before the last norm [..., h] -> [..., V]."""
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head)

    def _project(self, x: Tensor, layer: Layer, turns: Tensor) -> tuple[Tensor, Tensor]:
        """[N, h] -> turned queries [N, H, d]; turned keys, and values [N, 2, KV, d]."""
        arch, turned = self.arch, self.arch.heads + self.arch.kv_heads
        fused = F.linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias).unflatten(
            -1, (-1, arch.head_dim)
        )  # [N, H + 2 KV, d]
        both = fused[:, :turned]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.split([arch.heads, arch.kv_heads], dim=1)
            both = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], dim=1)
        pairs = torch.view_as_complex(both.float().unflatten(-1, (-1, 2)))  # [N, H + KV, d / 2]
        fused[:, :turned] = torch.view_as_real(pairs * turns).flatten(-2)
        return fused[:, : arch.heads], fused[:, arch.heads :].unflatten(1, (2, arch.kv_heads))

    def _finish(self, x: Tensor, attended: Tensor, layer: Layer) -> None:
        """Adds the attention's output [N, H d], then the feed-forward's, to x [N, h]."""
        x.addmm_(attended, layer.out.T)
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        x.addmm_(F.silu(gate).mul_(up), layer.down.T)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.arch.norm_eps)
        # On CPU torch runs rms_norm as nine small operations; these are five.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(weight)

    def _rotary(self, length: int) -> Tensor:
        """e^(i angle) of every position: complex64 [length, d / 2]."""
        cos, sin = self.arch.rotary(torch.arange(length))
        half = self.arch.head_dim // 2
        return torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous()).to(self.device)

    def _turns_up_to(self, length: int) -> Tensor:
        if length > len(self._turns):
            self._turns = self._rotary(2 * length)
        return self._turns
