"""Estimates the bytes that training takes on one GPU, as megatron/ allocates them.

They are weights, gradients, optimizer state, activations and the output layer's workspace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_rl.config.schema import Lora, Model
from megatron_rl.models.lora_targets import adapted
from megatron_rl.models.shape import Shape
from megatron_rl.planning.hardware import GIB
from megatron_rl.weights.counting import Parallel, adapter_elements, counts, stage_layers

GRADIENT = 4  # bytes of a parameter's gradient, which is summed in float32
# Bytes of a parameter's optimizer state, shared by the ranks that hold it; float32 weights are their own masters.
MOMENTS, MASTER = 8, 4
CHUNK = 1 << 27  # logits held at once on a GPU, as in megatron/vocab_statistics.py
EXCHANGE = 1 << 28  # bytes through which a reference and the live weights change places, as in megatron/offload.py
CONTEXT = 2.5 * GIB  # CUDA context, NCCL's buffers, libraries
WHOLE = "layer"  # recompute a whole layer from its input
FRAGMENTS = 0.04  # share of the GPU's memory that the allocator loses
# Activations of its width that a gate keeps for its backward pass, and the product after it.
GATE_KEEPS = {"silu": 3, "gelu_tanh": 4}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The bytes of stored numbers."""

    width: int  # bytes of a weight and of an activation
    norm: int  # bytes that a norm keeps of each element for its backward pass
    attended: int  # bytes of what attention keeps: queries, keys, values and its output
    pads_values: bool = False  # whether attention fills values up to the size of keys, as torch's on a CPU needs them

    @classmethod
    def gpu(cls, dtype: str) -> Precision:
        """Returns the bytes on a GPU, where fused norms keep their input alone."""
        width = {"bfloat16": 2, "float32": 4}[dtype]
        return cls(width=width, norm=width, attended=width)

    @classmethod
    def cpu(cls, dtype: str) -> Precision:
        """Returns the bytes on a CPU. Torch's norm keeps its input and the normalised one there, both as float32, and
        attention to less than some 400 tokens is in float32 (megatron/attention.py)."""
        return cls(width={"bfloat16": 2, "float32": 4}[dtype], norm=8, attended=4, pads_values=True)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoad:
    """The micro-batches that one rank trains on, and what it computes again for them."""

    tokens: int  # tokens of a micro-batch before context parallelism splits it
    count: int = 1 << 20  # number of micro-batches in an optimizer step
    # what the backward pass computes again: WHOLE, or modules of a layer (config.schema.Model.recompute_modules)
    recompute: frozenset[str] = frozenset()
    # tokens of prompts that stand with another sample: attention keeps their keys and values for each of its samples
    behind: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """The bytes that one rank of a role holds while it trains. Of a sleeping role only the weights stay on the GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float  # the output layer's: logits in chunks, and its gradient
    swapped: float  # a pass of the reference, and what its weights are exchanged through

    @property
    def resident(self) -> float:
        """Returns the bytes that are also held between two micro-batches."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        return self.resident + self.workspace + max(self.activations, self.swapped)


def recomputed(model: Model) -> frozenset[str]:
    """Returns what a model's settings ask to compute again, as MicroBatchLoad.recompute has it."""
    modules = frozenset({"none": (), "selective": model.recompute_modules, "full": (WHOLE,)}[model.recompute])
    return (
        modules | {"shared_experts"} if "moe" in modules else modules
    )  # shared experts are a part of the layer's experts


class Actor(NamedTuple):
    """A model in the trainer: its layout, the bytes of its numbers, and the adapters that alone are trained."""

    shape: Shape
    parallel: Parallel
    numbers: Precision
    lora: Lora | None = None

    def held(self, stage: int) -> int:
        """Returns the number of parameters of a rank of a pipeline stage, without adapters."""
        return counts(self.shape, self.parallel, stage).all

    def adapters(self, stage: int) -> int:
        """Returns the number of adapter parameters of a rank of a pipeline stage."""
        return 0 if self.lora is None else adapter_elements(self.shape, self.parallel, self.lora, stage)


def training(actor: Actor, load: MicroBatchLoad, *, stage: int, reference: bool = False) -> TrainingBytes:
    """Returns the bytes of a rank of pipeline stage `stage`."""
    held, added = actor.held(stage), actor.adapters(stage)
    return TrainingBytes(
        weights=float(actor.numbers.width * (held + added)),
        gradients=float(GRADIENT * (held if actor.lora is None else added)),
        optimizer=optimizer_bytes(actor, stage),
        activations=activations(actor, load, stage),
        workspace=workspace(actor, load) if stage == actor.parallel.pp - 1 else 0.0,
        swapped=_reference(actor, load.tokens) if reference else 0.0,
    )


def worst(actor: Actor, load: MicroBatchLoad, *, reference: bool = False) -> TrainingBytes:
    """Returns the bytes of a rank of the pipeline stage that needs the most."""
    stages = {0, actor.parallel.pp // 2, actor.parallel.pp - 1}  # the stages between differ in micro-batches under way
    found = (training(actor, load, stage=stage, reference=reference) for stage in stages)
    return max(found, key=lambda one: one.peak)


def optimizer_bytes(actor: Actor, stage: int) -> float:
    """Returns a rank's share (ZeRO-1) of the moments, and of the masters of weights that are not float32, in bytes."""
    parallel, each = actor.parallel, MOMENTS + (0 if actor.numbers.width == 4 else MASTER)
    replicas = parallel.dp * parallel.cp
    if actor.lora is not None:
        return each * actor.adapters(stage) / replicas
    held = counts(actor.shape, parallel, stage)
    return each * (held.dense / replicas + held.expert / parallel.expert_dp)


def activations(actor: Actor, load: MicroBatchLoad, stage: int) -> float:
    """Returns the peak of the bytes that forward passes under way keep for their backward passes."""
    shape, parallel, numbers, lora = actor
    layers, again, held = stage_layers(shape.sizes, parallel)[stage], 0.0, 0.0
    if lora is not None:  # a frozen norm does not keep what it has normalised
        numbers = replace(numbers, norm=min(numbers.norm, 4))
    actor = actor._replace(numbers=numbers)
    for like, number in Counter(map(shape.sizes.is_sparse, layers)).items():
        whole = layer_bytes(actor, load.tokens, sparse=like)
        # A x of every token, scaled; an adapter keeps the input of its matrix in place of the frozen matrix
        adapters = 0 if lora is None else len(adapted(shape.sizes, layers[0], lora)) * lora.rank
        whole += numbers.width * adapters * load.tokens / parallel.cp
        seen = numbers.attended * load.behind * _kept_widths(actor)
        whole += seen
        if WHOLE in load.recompute:
            kept, own = numbers.width * shape.sizes.hidden * _stream(parallel, load.tokens), whole
        else:
            parts = module_bytes(actor, load.tokens, sparse=like) | {"core_attn": seen}
            own = sum(parts.get(name, 0.0) for name in load.recompute)
            kept = whole - own
        held, again = held + number * kept, max(again, own)
    under_way = _under_way(parallel, load.count, stage) * held
    outside = _ends(actor, load.tokens) if stage == parallel.pp - 1 else 0.0
    return under_way + max(outside, again)  # the two never coincide: the model's end is freed before recomputation


def _reference(actor: Actor, tokens: int) -> float:
    """Returns the bytes of the reference's passes: one layer, and what its weights and the live ones are exchanged
    through, piece by piece."""
    shape, parallel, numbers, _ = actor
    largest = numbers.width * shape.sizes.vocab * shape.sizes.hidden / parallel.tp
    return min(largest, EXCHANGE) + _widest_layer(actor, tokens)


def _widest_layer(actor: Actor, tokens: int) -> float:
    """Returns the bytes of the layer that keeps the most."""
    sizes = actor.shape.sizes
    kinds = {sizes.is_sparse(number) for number in (0, sizes.num_layers - 1)}
    return max(layer_bytes(actor, tokens, sparse=kind) for kind in kinds)


def layer_bytes(actor: Actor, tokens: int, *, sparse: bool) -> float:
    """Returns the bytes that one layer keeps of `tokens` tokens. docs/plan.md has the terms in a table.

    `sparse`: whether it is a layer with experts.
    """
    shape, parallel, numbers, _ = actor
    sizes, w, stream = shape.sizes, numbers.width, _stream(parallel, tokens)
    # the products keep what they read, and the norms before them, and after, what they normalise
    kept = max(numbers.norm, 4) if shape.features.norm_from_one else numbers.norm  # such norms take float32
    norms = 2 * stream * sizes.hidden * w
    if shape.features.norms_before:
        norms += 2 * stream * (sizes.hidden * kept + 4)
    if shape.features.norms_after:  # what they give is added to the stream, and kept by nobody
        norms += 2 * stream * (sizes.hidden * kept + 4)
    attention = _latent if sizes.kv_rank else _attention
    modules = module_bytes(actor, tokens, sparse=sparse)
    return norms + attention(actor, tokens) + sum(modules.values())


def _latent(actor: Actor, tokens: int) -> float:
    """Returns the bytes that attention through a latent keeps: as others do, and what norms of latents keep."""
    shape, parallel, numbers, _ = actor
    sizes, w, own, stream = shape.sizes, numbers.width, tokens / parallel.cp, _stream(parallel, tokens)
    heads, value = sizes.heads / parallel.tp, max(sizes.value_dim, sizes.head_dim if numbers.pads_values else 0)
    ranks = sizes.kv_rank + sizes.q_rank
    low = stream * (ranks * (numbers.norm + w) + 4 * (2 if sizes.q_rank else 1) + w * sizes.rope_dim)
    attended = numbers.attended * (2 * sizes.head_dim + 2 * value)
    return low + own * heads * (attended + w * sizes.value_dim + 4)


def _kept_widths(actor: Actor) -> float:
    """Returns the elements of a token's keys and values that a rank's attention keeps."""
    sizes = actor.shape.sizes
    heads = (sizes.heads if sizes.kv_rank else sizes.kv_heads) / actor.parallel.tp
    return heads * (sizes.head_dim + (sizes.head_dim if actor.numbers.pads_values else sizes.value_width))


def _attention(actor: Actor, tokens: int) -> float:
    """Returns the bytes that attention keeps: q, k, v and its output, which the next product keeps again."""
    shape, parallel, numbers, _ = actor
    sizes, w, own = shape.sizes, numbers.width, tokens / parallel.cp
    q, kv = sizes.heads * sizes.head_dim / parallel.tp, sizes.kv_heads * sizes.head_dim / parallel.tp
    attention = own * (numbers.attended * (2 * q + 2 * kv) + w * q + 4 * sizes.heads / parallel.tp)
    if shape.features.qk_norm or shape.features.qk_norm_joint:
        copied = q if sizes.kv_heads > parallel.tp else 0  # one group of heads is a view of the joined projection
        attention += own * w * (q + 2 * kv + copied)
    if shape.features.qk_norm:
        normed = (numbers.norm - w if numbers.norm > w else 0) * (q + kv)
        attention += own * (normed + 4 * (sizes.heads + sizes.kv_heads) / parallel.tp)
    if shape.features.qk_norm_joint:  # its inputs as they are, and one number a token for each
        attention += own * 4 * 2
    return attention


def module_bytes(actor: Actor, tokens: int, *, sparse: bool) -> dict[str, float]:
    """Returns, by module, the part of `layer_bytes` that is not kept when the module is computed again.

    There is none for core_attn: its kernels keep no scores, and its inputs are kept in place of what it keeps. Keys and
    values of shared prompts, which it gathers, are counted in `activations`.
    """
    shape, parallel, numbers, _ = actor
    sizes, own, w = shape.sizes, tokens / parallel.cp, numbers.width
    if not sparse:
        widths = GATE_KEEPS[shape.features.activation]
        return {"mlp": own * w * widths * sizes.ffn / parallel.tp}
    shared = own * w * 3 * sizes.shared_ffn / parallel.tp
    shared += _stream(parallel, tokens) * w * sizes.hidden if sizes.shared_ffn else 0.0
    return {"moe": _experts(actor, tokens), "shared_experts": shared}


def workspace(actor: Actor, load: MicroBatchLoad) -> float:
    """Returns the bytes of the output layer's backward pass, which takes more than its forward pass.

    They are chunks of log-probs, their gradient, and the weight's gradient, which a frozen one has not.
    """
    shape, parallel, numbers, lora = actor
    rows, tokens = shape.sizes.vocab / parallel.tp, load.tokens / parallel.cp
    chunk = min(rows * tokens, CHUNK)
    gradient = rows * shape.sizes.hidden * (4 + 2 * numbers.width) if lora is None else 0.0
    return chunk * (4 + 4 + numbers.width) + gradient + numbers.width * tokens * shape.sizes.hidden


def _experts(actor: Actor, tokens: int) -> float:
    """Returns the bytes that the router and this rank's experts keep.

    With balanced experts a rank receives as many tokens as it has itself, times the experts that each token sees.
    """
    shape, parallel, numbers, _ = actor
    sizes, w, stream = shape.sizes, numbers.width, _stream(parallel, tokens)
    sent = stream * shape.active * parallel.etp
    wide = sizes.expert_ffn / parallel.etp
    # the router keeps its input as float32
    router = stream * (sizes.experts * 9 + shape.active * 24) + (0 if w == 4 else 4 * stream * sizes.hidden)
    return router + sent * (w * (sizes.hidden + 4 * wide) + 4)


def _ends(actor: Actor, tokens: int) -> float:
    """Returns the bytes that the last norm keeps, and those of the rows whose log-probabilities are asked for."""
    stream, own, h = _stream(actor.parallel, tokens), tokens / actor.parallel.cp, actor.shape.sizes.hidden
    return stream * h * actor.numbers.norm + own * actor.numbers.width * h


def _stream(parallel: Parallel, tokens: int) -> float:
    """Returns the number of a micro-batch's tokens in one rank's residual stream."""
    return tokens / parallel.cp / (parallel.tp if parallel.sequence_parallel else 1)


def _under_way(parallel: Parallel, count: int, stage: int) -> float:
    """Returns how many micro-batches' activations a stage holds at once, in units of its whole share of the layers.

    The schedule is 1F1B, interleaved or not.
    """
    if parallel.vpp == 1:
        return min(count, parallel.pp - stage)
    warm_up = 2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1
    return min(count * parallel.vpp, warm_up) / parallel.vpp
