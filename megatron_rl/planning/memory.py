"""Bytes of one trainer GPU: weights, gradients, optimizer, activations, the output layer's workspace. As megatron/ allocates them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import Model
from megatron_rl.planning.hardware import GIB
from megatron_rl.planning.shapes import Parallel, Shape, counts, stage_layers

GRADIENT = 4  # bytes of a parameter: summed in float32
MOMENTS, MASTER = 8, 4  # bytes of a parameter, shared by the ranks that hold it; float32 weights are their own masters
CHUNK = 1 << 27  # logits held at once on a GPU: megatron/forward.py
CONTEXT = 2.5 * GIB  # CUDA context, NCCL's buffers, libraries
WHOLE = "layer"  # recomputed from its input on
FRAGMENTS = 0.04  # of the GPU, lost to the allocator


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """How numbers are kept: bytes of a weight and of an activation, and what a norm keeps of each element for its backward pass."""

    width: int
    norm: int

    @classmethod
    def gpu(cls, dtype: str) -> Numbers:
        """Fused norms keep their input alone."""
        width = {"bfloat16": 2, "float32": 4}[dtype]
        return cls(width=width, norm=width)

    @classmethod
    def cpu(cls, dtype: str) -> Numbers:
        """torch's norm on a CPU keeps its input and the normalised one, both as float32."""
        return cls(width={"bfloat16": 2, "float32": 4}[dtype], norm=8)


@dataclass(frozen=True, kw_only=True)
class Micro:
    """What one rank has under way."""

    tokens: int  # of a micro-batch, before context parallelism splits it
    count: int = 1 << 20  # micro-batches of an optimizer step
    recompute: frozenset[str] = (
        frozenset()
    )  # what the backward pass computes again: WHOLE, or modules of a layer (config.Model)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Bytes that one rank of a role holds while it trains. Asleep only the weights are left on the GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float  # of the output layer: logits in chunks, its gradient
    swapped: float  # the live weights' copy while the reference's are in their place

    @property
    def resident(self) -> float:
        """Held also between two micro-batches."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        return self.resident + self.workspace + max(self.activations, self.swapped)


def recomputed(model: Model) -> frozenset[str]:
    """For Micro.recompute."""
    modules = frozenset({"none": (), "selective": model.recompute_modules, "full": (WHOLE,)}[model.recompute])
    return modules | {"shared_experts"} if "moe" in modules else modules  # they are a part of it


def training(
    shape: Shape, parallel: Parallel, micro: Micro, numbers: Numbers, *, stage: int, reference: bool = False
) -> Training:
    """Of a rank of pipeline stage `stage`."""
    held = counts(shape, parallel, stage)
    weights = float(numbers.width * held.all)
    return Training(
        weights=weights,
        gradients=float(GRADIENT * held.all),
        optimizer=optimizer_bytes(shape, parallel, numbers, stage=stage),
        activations=activations(shape, parallel, micro, numbers, stage=stage),
        workspace=workspace(shape, parallel, micro, numbers) if stage == parallel.pp - 1 else 0.0,
        swapped=weights + layer_bytes(shape, parallel, micro.tokens, numbers) if reference else 0.0,
    )


def worst(shape: Shape, parallel: Parallel, micro: Micro, numbers: Numbers, *, reference: bool = False) -> Training:
    """Of the stage that needs the most."""
    stages = {0, parallel.pp // 2, parallel.pp - 1}  # those between are alike but for micro-batches under way
    return max(
        (training(shape, parallel, micro, numbers, stage=s, reference=reference) for s in stages),
        key=lambda found: found.peak,
    )


def optimizer_bytes(shape: Shape, parallel: Parallel, numbers: Numbers, *, stage: int) -> float:
    """Moments, and the masters of weights that are not float32; each rank's share of them (ZeRO-1)."""
    held = counts(shape, parallel, stage)
    each = MOMENTS + (0 if numbers.width == 4 else MASTER)
    return each * (held.dense / (parallel.dp * parallel.cp) + held.expert / parallel.expert_dp)


def activations(shape: Shape, parallel: Parallel, micro: Micro, numbers: Numbers, *, stage: int) -> float:
    """What the forward passes of the micro-batches under way keep for their backward passes, at its peak."""
    layers, h = len(stage_layers(shape.sizes, parallel)[stage]), shape.sizes.hidden
    whole = layer_bytes(shape, parallel, micro.tokens, numbers)
    if WHOLE in micro.recompute:
        kept, again = numbers.width * h * _stream(parallel, micro.tokens), whole
    else:
        again = sum(module_bytes(shape, parallel, micro.tokens, numbers).get(name, 0.0) for name in micro.recompute)
        kept = whole - again
    under_way = _under_way(parallel, micro.count, stage) * layers * kept
    outside = _ends(shape, parallel, micro.tokens, numbers) if stage == parallel.pp - 1 else 0.0
    return under_way + max(outside, again)  # the end of the model is done with when something is computed a second time


def layer_bytes(shape: Shape, parallel: Parallel, tokens: int, numbers: Numbers) -> float:
    """What one layer keeps of `tokens` tokens. docs/plan.md has the terms in a table."""
    sizes, w = shape.sizes, numbers.width
    own, stream = tokens / parallel.cp, _stream(parallel, tokens)
    q, kv = sizes.heads * sizes.head_dim / parallel.tp, sizes.kv_heads * sizes.head_dim / parallel.tp
    norms = (
        2 * stream * (sizes.hidden * (numbers.norm + w) + 4)
    )  # what they keep, and their outputs, which the products behind them keep
    attention = own * (
        w * (3 * q + 2 * kv) + 4 * sizes.heads / parallel.tp
    )  # q, k, v, what comes out, and that again for the next product
    if sizes.qk_norm:
        copied = q if sizes.kv_heads > parallel.tp else 0  # one group of heads is a view of the joined projection
        normed = (numbers.norm - w if numbers.norm > w else 0) * (q + kv)
        attention += own * (w * (q + 2 * kv + copied) + normed + 4 * (sizes.heads + sizes.kv_heads) / parallel.tp)
    return norms + attention + sum(module_bytes(shape, parallel, tokens, numbers).values())


def module_bytes(shape: Shape, parallel: Parallel, tokens: int, numbers: Numbers) -> dict[str, float]:
    """Of `layer_bytes`, what is not kept when a module is computed again. Nothing for core_attn: kernels keep no scores, and its
    inputs are kept in the place of what it keeps."""
    sizes, own, w = shape.sizes, tokens / parallel.cp, numbers.width
    if not sizes.experts:
        return {"mlp": own * w * 3 * sizes.ffn / parallel.tp}
    shared = own * w * 3 * sizes.shared_ffn / parallel.tp + (
        _stream(parallel, tokens) * w * sizes.hidden if sizes.shared_ffn else 0.0
    )
    return {"moe": _experts(shape, parallel, tokens, numbers), "shared_experts": shared}


def workspace(shape: Shape, parallel: Parallel, micro: Micro, numbers: Numbers) -> float:
    """Of the output layer's backward pass, the larger one: chunks of log-probs, their gradient, and the weight's gradient."""
    rows, tokens = shape.sizes.vocab / parallel.tp, micro.tokens / parallel.cp
    chunk = min(rows * tokens, CHUNK)
    return (
        chunk * (4 + 4 + numbers.width)
        + rows * shape.sizes.hidden * (4 + 2 * numbers.width)
        + numbers.width * tokens * shape.sizes.hidden
    )


def _experts(shape: Shape, parallel: Parallel, tokens: int, numbers: Numbers) -> float:
    """Router, the tokens sent to this rank's experts (as many as it has itself, times those each sees, when they are balanced)."""
    sizes, w, stream = shape.sizes, numbers.width, _stream(parallel, tokens)
    sent = stream * shape.active * parallel.etp
    wide = sizes.expert_ffn / parallel.etp
    router = stream * (sizes.experts * 9 + shape.active * 24) + (
        0 if w == 4 else 4 * stream * sizes.hidden
    )  # its input as float32
    return router + sent * (w * (sizes.hidden + 4 * wide) + 4)


def _ends(shape: Shape, parallel: Parallel, tokens: int, numbers: Numbers) -> float:
    """The last norm, its output, and the rows whose log-probabilities are asked for."""
    stream, own, h = _stream(parallel, tokens), tokens / parallel.cp, shape.sizes.hidden
    return stream * h * numbers.norm + own * numbers.width * h


def _stream(parallel: Parallel, tokens: int) -> float:
    """Tokens of a micro-batch in one rank's residual stream."""
    return tokens / parallel.cp / (parallel.tp if parallel.sequence_parallel else 1)


def _under_way(parallel: Parallel, count: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of its whole share of the layers (1F1B, interleaved or not)."""
    if parallel.vpp == 1:
        return min(count, parallel.pp - stage)
    warm_up = 2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1
    return min(count * parallel.vpp, warm_up) / parallel.vpp
