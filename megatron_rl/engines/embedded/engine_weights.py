"""The embedded engine's copy of a model's weights: fused weight tensors, and the location of each Hugging Face tensor
in these tensors.

H query heads   KV key/value heads   d head size   h hidden size   f width of a feed-forward or an expert   E experts
V vocabulary
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.models.registry import ends, family_of, layer_rows
from megatron_rl.models.rows import EXPERT, HF_LAYER, Row
from megatron_rl.refit.transport import bits
from megatron_rl.weights.hf_model import Architecture
from megatron_rl.weights.parameter_mapping import Rect
from megatron_rl.weights.quantisation import SCALES, Format, quantised_shapes, split
from megatron_rl.weights.quantised_values import dequantise

_QKV = "self_attention.linear_qkv."
_PAIRED = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")


@dataclass(frozen=True)
class FeedForward:
    """The weights of a dense feed-forward layer. Gate and up projections are concatenated along the rows."""

    gate_up: Tensor  # [2 f, h]
    down: Tensor  # [h, f]


@dataclass(frozen=True)
class SharedExpert:
    """The weights of an expert that processes every token. In some model families, a separate gate weights the expert's
    output.
    """

    gate: Tensor | None  # [1, h]
    layer: FeedForward


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer's router and experts. All experts are stacked. Gate and up projections of an expert are
    concatenated along the rows.
    """

    router: Tensor  # [E, h]
    gate_up: Tensor  # [E, 2 f, h]
    down: Tensor  # [E, h, f]
    shared: SharedExpert | None
    bias: Tensor | None = None  # [E] float32, bias on the router scores that is used only to choose experts
    # The three biases below exist only in gpt-oss, where rows of gate_up and gate_up_bias alternate between gate and up
    router_bias: Tensor | None = None  # [E]
    gate_up_bias: Tensor | None = None  # [E, 2 f]
    down_bias: Tensor | None = None  # [E, h]


@dataclass(frozen=True)
class Latents:
    """The projections of latent attention (MLA) with a latent of r elements. A head of a query or key has n elements
    that are not rotated, and e rotated elements. All heads share the rotated elements of the key. A head of a value has
    v elements. If queries have a down projection too, its output has q elements.
    """

    down: Tensor  # [r + e, h]
    norm: Tensor  # [r]
    up: Tensor  # [H (n + v), r]
    # [q, h], down projection of queries; None if queries are computed from the hidden state directly
    query_down: Tensor | None
    query_norm: Tensor | None  # [q]
    query: Tensor  # [H (n + e), q or h]


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer block. The q, k and v projections are concatenated along the rows.

    The rows of q and k (and q_norm, k_norm) are ordered so that the two elements of a rotary pair are adjacent. The
    attention result is the same, and the rotation is one multiplication of complex numbers. In model families with
    latent attention (MLA), checkpoints already have this order.
    """

    norm: Tensor | None  # [h], norm of the attention's input
    qkv: Tensor | Latents  # [(H + 2 KV) d, h]
    qkv_bias: Tensor | None  # [(H + 2 KV) d]
    q_norm: Tensor | None  # [d] if each head is normalized separately, or [H d] if all heads are normalized together
    k_norm: Tensor | None  # [d], or [KV d]
    sinks: Tensor | None  # [H], attention sinks: one learned logit per head, which the softmax over the keys includes
    out: Tensor  # [h, H d], or with latents [h, H v]
    out_bias: Tensor | None  # [h]
    out_after: Tensor | None  # [h], norm of the attention's output
    mlp_norm: Tensor | None  # [h], norm of the feed-forward's input
    mlp: FeedForward | ExpertWeights
    mlp_after: Tensor | None  # [h], norm of the feed-forward's output


@dataclass(frozen=True)
class Weights:
    """All weights of one model."""

    embedding: Tensor  # [V, h]
    layers: tuple[Layer, ...]
    norm: Tensor  # [h]
    head: Tensor  # [V, h]


@dataclass(frozen=True)
class WeightSlot:
    """The part of the engine's weight storage that holds one Hugging Face tensor."""

    rows: Tensor  # [rows, columns] or [rows], a view
    # Size of a head if rows are stored in rotary pairs: a row of a head's first half, then one of its second half.
    # None if rows are stored in the same order as in the Hugging Face tensor.
    head_dim: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    def order(self, first: int, count: int) -> Tensor | slice:
        """Returns the indices at which the rows [first, first + count) of the Hugging Face tensor are stored."""
        if self.head_dim is None:
            return slice(first, first + count)
        row, half = torch.arange(first, first + count, device=self.rows.device), self.head_dim // 2
        within = row % self.head_dim
        return row - within + within % half * 2 + within // half

    def fill(self, tensor: Tensor) -> None:
        """Copies the whole Hugging Face tensor to this part of the storage."""
        if self.head_dim is None:
            self.rows.copy_(tensor)
        else:
            halves = tensor.view(-1, 2, self.head_dim // 2, *tensor.shape[1:]).transpose(1, 2)
            self.rows.view(halves.shape).copy_(halves)


class WeightSlots:
    """The engine's weight storage as the destination of a weight sync (refit). The sync writes 2-D blocks of tensors
    under the tensors' Hugging Face names. A block (`part`) is (first row, first column, number of rows, number of
    columns).

    Implements refit.transport.Parameters.
    """

    def __init__(self, slots: Mapping[str, WeightSlot]) -> None:
        self._slots = slots

    @property
    def nbytes(self) -> int:
        return sum(slot.rows.nbytes for slot in self._slots.values())

    def read(self, name: str, part: tuple[int, int, int, int]) -> Tensor:
        row, column, rows, columns = part
        slot = self._slots[name]
        found = slot.rows[slot.order(row, rows)]
        return found[:, None] if found.dim() == 1 else found[:, column : column + columns]

    def carried(self, names: Collection[str], dtype: torch.dtype) -> WeightSlots:
        return WeightSlots({
            name: WeightSlot(bits(name, slot.rows, names, dtype), slot.head_dim) for name, slot in self._slots.items()
        })  # fmt: skip

    def write(self, name: str, part: tuple[int, int, int, int], values: Tensor) -> None:
        row, column, rows, columns = part
        slot = self._slots[name]
        stored = slot.rows[:, None] if slot.rows.dim() == 1 else slot.rows[:, column : column + columns]
        stored[slot.order(row, rows)] = values.to(stored.dtype)


class QuantisedSlots:
    """Memory for the quantised values and scales that a refit sends to the embedded engine. The engine computes in the
    model's dtype, so `fill` dequantises the weights and writes them to the engine's weights.
    """

    def __init__(self, slots: Mapping[str, WeightSlot], arch: Architecture, form: Format, device: torch.device) -> None:
        self._slots, self._form, self.slots = slots, form, dict(slots)
        for name, (rows, columns) in quantised_shapes(arch).items():
            values = Rect(name, 0, 0, rows, columns, 0, 0)
            dtypes = torch.uint8, getattr(torch, form.scales)
            for own, dtype in zip(split(form, values), dtypes, strict=True):
                self.slots[own.tensor] = WeightSlot(torch.empty((own.rows, own.columns), dtype=dtype, device=device))

    def fill(self) -> None:
        """Dequantises the received weights and writes them to the engine's weights."""
        for name, scales in self.slots.items():
            if name.endswith(SCALES):
                slot, values = self._slots[name.removesuffix(SCALES)], self.slots[name.removesuffix(SCALES)]
                slot.fill(dequantise(values.rows, scales.rows, self._form, slot.rows.dtype))


def gather_weights(
    stream: Iterable[tuple[str, Tensor]], arch: Architecture, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Copies all weights of a model from a stream of (Hugging Face name, tensor) to newly allocated storage. Raises
    ValueError for unknown, missing, repeated or misshapen tensors.

    The stream of a model with tied embeddings may contain lm_head.weight, which is ignored.
    """
    weights, slots = storage(arch, dtype, device)
    seen: set[str] = set()
    for name, tensor in stream:
        if (name == "lm_head.weight" and arch.tied) or family_of(arch).leaves_out(arch, name):
            continue
        slot, shape, problem = slots.get(name), tuple(tensor.shape), None
        if slot is None:
            problem = f"unknown tensor {name!r} for a {arch.family} model; give Hugging Face names"
        elif shape != slot.shape:
            problem = f"{name} has shape {shape}, the model needs {slot.shape}; give full tensors"
        elif name in seen:
            problem = f"{name} came twice; give every tensor once"
        if slot is None or problem is not None:
            raise ValueError(f"weight stream: {problem}")
        seen.add(name)
        slot.fill(tensor.detach())
    if missing := sorted(slots.keys() - seen):
        raise ValueError(
            f"weight stream: {len(missing)} tensors are missing, the first is {missing[0]}; give the whole model"
        )
    return weights


def storage(arch: Architecture, dtype: torch.dtype, device: torch.device) -> tuple[Weights, dict[str, WeightSlot]]:
    """Allocates uninitialized weights for a model. Returns the weights, and {Hugging Face name of a tensor: part of the
    weights that holds this tensor}.
    """
    made = _Storage(arch, dtype, device)
    layers = tuple(made.layer(number) for number in range(arch.num_layers))
    first, last = ends(arch)
    outside = {row.name: made.row(row, "") for row in (*first, *last) if not row.copy}
    embedding = outside["embedding.word_embeddings.weight"]
    head = outside.get("output_layer.weight", embedding)
    return Weights(embedding, layers, outside["decoder.final_layernorm.weight"], head), made.slots


class _Storage:
    """Weight storage under construction. `slots` has the locations of all Hugging Face tensors allocated so far."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self.slots: dict[str, WeightSlot] = {}

    def layer(self, number: int) -> Layer:
        """Allocates the weights of the transformer layer with index `number`. The layer's parameters have the same
        Megatron names in every model family.
        """
        prefix = HF_LAYER.format(number)
        made = {row.name: self.row(row, prefix) for row in layer_rows(self._arch, number)}
        return Layer(
            norm=made.get("input_layernorm.weight"),
            qkv=_latents(made) if self._arch.kv_rank else made["self_attention.linear_qkv.weight"],
            qkv_bias=made.get("self_attention.linear_qkv.bias"),
            q_norm=None if self._arch.kv_rank else made.get("self_attention.q_layernorm.weight"),
            k_norm=made.get("self_attention.k_layernorm.weight"),
            sinks=made.get("self_attention.core_attention.softmax_offset"),
            out=made["self_attention.linear_proj.weight"],
            out_bias=made.get("self_attention.linear_proj.bias"),
            out_after=made.get("self_attn_bda.weight"),
            mlp_norm=made.get("pre_mlp_layernorm.weight"),
            mlp=_experts(made) if "mlp.router.weight" in made else _feed_forward(made, "mlp"),
            mlp_after=made.get("mlp_bda.weight"),
        )

    def row(self, row: Row, prefix: str) -> Tensor:
        """Allocates one parameter, which is a concatenation of Hugging Face tensors. `row`: the names and shapes of the
        parameter and of these tensors. A parameter of an expert is allocated for all experts at once, as one stacked
        tensor.

        The rows of queries and keys, and the elements of their norms, are stored in rotary pairs.
        """
        rows, columns = [source.rows for source in row.sources], row.sources[0].columns
        shape = [*([row.experts] if row.experts else []), sum(rows), *([columns] if columns > 1 else [])]
        dtype = torch.float32 if row.float32 else self._dtype
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for number, one in enumerate(whole if row.experts else [whole]):
            for place, (source, part) in enumerate(zip(row.sources, one.split(rows), strict=True)):
                paired = row.name in _PAIRED or (row.name.startswith(_QKV) and place < 2)
                slot = WeightSlot(part, self._arch.head_dim if paired and not self._arch.kv_rank else None)
                self.slots[prefix + source.name.replace(EXPERT, str(number))] = slot
        return whole


def _feed_forward(made: Mapping[str, Tensor], module: str) -> FeedForward:
    """Returns the weights of the gated feed-forward layer `module`. `made`: the layer's allocated parameters by
    name.
    """
    return FeedForward(made[f"{module}.linear_fc1.weight"], made[f"{module}.linear_fc2.weight"])


def _experts(made: Mapping[str, Tensor]) -> ExpertWeights:
    """Returns the weights of the router, the experts and, if there is one, the shared expert. `made`: the layer's
    allocated parameters by name.
    """
    fc1, fc2 = (f"mlp.experts.local_experts.{EXPERT}.linear_{fc}." for fc in ("fc1", "fc2"))
    shared = None
    if "mlp.shared_experts.linear_fc1.weight" in made:
        gate = made.get("mlp.shared_experts.gate_weight")
        shared = SharedExpert(gate, _feed_forward(made, "mlp.shared_experts"))
    router, up, down = (made[f"{name}weight"] for name in ("mlp.router.", fc1, fc2))
    a, b, c, d = (made.get(f"{name}bias") for name in ("mlp.router.expert_", "mlp.router.", fc1, fc2))
    return ExpertWeights(router, up, down, shared, bias=a, router_bias=b, gate_up_bias=c, down_bias=d)


def _latents(made: Mapping[str, Tensor]) -> Latents:
    """Returns the projections of latent attention (MLA). `made`: the layer's allocated parameters by name."""
    whole = made.get("self_attention.linear_q_proj.weight")
    return Latents(
        down=made["self_attention.linear_kv_down_proj.weight"],
        norm=made["self_attention.kv_layernorm.weight"],
        up=made["self_attention.linear_kv_up_proj.weight"],
        query_down=made.get("self_attention.linear_q_down_proj.weight"),
        query_norm=made.get("self_attention.q_layernorm.weight"),
        query=made["self_attention.linear_q_up_proj.weight"] if whole is None else whole,
    )
