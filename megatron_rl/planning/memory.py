"""Estimates the bytes that training allocates on one GPU, as the code in megatron_rl/megatron/ allocates them.

The bytes hold weights, gradients, optimizer state, activations and the output layer's workspace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_rl.config.model import WEIGHT_BYTES, Lora, Model, RoleConfig
from megatron_rl.models.lora_targets import adapted
from megatron_rl.models.shape import Shape
from megatron_rl.planning.hardware import GIB
from megatron_rl.weights.counting import Parallel, adapter_elements, counts, stage_layers

GRADIENT = 4  # bytes of the gradient per parameter, accumulated in float32
# Bytes of the optimizer state per parameter: Adam's moments, and the float32 master weight.
# The state is sharded over the ranks that hold the parameter. float32 weights have no separate master weight.
MOMENTS, MASTER = 8, 4
# Number of logits that a GPU holds at once without Triton kernels, as in megatron/vocab_statistics.py.
# With Triton kernels, a GPU needs fewer bytes in total: it holds more logits, but no other tensors of their size.
CHUNK = 1 << 27
# bytes of the buffer through which trained weights and the frozen reference model's weights are exchanged,
# as in megatron/offload.py
EXCHANGE = 1 << 28
CONTEXT = 2.5 * GIB  # bytes of GPU memory for the CUDA context, NCCL's buffers and libraries
WHOLE = "layer"  # value of `recompute` for recomputing a whole layer from its input
FRAGMENTS = 0.04  # share of the GPU's memory that fragmentation in the allocator makes unusable
# Activation function -> number of tensors of feed-forward width that a gated MLP saves for its backward pass.
GATE_KEEPS = {"silu": 3, "gelu_tanh": 4, "clamped_silu": 7}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number of bytes per element of the weights, and of the tensors that a device keeps for the backward pass."""

    width: int  # bytes of a weight and of an activation
    norm: int  # bytes per element that a norm keeps for its backward pass
    attended: int  # bytes per element that attention keeps: queries, keys, values and the output
    pads_values: bool = False  # whether values are padded to the head size of keys, as torch's CPU kernels need

    @classmethod
    def gpu(cls, dtype: str) -> Precision:
        """Returns the bytes per element on a GPU for weights of a dtype. Fused norms on a GPU keep only their input."""
        width = WEIGHT_BYTES[dtype]
        return cls(width=width, norm=width, attended=width)

    @classmethod
    def cpu(cls, dtype: str) -> Precision:
        """Returns the bytes per element on a CPU for weights of a dtype.

        On a CPU, torch's norm keeps its input and the normalised input, both as float32. Attention to less than about
        400 tokens is computed in float32 (megatron/attention.py).
        """
        return cls(width=WEIGHT_BYTES[dtype], norm=8, attended=4, pads_values=True)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoad:
    """The micro-batches that one rank trains on, and the parts of a layer that the backward pass recomputes."""

    tokens: int  # number of tokens of a micro-batch before context parallelism splits it
    count: int = 1 << 20  # number of micro-batches per optimizer step
    # what the backward pass recomputes: WHOLE, or names of modules of a layer (config.schema.Model.recompute_modules)
    recompute: frozenset[str] = frozenset()
    # number of prompt tokens that a micro-batch skips, because another sample in the micro-batch has the same prompt
    # Attention keeps keys and values for the skipped tokens too.
    behind: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """The bytes that one rank holds for a role while the role trains. If the role sleeps (is offloaded while another
    role trains), only the weights stay on the GPU.
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0  # bytes that the output layer needs: chunks of logits, and gradients
    # bytes of a forward pass of the reference model, and of the buffer through which its weights are swapped in
    swapped: float = 0.0

    @property
    def resident(self) -> float:
        """Returns the bytes that stay allocated between two micro-batches: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        return self.resident + self.workspace + max(self.activations, self.swapped)


def recomputed(model: Model) -> frozenset[str]:
    """Returns the parts of a layer that the backward pass recomputes under a model's settings, in the format of
    MicroBatchLoad.recompute.
    """
    modules = frozenset({"none": (), "selective": model.recompute_modules, "full": (WHOLE,)}[model.recompute])
    return modules | {"shared_experts"} if "moe" in modules else modules  # "moe" includes shared experts


class Actor(NamedTuple):
    """A model in the trainer: its shape, its layout on the ranks, the bytes of its elements, and its LoRA settings
    (None if the whole model is trained).
    """

    shape: Shape
    parallel: Parallel
    numbers: Precision
    lora: Lora | None = None

    @classmethod
    def of(cls, role: RoleConfig, shape: Shape, ranks: int) -> Actor:
        """Returns the model of a role on `ranks` GPUs. Raises ConfigError if the layout does not divide the ranks."""
        parallel = Parallel.of(role.layout, ranks, experts=bool(shape.sizes.experts))
        return cls(shape, parallel, Precision.gpu(role.model.dtype), role.lora)

    def held(self, stage: int) -> int:
        """Returns the number of parameters on a rank of pipeline stage `stage`, without LoRA adapters."""
        return counts(self.shape, self.parallel, stage).all

    def adapters(self, stage: int) -> int:
        """Returns the number of LoRA parameters on a rank of pipeline stage `stage`."""
        return 0 if self.lora is None else adapter_elements(self.shape, self.parallel, self.lora, stage)


def resident(actor: Actor, stage: int, *, shared: bool = False) -> TrainingBytes:
    """Returns the bytes that a rank of pipeline stage `stage` holds between two micro-batches. `shared`: whether the
    role's adapters are on the base model of another role, which is counted there (models.lora_targets.owners).
    """
    held, added = actor.held(stage), actor.adapters(stage)
    return TrainingBytes(
        weights=float(actor.numbers.width * (added if shared else held + added)),
        gradients=float(GRADIENT * (held if actor.lora is None else added)),
        optimizer=optimizer_bytes(actor, stage),
    )


def training(
    actor: Actor, load: MicroBatchLoad, *, stage: int, reference: bool = False, shared: bool = False
) -> TrainingBytes:
    """Returns the bytes that a rank of pipeline stage `stage` holds in training. `reference`: whether the role has a
    reference model. `shared`: see `resident`.
    """
    return replace(
        resident(actor, stage, shared=shared),
        activations=activations(actor, load, stage),
        workspace=workspace(actor, load) if stage == actor.parallel.pp - 1 else 0.0,
        swapped=_reference(actor, load.tokens) if reference else 0.0,
    )


def worst(actor: Actor, load: MicroBatchLoad, *, reference: bool = False, shared: bool = False) -> TrainingBytes:
    """Returns the bytes that a rank holds in training, for the pipeline stage with the highest peak. `reference`,
    `shared`: see `training`."""
    stages = {
        0,
        actor.parallel.pp // 2,
        actor.parallel.pp - 1,
    }  # the other stages differ from one of these only in the number of micro-batches in flight
    estimates = (training(actor, load, stage=stage, reference=reference, shared=shared) for stage in stages)
    return max(estimates, key=lambda estimate: estimate.peak)


def optimizer_bytes(actor: Actor, stage: int) -> float:
    """Returns the bytes of a rank's shard (ZeRO-1) of the optimizer state: Adam's moments and the float32 master
    weights. float32 weights have no separate master weights.
    """
    parallel, element_bytes = actor.parallel, MOMENTS + (0 if actor.numbers.width == 4 else MASTER)
    replicas = parallel.dp * parallel.cp
    if actor.lora is not None:
        return element_bytes * actor.adapters(stage) / replicas
    held = counts(actor.shape, parallel, stage)
    return element_bytes * (held.dense / replicas + held.expert / parallel.expert_dp)


def activations(actor: Actor, load: MicroBatchLoad, stage: int) -> float:
    """Returns the peak bytes of activations that a rank keeps for the backward passes of the micro-batches in
    flight."""
    shape, parallel, numbers, lora = actor
    layers, again, held = stage_layers(shape.sizes, parallel)[stage], 0.0, 0.0
    if lora is not None:  # a frozen norm does not keep its normalised input
        numbers = replace(numbers, norm=min(numbers.norm, 4))
    actor = actor._replace(numbers=numbers)
    sizes = shape.sizes  # next lines: heads on this rank and width of a value, for keys and values of shared prompts
    heads = (sizes.heads if sizes.kv_rank else sizes.kv_heads) / parallel.tp
    value = sizes.head_dim if numbers.pads_values else sizes.value_width
    for like, number in Counter(map(sizes.is_sparse, layers)).items():
        layer_total = layer_bytes(actor, load.tokens, sparse=like)
        # add A x, which an adapter B A x keeps; its input x is counted already, although frozen matrices keep no input
        adapters = 0 if lora is None else len(adapted(shape.sizes, layers[0], lora)) * lora.rank
        layer_total += numbers.width * adapters * load.tokens / parallel.cp
        seen = numbers.attended * load.behind * heads * (sizes.head_dim + value)
        layer_total += seen
        if WHOLE in load.recompute:
            kept, recomputed_bytes = numbers.width * shape.sizes.hidden * _stream(parallel, load.tokens), layer_total
        else:
            parts = module_bytes(actor, load.tokens, sparse=like) | {"core_attn": seen}
            recomputed_bytes = sum(parts.get(name, 0.0) for name in load.recompute)
            kept = layer_total - recomputed_bytes
        held, again = held + number * kept, max(again, recomputed_bytes + _sinks(actor, load.tokens))
    under_way = _under_way(parallel, load.count, stage) * held
    outside = _ends(actor, load.tokens) if stage == parallel.pp - 1 else 0.0
    return under_way + max(
        outside, again
    )  # maximum, not sum: the activations after the last layer are freed before layers are recomputed


def _reference(actor: Actor, tokens: int) -> float:
    """Returns the bytes of a forward pass of the reference model: one layer, and the buffer for swapping its weights
    with the live weights.
    """
    shape, parallel, numbers, _ = actor
    sizes = shape.sizes
    largest = numbers.width * sizes.vocab * sizes.hidden / parallel.tp
    kinds = {sizes.is_sparse(number) for number in (0, sizes.num_layers - 1)}
    return min(largest, EXCHANGE) + max(layer_bytes(actor, tokens, sparse=kind) for kind in kinds)


def layer_bytes(actor: Actor, tokens: int, *, sparse: bool) -> float:
    """Returns the bytes of activations that one layer keeps for the backward pass over `tokens` tokens.
    docs/how_to/plan.md has a table of the terms.

    `sparse`: whether the layer has experts.
    """
    shape, parallel, numbers, _ = actor
    sizes, w, stream = shape.sizes, numbers.width, _stream(parallel, tokens)
    # matrix products keep their inputs, and norms keep their inputs too
    kept = max(numbers.norm, 4) if shape.features.norm_from_one else numbers.norm  # these norms compute in float32
    norms = 2 * stream * sizes.hidden * w
    if shape.features.norms_before:
        norms += 2 * stream * (sizes.hidden * kept + 4)
    if shape.features.norms_after:  # outputs of norms after a block are added to the residual stream and not kept
        norms += 2 * stream * (sizes.hidden * kept + 4)
    attention = _latent if sizes.kv_rank else _attention
    modules = module_bytes(actor, tokens, sparse=sparse)
    return norms + attention(actor, tokens) + sum(modules.values())


def _latent(actor: Actor, tokens: int) -> float:
    """Returns the bytes that latent attention (MLA) keeps for the backward pass: queries, keys, values, the output, and
    the inputs of the latents' norms.
    """
    shape, parallel, numbers, _ = actor
    sizes, w, rank_tokens, stream = shape.sizes, numbers.width, tokens / parallel.cp, _stream(parallel, tokens)
    heads, value = sizes.heads / parallel.tp, max(sizes.value_dim, sizes.head_dim if numbers.pads_values else 0)
    ranks = sizes.kv_rank + sizes.q_rank
    low = stream * (ranks * (numbers.norm + w) + 4 * (2 if sizes.q_rank else 1) + w * sizes.rope_dim)
    attended = numbers.attended * (2 * sizes.head_dim + 2 * value)
    return low + rank_tokens * heads * (attended + w * sizes.value_dim + 4)


def _attention(actor: Actor, tokens: int) -> float:
    """Returns the bytes that attention keeps for the backward pass: q, k, v and the output, and the output once more as
    input of the output projection.
    """
    shape, parallel, numbers, _ = actor
    sizes, w, rank_tokens = shape.sizes, numbers.width, tokens / parallel.cp
    q, kv = sizes.heads * sizes.head_dim / parallel.tp, sizes.kv_heads * sizes.head_dim / parallel.tp
    attention = rank_tokens * (numbers.attended * (2 * q + 2 * kv) + w * q + 4 * sizes.heads / parallel.tp)
    if shape.features.sinks:  # keeps only its inputs, see sdpa.py
        attention = rank_tokens * w * (2 * q + 2 * kv)
    if shape.features.qk_norm or shape.features.qk_norm_joint:
        copied = q if sizes.kv_heads > parallel.tp else 0  # with one query group on this rank, q is a view, not a copy
        attention += rank_tokens * w * (q + 2 * kv + copied)
    if shape.features.qk_norm:
        normed = (numbers.norm - w if numbers.norm > w else 0) * (q + kv)
        attention += rank_tokens * (normed + 4 * (sizes.heads + sizes.kv_heads) / parallel.tp)
    if shape.features.qk_norm_joint:  # the norms of q and k each keep their unconverted input and one float32 per token
        attention += rank_tokens * 4 * 2
    return attention


def _sinks(actor: Actor, tokens: int) -> float:
    """Returns the bytes that attention with sinks (sdpa.py) needs while the backward pass recomputes it in one layer.

    The bytes are those of the mask, as booleans and as numbers, and of the keys and values, which are repeated for
    every query head. The mask is assumed to have its maximum size, as for a row that is filled by a single sequence.
    """
    shape, parallel, numbers, _ = actor
    if not shape.features.sinks:
        return 0.0
    width = 3 * shape.sizes.heads * (shape.sizes.head_dim + 8) / parallel.tp
    return tokens / parallel.cp * (tokens * (1 + numbers.width) + numbers.width * width)


def module_bytes(actor: Actor, tokens: int, *, sparse: bool) -> dict[str, float]:
    """Returns {module: bytes of activations that a layer does not keep if the module is recomputed}.

    The module core_attn (the attention kernel) is not included, because recomputing it saves almost no memory: the
    kernel keeps no attention scores, and its inputs must be kept for the recomputation. The gathered keys and values of
    shared prompts are not included either, because `activations` counts them.
    """
    shape, parallel, numbers, _ = actor
    sizes, rank_tokens, w = shape.sizes, tokens / parallel.cp, numbers.width
    if not sparse:
        widths = GATE_KEEPS[shape.features.activation]
        return {"mlp": rank_tokens * w * widths * sizes.ffn / parallel.tp}
    shared = rank_tokens * w * 3 * sizes.shared_ffn / parallel.tp
    shared += _stream(parallel, tokens) * w * sizes.hidden if sizes.shared_ffn else 0.0
    return {"moe": _experts(actor, tokens), "shared_experts": shared}


def workspace(actor: Actor, load: MicroBatchLoad) -> float:
    """Returns the bytes of the output layer's backward pass, which needs more memory than the forward pass.

    The bytes are those of a chunk of log-probs, the gradient of this chunk, and the gradient of the output layer's
    weight, which is absent if the weight is frozen. A value or reward head needs only the hidden states and their
    gradient, both in float32.
    """
    shape, parallel, numbers, lora = actor
    rows, tokens = shape.sizes.vocab / parallel.tp, load.tokens / parallel.cp
    if shape.sizes.head is not None:
        return 2 * 4 * tokens * shape.sizes.hidden
    chunk = min(rows * tokens, CHUNK)
    gradient = rows * shape.sizes.hidden * (4 + 2 * numbers.width) if lora is None else 0.0
    return chunk * (4 + 4 + numbers.width) + gradient + numbers.width * tokens * shape.sizes.hidden


def _experts(actor: Actor, tokens: int) -> float:
    """Returns the bytes of activations that the router and the experts of a rank keep.

    The experts are assumed to be balanced. A rank then receives as many tokens as it sends: its tokens times the number
    of experts per token.
    """
    shape, parallel, numbers, _ = actor
    sizes, w, stream = shape.sizes, numbers.width, _stream(parallel, tokens)
    sent = stream * shape.active * parallel.etp
    wide = sizes.expert_ffn / parallel.etp
    # the router keeps its input as float32
    router = stream * (sizes.experts * 9 + shape.active * 24) + (0 if w == 4 else 4 * stream * sizes.hidden)
    widths = GATE_KEEPS[shape.features.activation] + 1  # + 1 for the gated activation multiplied by the routing score
    return router + sent * (w * (sizes.hidden + widths * wide) + 4)


def _ends(actor: Actor, tokens: int) -> float:
    """Returns the bytes of activations that the last pipeline stage keeps outside its layers: those of the final norm,
    and the hidden states from which log-probs are computed.
    """
    stream, rank_tokens, h = _stream(actor.parallel, tokens), tokens / actor.parallel.cp, actor.shape.sizes.hidden
    return stream * h * actor.numbers.norm + rank_tokens * actor.numbers.width * h


def _stream(parallel: Parallel, tokens: int) -> float:
    """Returns the number of tokens of a micro-batch that are in the residual stream of one rank."""
    return tokens / parallel.cp / (parallel.tp if parallel.sequence_parallel else 1)


def _under_way(parallel: Parallel, count: int, stage: int) -> float:
    """Returns the number of micro-batches whose activations a pipeline stage holds at once.

    The pipeline schedule is 1F1B, interleaved if `vpp` > 1. In the interleaved schedule, a micro-batch in one of the
    stage's `vpp` chunks of layers counts as 1 / `vpp`.
    """
    if parallel.vpp == 1:
        return min(count, parallel.pp - stage)
    warm_up = 2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1
    return min(count * parallel.vpp, warm_up) / parallel.vpp
