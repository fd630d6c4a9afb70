"""The embedded engine's copy of a model's weights: fused storage, and where each Hugging Face tensor lies in it.

H query heads   KV key/value heads   d head size   h hidden size   f width of a feed-forward or an expert   E experts
V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.weights.hf import Architecture
from megatron_rl.weights.sizes import FAMILIES


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward layer; gate and up are fused by rows."""

    gate_up: Tensor  # [2 f, h]
    down: Tensor  # [h, f]


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes through; a gate of its own weighs what it gives."""

    gate: Tensor  # [1, h]
    layer: FeedForward


@dataclass(frozen=True)
class ExpertWeights:
    """A layer's router, and its experts in two tensors; gate and up of one expert are fused by rows."""

    router: Tensor  # [E, h]
    gate_up: Tensor  # [E, 2 f, h]
    down: Tensor  # [E, h, f]
    shared: SharedExpert | None


@dataclass(frozen=True)
class Layer:
    """One block's weights; q, k and v are fused by rows.

    The rows of q and k (and q_norm, k_norm) stand so that the two features which a rotary angle turns are neighbours:
    attention is the same, and turning them is one complex product.
    """

    norm: Tensor  # [h]
    qkv: Tensor  # [(H + 2 KV) d, h]
    qkv_bias: Tensor | None  # [(H + 2 KV) d]
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    out: Tensor  # [h, H d]
    mlp_norm: Tensor  # [h]
    mlp: FeedForward | ExpertWeights


@dataclass(frozen=True)
class Weights:
    """All weights of one model."""

    embedding: Tensor  # [V, h]
    layers: tuple[Layer, ...]
    norm: Tensor  # [h]
    head: Tensor  # [V, h]


@dataclass(frozen=True)
class WeightSlot:
    """The part of the fused storage in which one Hugging Face tensor lies."""

    rows: Tensor  # [rows, columns] or [rows], a view
    head_dim: int | None = None  # rows of whole heads whose halves [first, second] stand as pairs; None: as they are

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    def order(self, first: int, count: int) -> Tensor | slice:
        """Tells where rows [first, first + count) of the Hugging Face tensor lie."""
        if self.head_dim is None:
            return slice(first, first + count)
        row, half = torch.arange(first, first + count, device=self.rows.device), self.head_dim // 2
        within = row % self.head_dim
        return row - within + within % half * 2 + within // half

    def fill(self, tensor: Tensor) -> None:
        """Writes the whole tensor at once."""
        if self.head_dim is None:
            self.rows.copy_(tensor)
        else:
            halves = tensor.view(-1, 2, self.head_dim // 2, *tensor.shape[1:]).transpose(1, 2)
            self.rows.view(halves.shape).copy_(halves)


class WeightSlots:
    """The storage by Hugging Face names, for a refit to write parts of it. A part is (row, column, number of rows,
    number of columns).

    Implements refit.base.Parameters.
    """

    def __init__(self, slots: Mapping[str, WeightSlot]) -> None:
        self._slots = slots

    def read(self, name: str, part: tuple[int, int, int, int]) -> Tensor:
        row, column, rows, columns = part
        slot = self._slots[name]
        found = slot.rows[slot.order(row, rows)]
        return found[:, None] if found.dim() == 1 else found[:, column : column + columns]

    def write(self, name: str, part: tuple[int, int, int, int], values: Tensor) -> None:
        row, column, rows, columns = part
        slot = self._slots[name]
        stored = slot.rows[:, None] if slot.rows.dim() == 1 else slot.rows[:, column : column + columns]
        stored[slot.order(row, rows)] = values.to(stored.dtype)


def gather_weights(
    stream: Iterable[tuple[str, Tensor]], arch: Architecture, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Reads a whole stream of (name, tensor) into new storage. Raises ValueError for unknown, missing, repeated or
    misshapen tensors.

    A tied model may bring lm_head.weight; it is not read.
    """
    weights, slots = storage(arch, dtype, device)
    seen: set[str] = set()
    for name, tensor in stream:
        if name == "lm_head.weight" and arch.tied:
            continue
        if name not in slots:
            raise ValueError(
                f"weight stream: unknown tensor {name!r} for a {arch.family} model; give Hugging Face names"
            )
        slot = slots[name]
        if tuple(tensor.shape) != slot.shape:
            raise ValueError(
                f"weight stream: {name} has shape {tuple(tensor.shape)}, the model needs {slot.shape}; "
                "give full tensors"
            )
        if name in seen:
            raise ValueError(f"weight stream: {name} came twice; give every tensor once")
        seen.add(name)
        slot.fill(tensor.detach())
    missing = sorted(slots.keys() - seen)
    if missing:
        raise ValueError(
            f"weight stream: {len(missing)} tensors are missing, the first is {missing[0]}; give the whole model"
        )
    return weights


def storage(arch: Architecture, dtype: torch.dtype, device: torch.device) -> tuple[Weights, dict[str, WeightSlot]]:
    """Makes uninitialised weights, and tells where every Hugging Face tensor of the model goes in them."""
    made = _Storage(arch, dtype, device)
    layers = tuple(made.layer(f"model.layers.{i}.") for i in range(arch.num_layers))
    embedding = made.plain("model.embed_tokens.weight", arch.vocab, arch.hidden)
    head = embedding if arch.tied else made.plain("lm_head.weight", arch.vocab, arch.hidden)
    return Weights(embedding, layers, made.plain("model.norm.weight", arch.hidden), head), made.slots


class _Storage:
    """Storage under construction; `slots` has all that was made so far."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self.slots: dict[str, WeightSlot] = {}

    def layer(self, prefix: str) -> Layer:
        """Makes the block whose tensors' names begin with `prefix`."""
        arch = self._arch
        bias = self._fused_heads(f"{prefix}self_attn.", "bias") if arch.qkv_bias else None
        return Layer(
            norm=self.plain(f"{prefix}input_layernorm.weight", arch.hidden),
            qkv=self._fused_heads(f"{prefix}self_attn.", "weight", arch.hidden),
            qkv_bias=bias,
            q_norm=self._head_norm(f"{prefix}self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{prefix}self_attn.k_norm.weight"),
            out=self.plain(f"{prefix}self_attn.o_proj.weight", arch.hidden, arch.heads * arch.head_dim),
            mlp_norm=self.plain(f"{prefix}post_attention_layernorm.weight", arch.hidden),
            mlp=self._experts(prefix) if arch.experts else self._feed_forward(f"{prefix}mlp.", arch.ffn),
        )

    def plain(self, name: str, *shape: int) -> Tensor:
        """Makes a tensor that lies as Hugging Face has it."""
        tensor = self._new(*shape)
        self.slots[name] = WeightSlot(tensor)
        return tensor

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fused_heads(self, prefix: str, kind: str, *columns: int) -> Tensor:
        """Makes q, k and v in one tensor; the rows of q and k are paired."""
        arch = self._arch
        sizes = [arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.kv_heads * arch.head_dim]
        fused = self._new(sum(sizes), *columns)
        for letter, part in zip("qkv", fused.split(sizes), strict=True):
            self.slots[f"{prefix}{letter}_proj.{kind}"] = WeightSlot(part, None if letter == "v" else arch.head_dim)
        return fused

    def _head_norm(self, name: str) -> Tensor | None:
        if not self._arch.qk_norm:
            return None
        weight = self._new(self._arch.head_dim)
        self.slots[name] = WeightSlot(weight, self._arch.head_dim)
        return weight

    def _feed_forward(self, prefix: str, width: int) -> FeedForward:
        gate_up = self._new(2 * width, self._arch.hidden)
        for name, part in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            self.slots[f"{prefix}{name}_proj.weight"] = WeightSlot(part)
        return FeedForward(gate_up, self.plain(f"{prefix}down_proj.weight", self._arch.hidden, width))

    def _experts(self, prefix: str) -> ExpertWeights:
        """Makes router and experts, and the shared expert where the family has one."""
        arch, family = self._arch, FAMILIES[self._arch.family]
        gate_up = self._new(arch.experts, 2 * arch.expert_ffn, arch.hidden)
        down = self._new(arch.experts, arch.hidden, arch.expert_ffn)
        for number, (fused, last) in enumerate(zip(gate_up, down, strict=True)):
            for name, part in zip(family.parts, (*fused.chunk(2), last), strict=True):
                self.slots[f"{prefix}{family.experts}.experts.{number}.{name}.weight"] = WeightSlot(part)
        router = self.plain(f"{prefix}{family.experts}.gate.weight", arch.experts, arch.hidden)
        return ExpertWeights(router, gate_up, down, self._shared_expert(f"{prefix}{family.shared}"))

    def _shared_expert(self, name: str) -> SharedExpert | None:
        if not self._arch.shared_ffn:
            return None
        gate = self.plain(f"{name}_gate.weight", 1, self._arch.hidden)
        return SharedExpert(gate, self._feed_forward(f"{name}.", self._arch.shared_ffn))
