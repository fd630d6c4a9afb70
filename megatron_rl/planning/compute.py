"""Seconds of a model's passes on given GPUs: training, log-probabilities, generation, refit. Bytes and operations over rates."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from megatron_rl.planning import shapes
from megatron_rl.planning.hardware import EXPERT_HBM_SHARE, HBM_SHARE, HOST, NETWORK_SHARE, NVLINK_SHARE, Cluster
from megatron_rl.planning.memory import GRADIENT, MASTER, MOMENTS, WHOLE, Numbers
from megatron_rl.planning.shapes import Parallel, Shape
from megatron_rl.planning.workload import Draw

STEP_S = 1.5e-3  # of a decoding step on the host, beside the GPU's work
ROW_S = 20e-6  # of a decoding step for each sequence in it: scheduling, sampling, text
REDUCE_S = 12e-6  # of one all-reduce of few bytes
FAR_REDUCE_S = 120e-6  # of one between nodes
EXPERTS_S = 0.5e-3  # of a layer with experts and pass on the host: it waits to know how many tokens come
MICRO_S = 15e-3  # of one micro-batch on the host: packing, positions, transfer, loss
PARTIAL = 0.85  # of Device.dense_share: rollouts' packed sequences are of many lengths, micro-batches are not all full
SMALL = 2048  # tokens of a micro-batch and rank below which products lose half of their speed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a pass goes over: sequences of `length` tokens in the mean, in micro-batches of up to `micro_tokens`, which cp splits."""

    sequences: int
    length: float
    micro_tokens: int
    full: bool = False  # equal lengths, full micro-batches: pre-training

    @property
    def tokens(self) -> float:
        return self.sequences * self.length

    def micro_batches(self, parallel: Parallel) -> int:
        """Of one replica."""
        per_replica = self.tokens / parallel.dp
        return max(1, math.ceil(per_replica / max(self.length, self.micro_tokens)))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Servers, or the engines inside the ranks, of one role: `replicas` of `tp` GPUs."""

    replicas: int
    tp: int
    max_batch: int
    kv_bytes: float  # of one GPU, for keys and values
    expert_parallel: bool = False
    compiled: bool = True  # a server's kernels; false: plain torch, a kernel for every operation


def forward_flops(shape: Shape, length: float) -> tuple[float, float, float]:
    """Of one token in a sequence of `length` -> (dense layers with attention, experts, output layer)."""
    sizes = shape.sizes
    head = 2.0 * sizes.vocab * sizes.hidden
    experts = 2.0 * sizes.num_layers * shape.active * 3 * sizes.hidden * sizes.expert_ffn
    dense = 2.0 * shapes.active(shape) - head - experts
    attention = (
        2.0 * sizes.num_layers * sizes.heads * sizes.head_dim * length
    )  # causal: half of 4 * heads * head_dim * length
    return dense + attention, experts, head


def train_flops(shape: Shape, batch: Batch) -> float:
    """Of a forward and backward pass, recomputation left out: the model's own."""
    return 3 * sum(forward_flops(shape, batch.length)) * batch.tokens


def pass_seconds(
    shape: Shape, parallel: Parallel, cluster: Cluster, batch: Batch, *, backward: bool, recompute: Collection[str] = ()
) -> float:
    """Of one pass over the batch: products, communication within and between layers, the pipeline's bubble. No optimizer."""
    count = batch.micro_batches(parallel)
    tokens = batch.tokens / parallel.dp / count
    layers = layer_seconds(shape, parallel, cluster, batch, tokens) * (3 if backward else 1)
    layers += recomputed_seconds(shape, parallel, cluster, batch, tokens, recompute) if backward else 0.0
    head = _head_seconds(shape, parallel, cluster, tokens) * (
        4 if backward else 1
    )  # the backward pass computes its logits again
    stage = (
        layers * shape.sizes.num_layers / parallel.pp
        + head
        + MICRO_S * (0 if batch.full else 1)
        + _hop(shape, parallel, cluster, tokens)
    )
    return (count + (parallel.pp - 1) / parallel.vpp) * stage


def layer_seconds(shape: Shape, parallel: Parallel, cluster: Cluster, batch: Batch, tokens: float) -> float:
    """One layer's forward pass over a micro-batch of `tokens` tokens."""
    dense, _, _ = forward_flops(shape, batch.length)
    own = tokens / parallel.cp
    seconds = own * dense / shape.sizes.num_layers / parallel.tp / _dense_rate(cluster, batch, own)
    return (
        seconds + _tensor_seconds(shape, parallel, cluster, own) + _routed_seconds(shape, parallel, cluster, batch, own)
    )


def recomputed_seconds(
    shape: Shape, parallel: Parallel, cluster: Cluster, batch: Batch, tokens: float, modules: Collection[str]
) -> float:  # fmt: skip
    """What a layer's backward pass computes again; `modules` as in memory.Micro. Sums over tensor-parallel ranks count with WHOLE alone."""
    if WHOLE in modules:
        return layer_seconds(shape, parallel, cluster, batch, tokens)
    sizes, own = shape.sizes, tokens / parallel.cp
    flops = {
        "core_attn": 2.0 * sizes.heads * sizes.head_dim * batch.length,
        "mlp": 0.0 if sizes.experts else 2.0 * 3 * sizes.hidden * sizes.ffn,
        "shared_experts": 2.0 * 3 * sizes.hidden * sizes.shared_ffn,
    }
    dense = sum(flops.get(name, 0.0) for name in modules)
    routed = _routed_seconds(shape, parallel, cluster, batch, own) if "moe" in modules else 0.0
    return own * dense / parallel.tp / _dense_rate(cluster, batch, own) + routed


def _routed_seconds(shape: Shape, parallel: Parallel, cluster: Cluster, batch: Batch, own: float) -> float:
    """One layer's experts, with the tokens' way to them and back; 0 without experts."""
    _, experts, _ = forward_flops(shape, batch.length)
    if not experts:
        return _expert_seconds(shape, parallel, cluster, own)
    rate = cluster.device.flops * cluster.device.expert_share * _share(batch, own)
    return (
        own * experts / shape.sizes.num_layers / parallel.tp / rate
        + EXPERTS_S
        + _expert_seconds(shape, parallel, cluster, own)
    )


def _dense_rate(cluster: Cluster, batch: Batch, own: float) -> float:
    return cluster.device.flops * cluster.device.dense_share * _share(batch, own)


def _share(batch: Batch, own: float) -> float:
    """Of a rate, what micro-batches of unequal sequences and few tokens leave."""
    fill = (own / (own + SMALL)) / (8192 / (8192 + SMALL)) if own < 8192 else 1.0
    return 1.0 if batch.full else PARTIAL * fill


def optimizer_seconds(shape: Shape, parallel: Parallel, cluster: Cluster, numbers: Numbers) -> float:
    """Gradients summed over replicas, Adam on this rank's share, weights gathered. Not overlapped with the backward pass."""
    stage = shapes.heaviest(shape, parallel)
    held, replicas = shapes.counts(shape, parallel, stage), parallel.dp * parallel.cp
    seconds = 0.0
    for number, ranks, stride in (
        (held.dense, replicas, parallel.tp),
        (held.expert, parallel.expert_dp, parallel.ep * parallel.etp),
    ):
        wire = number * (GRADIENT + numbers.width) * (ranks - 1) / ranks
        seconds += wire / cluster.link(ranks, stride)
        seconds += (
            number / ranks * (2 * (MOMENTS + MASTER) + GRADIENT + numbers.width) / (cluster.device.hbm * HBM_SHARE)
        )
    return seconds + held.all * GRADIENT / (cluster.device.hbm * HBM_SHARE) * 2  # zeroed, and their norm


def host_seconds(size: float) -> float:
    """Of `size` bytes of one GPU over its link to the host."""
    return size / HOST


def decode_step_seconds(
    shape: Shape, engine: Engine, cluster: Cluster, *, rows: float, context: float, width: int
) -> float:
    """One token for each of `rows` sequences with `context` tokens in the mean. Bound by memory for few, by operations for many."""
    sizes, device = shape.sizes, cluster.device
    outside = shapes.active(shape) - sizes.num_layers * shape.active * 3 * sizes.hidden * sizes.expert_ffn
    weights = float(outside)
    if sizes.experts:
        touched = 1 - (1 - shape.active / sizes.experts) ** rows
        experts = touched * sizes.num_layers * sizes.experts * 3 * sizes.hidden * sizes.expert_ffn
        weights += experts * HBM_SHARE / EXPERT_HBM_SHARE
    memory = (width * weights + rows * context * kv_bytes(shape, width)) / engine.tp / (device.hbm * HBM_SHARE)
    flops = rows * sum(forward_flops(shape, 0)) / engine.tp / (device.flops * device.dense_share)
    calls = 2 * sizes.num_layers * (0 if engine.tp == 1 else 1)
    wire = 2 * rows * sizes.hidden * width * (engine.tp - 1) / engine.tp
    link = cluster.link(engine.tp)
    own = (
        STEP_S if engine.compiled else STEP_S + sizes.num_layers * 0.25e-3
    )  # about twenty kernels a layer, each launched by hand
    return (
        max(memory, flops)
        + calls * (wire / link + (REDUCE_S if engine.tp <= cluster.per_node else FAR_REDUCE_S))
        + own
        + ROW_S * rows
    )


def kv_bytes(shape: Shape, width: int) -> int:
    """Keys and values of one token, of all layers."""
    return 2 * width * shape.sizes.num_layers * shape.sizes.kv_heads * shape.sizes.head_dim


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How long a role's completions take, and with how many at once."""

    seconds: float
    rows: float  # decoded together at one engine
    waves: float  # how often these are filled anew


def rollout(shape: Shape, engine: Engine, cluster: Cluster, draw: Draw, *, width: int) -> Rollout:
    """`draw`, spread over the replicas. `width`: bytes of a weight."""
    prompt, response, longest = draw.prompt, draw.response, draw.longest
    own = draw.samples / engine.replicas
    heads = max(1, engine.tp // shape.sizes.kv_heads)  # key/value heads are repeated when there are fewer than ranks
    room = engine.kv_bytes * engine.tp / heads / kv_bytes(shape, width) / (prompt + response)
    rows = max(1.0, min(own, engine.max_batch, room))
    waves = own / rows
    context = prompt + response / 2
    full = decode_step_seconds(shape, engine, cluster, rows=rows, context=context, width=width)
    late = decode_step_seconds(shape, engine, cluster, rows=max(1.0, rows / 8), context=prompt + longest, width=width)
    device = cluster.device
    prefill = (
        own * prompt * sum(forward_flops(shape, prompt)[:2]) / engine.tp / (device.flops * device.dense_share * PARTIAL)
    )
    return Rollout(
        seconds=prefill + waves * response * full + max(0.0, longest - response) * late, rows=rows, waves=waves
    )


@dataclass(frozen=True, kw_only=True)
class Refit:
    """Weights on their way to a role's engines."""

    sent: float  # bytes, over all links
    seconds: float


def refit(shape: Shape, parallel: Parallel, engine: Engine, cluster: Cluster, *, width: int, together: bool) -> Refit:
    """Every engine GPU receives its slices once. `together`: the engines lie in the trainer's ranks, each the whole model."""
    device = cluster.device
    whole = float(width * shapes.total(shape))
    network, nvlink = device.network * NETWORK_SHARE, device.nvlink * NVLINK_SHARE
    if together:
        own = width * shapes.counts(shape, parallel, shapes.heaviest(shape, parallel)).all
        held = min(whole, own * min(cluster.per_node, parallel.tp * parallel.pp))  # by the GPUs of one node together
        sent = parallel.world * (whole - own)
        return Refit(
            sent=sent, seconds=(whole - held) / network + (held - own) / nvlink + own / (device.hbm * HBM_SHARE)
        )
    each = whole / engine.tp
    sent = whole * engine.replicas
    senders = sent / parallel.world
    return Refit(sent=sent, seconds=max(each, senders) / network)


def _head_seconds(shape: Shape, parallel: Parallel, cluster: Cluster, tokens: float) -> float:
    """Output layer and log-probabilities, which pass float32 logits through memory about six times."""
    rows = tokens / parallel.cp * shape.sizes.vocab / parallel.tp
    device = cluster.device
    return rows * 2 * shape.sizes.hidden / (device.flops * device.dense_share) + rows * 4 * 6 / (device.hbm * HBM_SHARE)


def _tensor_seconds(shape: Shape, parallel: Parallel, cluster: Cluster, own: float) -> float:
    """Of a layer's forward pass: two all-reduces of the residual stream, or as much gathered and scattered; rings of keys and values."""
    sizes, seconds = shape.sizes, 0.0
    if parallel.tp > 1:
        wire = 2 * own * sizes.hidden * 2 * (parallel.tp - 1) / parallel.tp
        seconds += 2 * (wire / cluster.link(parallel.tp) + REDUCE_S)
    if parallel.cp > 1:
        ring = own * 2 * sizes.kv_heads * sizes.head_dim / min(parallel.tp, sizes.kv_heads) * 2 * (parallel.cp - 1)
        seconds += ring / cluster.link(parallel.cp, parallel.tp) * 0.3  # most of it hides behind attention
    return seconds


def _expert_seconds(shape: Shape, parallel: Parallel, cluster: Cluster, own: float) -> float:
    """Of a layer's forward pass: tokens to the ranks of their experts, and back."""
    ranks = parallel.ep * parallel.etp
    if not shape.active or ranks == 1:
        return 0.0
    stream = own / (parallel.tp if parallel.sequence_parallel else 1)
    wire = 2 * stream * shape.active * shape.sizes.hidden * 2 * parallel.etp
    outside = max(0.0, 1 - cluster.per_node / ranks)  # of the tokens, to other nodes
    inside = (ranks - 1) / ranks - outside
    return (
        wire * (outside / (cluster.device.network * NETWORK_SHARE) + inside / (cluster.device.nvlink * NVLINK_SHARE))
        + 4 * REDUCE_S
    )


def _hop(shape: Shape, parallel: Parallel, cluster: Cluster, tokens: float) -> float:
    """A micro-batch's residual stream to the next stage; there and back."""
    if parallel.pp == 1:
        return 0.0
    size = 2 * tokens / parallel.cp * shape.sizes.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    return 2 * parallel.vpp * size / cluster.link(2, parallel.tp * parallel.cp * parallel.dp)
