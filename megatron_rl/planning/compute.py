"""Estimates the seconds of a model's passes on given GPUs: training, log-probabilities, generation and refit.

Every estimate divides bytes or operations by a rate of the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.schema import Lora
from megatron_rl.models.shape import Shape
from megatron_rl.planning.hardware import EXPERT_HBM_SHARE, HBM_SHARE, NETWORK_SHARE, NVLINK_SHARE, Cluster
from megatron_rl.planning.memory import GRADIENT, MASTER, MOMENTS, WHOLE, Actor
from megatron_rl.planning.workload import Draw
from megatron_rl.weights import counting, flops
from megatron_rl.weights.counting import Parallel

STEP_S = 1.5e-3  # the part of a decoding step in which the GPU waits for the host
ROW_S = 20e-6  # the host's work in a decoding step for each sequence: scheduling, inputs, text
SAMPLING_PASSES = 10  # how often sampling and log-probs move the float32 logits of a step through memory. Assumed
REDUCE_S = 12e-6  # one all-reduce of few bytes within a node
FAR_REDUCE_S = 120e-6  # one all-reduce of few bytes between nodes
EXPERTS_S = 0.5e-3  # the host's part of a pass through a layer with experts: it waits to know how many tokens come
MICRO_S = 15e-3  # the host's part of one micro-batch: packing, positions, transfer, loss
# The part of Device.dense_share that is left: rollouts differ in length, and micro-batches are not all full.
PARTIAL = 0.85
SMALL = 2048  # tokens of a micro-batch on one rank at which matrix products run at half of their speed


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """The sequences of one pass: `length` mean tokens, in micro-batches of up to `micro_tokens`, which cp splits."""

    sequences: int
    length: float
    micro_tokens: int
    full: bool = False  # all lengths are equal and all micro-batches full, as in pre-training
    prompt: float = 0.0  # tokens at the beginning of each
    told: float = 0.0  # tokens behind it that no model wrote
    per_prompt: float = 1.0  # sequences with one prompt, which is computed once for those in a micro-batch

    @property
    def repeated(self) -> float:
        """Returns the number of prompts that are not computed, because another sequence of the micro-batch has the same
        one."""
        fitting = max(1.0, (self.micro_tokens - self.prompt) // max(1.0, self.length - self.prompt))
        return max(0.0, self.sequences * (1 - math.ceil(self.per_prompt / fitting) / self.per_prompt))

    @property
    def tokens(self) -> float:
        """Returns the number of tokens that are computed."""
        return self.sequences * self.length - self.repeated * self.prompt

    @property
    def labels(self) -> float:
        """Returns the number of tokens that go through the output layer: those that a model wrote."""
        return self.sequences * (self.length - self.prompt - self.told)

    def micro_batches(self, parallel: Parallel) -> int:
        """Returns the number of micro-batches that one data-parallel replica computes."""
        per_replica = self.tokens / parallel.dp
        return max(1, math.ceil(per_replica / max(self.length, self.micro_tokens)))


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The engines of one role, as servers or inside the trainer's ranks: `replicas` engines of `tp` GPUs each."""

    replicas: int
    tp: int
    max_batch: int
    kv_bytes: float  # bytes on one GPU for keys and values
    expert_parallel: bool = False
    compiled: bool = True  # true: a server's fused kernels; false: plain torch, one kernel for every operation
    keeps_prefix: bool = True  # the keys and values of a sequence stay for its next answer, as far as there is room
    shares_prompt: bool = True  # samples with one prompt read it once, and share its keys and values
    overlapped: bool = True  # the host prepares the next decoding step while the GPU computes this one


def forward_flops(shape: Shape, length: float) -> tuple[float, float, float]:
    """Returns one token's operations in a sequence of `length`: (dense layers, experts, output layer).

    Attention is part of the dense layers.
    """
    own = flops.of_token(shape)
    attention = float(flops.attention(shape, [length])[0]) / length if length else 0.0
    return own.layers + attention, own.experts, own.head


def batch_flops(shape: Shape, batch: SequenceBatch) -> tuple[float, float, float]:
    """Returns the operations of a token that is computed, in the mean of the batch, as `forward_flops` has them."""
    own = flops.of_token(shape)
    layers = own.layers + shape.sizes.num_layers * _batch_attention_flops(shape, batch)
    return layers, own.experts, own.head * batch.labels / batch.tokens


def _batch_attention_flops(shape: Shape, batch: SequenceBatch) -> float:
    """Returns the operations in a layer's attention of a token that is computed, in the mean of batch and layers."""
    whole, prompt = flops.attention(shape, [batch.length, batch.prompt]).tolist()
    return (batch.sequences * whole - batch.repeated * prompt) / batch.tokens / shape.sizes.num_layers


def train_flops(shape: Shape, batch: SequenceBatch, lora: Lora | None = None) -> float:
    """Returns the operations of a forward and backward pass over the batch, without recomputation.

    With `lora` the model's weights are frozen and have no gradients (`flops.count`).
    """
    forward = sum(batch_flops(shape, batch)) * batch.tokens
    if lora is None:
        return 3 * forward
    scores = shape.sizes.num_layers * _batch_attention_flops(shape, batch) * batch.tokens
    return 2 * (forward - scores) + 3 * (batch.tokens * _adapter_flops(shape, lora) + scores)


def _adapter_flops(shape: Shape, lora: Lora) -> float:
    """Returns the operations of one token's products with adapters in a forward pass."""
    return 2.0 * counting.adapter_elements(shape, Parallel(world=1), lora)


def _layers_share(actor: Actor, batch: SequenceBatch) -> float:
    """Returns how many times the layers' forward pass a forward and backward pass takes, recomputation left out."""
    shape, lora = actor.shape, actor.lora
    if lora is None:
        return 3.0
    dense, experts, _ = batch_flops(shape, batch)
    scores = shape.sizes.num_layers * _batch_attention_flops(shape, batch)
    forward = dense + experts
    return (2 * (forward - scores) + 3 * (_adapter_flops(shape, lora) + scores)) / forward


def pass_seconds(
    actor: Actor, cluster: Cluster, batch: SequenceBatch, *, backward: bool, recompute: Collection[str] = ()
) -> float:
    """Returns the seconds of one pass over the batch, without the optimizer.

    They are matrix products, communication within and between layers, and the pipeline's bubble. With adapters the
    backward pass computes no gradients of the model's weights.
    """
    shape, parallel, _, lora = actor
    count = batch.micro_batches(parallel)
    tokens = batch.tokens / parallel.dp / count
    layers = layer_seconds(actor, cluster, batch, tokens)
    layers *= _layers_share(actor, batch) if backward else 1
    layers += recomputed_seconds(actor, cluster, batch, tokens, recompute) if backward else 0.0
    # the backward pass computes the logits again
    again = 1 if not backward else 4 if lora is None else 3
    head = again * _head_seconds(actor, cluster, tokens * batch.labels / batch.tokens)
    host = 0.0 if batch.full else MICRO_S
    stage = layers * shape.sizes.num_layers / parallel.pp + head + host + _hop(actor, cluster, tokens)
    return (count + (parallel.pp - 1) / parallel.vpp) * stage


def layer_seconds(actor: Actor, cluster: Cluster, batch: SequenceBatch, tokens: float) -> float:
    """Returns the seconds of one layer's forward pass over a micro-batch of `tokens` tokens, in the mean of layers."""
    shape, parallel = actor.shape, actor.parallel
    dense, _, _ = batch_flops(shape, batch)
    own = tokens / parallel.cp
    seconds = own * dense / shape.sizes.num_layers / parallel.tp / _dense_rate(cluster, batch, own)
    return seconds + _tensor_seconds(actor, cluster, own) + _routed_seconds(actor, cluster, batch, own)


def recomputed_seconds(
    actor: Actor, cluster: Cluster, batch: SequenceBatch, tokens: float, modules: Collection[str]
) -> float:
    """Returns the seconds that a layer's backward pass spends on computing `modules` again.

    `modules` is memory.MicroBatchLoad.recompute. Sums over tensor-parallel ranks are counted with WHOLE alone.
    """
    if WHOLE in modules:
        return layer_seconds(actor, cluster, batch, tokens)
    shape, parallel = actor.shape, actor.parallel
    sizes, own = shape.sizes, tokens / parallel.cp
    sparse = sizes.expert_layers / sizes.num_layers
    flops = {
        "core_attn": _batch_attention_flops(shape, batch),
        "mlp": (1 - sparse) * 2.0 * 3 * sizes.hidden * sizes.ffn,
        "shared_experts": sparse * 2.0 * 3 * sizes.hidden * sizes.shared_ffn,
    }
    dense = sum(flops.get(name, 0.0) for name in modules)
    routed = _routed_seconds(actor, cluster, batch, own) if "moe" in modules else 0.0
    return own * dense / parallel.tp / _dense_rate(cluster, batch, own) + routed


def _routed_seconds(actor: Actor, cluster: Cluster, batch: SequenceBatch, own: float) -> float:
    """Returns the seconds of one layer's experts and of the tokens' way to them and back; 0 without experts.

    Layers without experts are in the mean.
    """
    sizes, travel = actor.shape.sizes, _expert_seconds(actor, cluster, own)
    _, experts, _ = batch_flops(actor.shape, batch)
    if not experts:
        return travel
    rate = cluster.device.flops * cluster.device.expert_share * _share(batch, own)
    computed = own * experts / sizes.num_layers / actor.parallel.tp / rate
    return computed + (EXPERTS_S + travel) * sizes.expert_layers / sizes.num_layers


def _dense_rate(cluster: Cluster, batch: SequenceBatch, own: float) -> float:
    """Returns the operations a second that dense products reach on `own` tokens of a micro-batch."""
    return cluster.device.flops * cluster.device.dense_share * _share(batch, own)


def _share(batch: SequenceBatch, own: float) -> float:
    """Returns the part of a rate that is left with sequences of unequal lengths and with few tokens on a rank."""
    fill = (own / (own + SMALL)) / (8192 / (8192 + SMALL)) if own < 8192 else 1.0
    return 1.0 if batch.full else PARTIAL * fill


def optimizer_seconds(actor: Actor, cluster: Cluster) -> float:
    """Returns the seconds of one optimizer step, which does not overlap the backward pass.

    Gradients are summed over the replicas, Adam runs on this rank's share, and the weights are gathered: of the
    model, or of the adapters that alone are trained.
    """
    shape, parallel, numbers, lora = actor
    stage, hbm = counting.heaviest(shape, parallel), cluster.device.hbm * HBM_SHARE
    held, replicas = counting.counts(shape, parallel, stage), parallel.dp * parallel.cp
    dense, expert = (held.dense, held.expert) if lora is None else (actor.adapters(stage), 0)
    seconds, state = 0.0, 2 * (MOMENTS + MASTER) + GRADIENT + numbers.width
    groups = (dense, replicas, parallel.tp), (expert, parallel.expert_dp, parallel.ep * parallel.etp)
    for number, ranks, stride in groups:
        wire = number * (GRADIENT + numbers.width) * (ranks - 1) / ranks
        seconds += wire / cluster.link(ranks, stride)
        seconds += number / ranks * state / hbm
    return seconds + (dense + expert) * GRADIENT / hbm * 2  # gradients are zeroed, and their norm is taken


def decode_step_seconds(
    shape: Shape, engine: EngineSetup, cluster: Cluster, *, rows: float, context: float, width: int
) -> float:
    """Returns the seconds of decoding one token for each of `rows` sequences with `context` tokens in the mean.

    Few sequences are bound by memory, many by operations. `width`: bytes of a weight.
    """
    sizes, device = shape.sizes, cluster.device
    outside = counting.active(shape) - sizes.expert_layers * shape.active * 3 * sizes.hidden * sizes.expert_ffn
    weights = float(outside)
    if sizes.experts:
        touched = 1 - (1 - shape.active / sizes.experts) ** rows
        experts = touched * sizes.expert_layers * sizes.experts * 3 * sizes.hidden * sizes.expert_ffn
        weights += experts * HBM_SHARE / EXPERT_HBM_SHARE
    memory = (width * weights + rows * context * kv_bytes(shape, width)) / engine.tp / (device.hbm * HBM_SHARE)
    flops = rows * sum(forward_flops(shape, 0)) / engine.tp / (device.flops * device.dense_share)
    calls = 2 * sizes.num_layers * (0 if engine.tp == 1 else 1)
    wire = 2 * rows * sizes.hidden * width * (engine.tp - 1) / engine.tp
    link = cluster.link(engine.tp)
    # plain torch launches about twenty kernels for each layer, one by one, and as many again for its experts
    kernels_s = 0.5e-3 if sizes.experts else 0.25e-3
    waiting = STEP_S if engine.compiled else STEP_S + sizes.num_layers * kernels_s
    reduced = calls * (wire / link + (REDUCE_S if engine.tp <= cluster.per_node else FAR_REDUCE_S))
    sampled = SAMPLING_PASSES * 4 * rows * sizes.vocab / (device.hbm * HBM_SHARE)  # on each rank, of all logits
    computing, host = max(memory, flops) + reduced + sampled, ROW_S * rows
    return waiting + (max(computing, host) if engine.overlapped else computing + host)


def kv_bytes(shape: Shape, width: int) -> int:
    """Returns the bytes of one token's keys and values in all layers, or of the latents that they are made of."""
    return width * shape.sizes.num_layers * shape.sizes.cached


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """The time that a role's samples take, and how many are decoded at once."""

    seconds: float
    rows: float  # sequences decoded together at one engine
    waves: float  # how many times one engine fills its rows
    alone: float  # seconds of the generation of one sample, among as many others as are decoded at once
    kept: bool  # what stands before an answer was kept since the last one; false: it is read again
    longest: float  # seconds of the longest answer, all while as many others are decoded
    waiting: float = 0.0  # of the seconds, those in which the engines have nothing to do, because tools run


def rollout_cost(shape: Shape, engine: EngineSetup, cluster: Cluster, draw: Draw, *, width: int) -> RolloutCost:
    """Returns the cost of generating `draw`, spread over the replicas, were its tools to take no time.

    `width`: bytes of a weight. What stands before an answer is kept where one engine has room for all of its samples;
    else later samples take the room of earlier ones before these go on.
    """
    answers, response = draw.episode.answers, draw.response
    own = draw.samples / engine.replicas
    copies = shape.sizes.cache_copies(engine.tp)  # key/value heads are repeated when there are fewer than ranks
    per_prompt = draw.per_prompt if engine.shares_prompt else 1.0
    held = draw.length - draw.prompt * (1 - 1 / per_prompt)
    room = engine.kv_bytes * engine.tp / copies / kv_bytes(shape, width) / held
    rows = max(1.0, min(own, engine.max_batch, room))
    waves = own / rows
    context = draw.context(0) / 2 + draw.context(answers - 1) / 2 + response / 2  # in the mean of all answers
    full = decode_step_seconds(shape, engine, cluster, rows=rows, context=context, width=width)
    behind = max(0.0, draw.longest - response) * answers  # tokens of the longest sample, when most others are done
    late_context = draw.context(answers - 1) + behind + response
    late = decode_step_seconds(shape, engine, cluster, rows=max(1.0, rows / 8), context=late_context, width=width)
    kept = engine.keeps_prefix and own <= room
    rate = engine.tp * cluster.device.flops * cluster.device.dense_share * PARTIAL
    prefill = own * _reading_flops(shape, draw, kept=kept, per_prompt=per_prompt) / rate
    one = response * answers * full
    return RolloutCost(
        seconds=prefill + waves * one + behind * late, rows=rows, waves=waves,
        alone=prefill / waves + one + behind * late, kept=kept, longest=draw.longest * full,
    )  # fmt: skip


def tool_seconds(draw: Draw, alone: float) -> float:
    """Returns the least seconds that a draw takes because of its tools; 0 without any.

    All calls take their time, so many at once. And one sample by itself takes the time of its own calls between its
    answers, which others' do not shorten. `alone`: seconds of its answers.
    """
    episode = draw.episode
    calls = (episode.answers - 1) * episode.tool_s
    return max(draw.samples * calls / episode.calls_at_once, alone + calls) if calls else 0.0


def _reading_flops(shape: Shape, draw: Draw, *, kept: bool, per_prompt: float) -> float:
    """Returns the operations of reading what stands before the answers of one sample.

    `kept`: of what stands before an answer only what is told after the last one is read, else all of it. `per_prompt`
    samples read the prompt before their first answers once.
    """
    total = 0.0
    for answer in range(draw.episode.answers):
        end = draw.context(answer)
        start = end - draw.episode.told if kept and answer else 0.0
        # a token at place p attends to p others: from start to end as many as in the mean of a sequence of their sum
        total += (end - start) * sum(forward_flops(shape, start + end)[:2]) / (1 if answer else per_prompt)
    return total


@dataclass(frozen=True, kw_only=True)
class RefitCost:
    """The cost of sending weights to a role's engines."""

    sent: float  # bytes over all links together
    seconds: float


def refit_cost(
    actor: Actor, engine: EngineSetup, cluster: Cluster, *, place: Literal["ranks", "gpus", "elsewhere"],
    adapter: bool = False,
) -> RefitCost:  # fmt: skip
    """Returns the cost of a refit in which every engine GPU receives its slices once. `adapter`: the adapters are sent
    in place of the model's weights.

    `place` of the engines: in the trainer's ranks, where each holds the whole model; in other processes on the
    trainer's GPUs; or on GPUs of their own.
    """
    shape, parallel, numbers, _ = actor
    device, width = cluster.device, numbers.width
    whole = float(width * counting.total(shape))
    if adapter:
        whole = float(width * actor._replace(parallel=Parallel(world=1)).adapters(0))
    network, nvlink = device.network * NETWORK_SHARE, device.nvlink * NVLINK_SHARE
    if place == "ranks":
        own = width * counting.counts(shape, parallel, counting.heaviest(shape, parallel)).all
        # bytes that the GPUs of one node hold together
        held = min(whole, own * min(cluster.per_node, parallel.tp * parallel.pp))
        seconds = (whole - held) / network + (held - own) / nvlink + own / (device.hbm * HBM_SHARE)
        return RefitCost(sent=parallel.world * (whole - own), seconds=seconds)
    each = whole / engine.tp
    sent = whole * engine.replicas
    if place == "gpus":  # what the same GPU's trainer rank has is copied, the rest comes from its neighbours
        apart = parallel.tp * parallel.pp
        link = nvlink if apart <= cluster.per_node else network
        seconds = 2 * each / (device.hbm * HBM_SHARE) + each * (1 - 1 / apart) / link
        return RefitCost(sent=sent, seconds=seconds)
    senders = sent / parallel.world
    return RefitCost(sent=sent, seconds=max(each, senders) / network)


def _head_seconds(actor: Actor, cluster: Cluster, tokens: float) -> float:
    """Returns the seconds of the output layer and of log-probabilities.

    Log-probabilities pass float32 logits through memory about six times.
    """
    sizes, parallel, device = actor.shape.sizes, actor.parallel, cluster.device
    rows = tokens / parallel.cp * sizes.vocab / parallel.tp
    return rows * 2 * sizes.hidden / (device.flops * device.dense_share) + rows * 4 * 6 / (device.hbm * HBM_SHARE)


def _tensor_seconds(actor: Actor, cluster: Cluster, own: float) -> float:
    """Returns the seconds of tensor and context parallel communication in a layer's forward pass.

    There are two all-reduces of the residual stream, or as much gathered and scattered, and rings of keys and values.
    """
    sizes, parallel, seconds = actor.shape.sizes, actor.parallel, 0.0
    if parallel.tp > 1:
        wire = 2 * own * sizes.hidden * 2 * (parallel.tp - 1) / parallel.tp
        seconds += 2 * (wire / cluster.link(parallel.tp) + REDUCE_S)
    if parallel.cp > 1:
        widths = sizes.kv_heads * (sizes.head_dim + sizes.value_width)
        ring = own * widths / min(parallel.tp, sizes.kv_heads) * 2 * (parallel.cp - 1)
        seconds += ring / cluster.link(parallel.cp, parallel.tp) * 0.3  # most of it hides behind attention
    return seconds


def _expert_seconds(actor: Actor, cluster: Cluster, own: float) -> float:
    """Returns the seconds of a layer's forward pass in which tokens travel to the ranks of their experts and back."""
    shape, parallel, device = actor.shape, actor.parallel, cluster.device
    ranks = parallel.ep * parallel.etp
    if not shape.active or ranks == 1:
        return 0.0
    stream = own / (parallel.tp if parallel.sequence_parallel else 1)
    wire = 2 * stream * shape.active * shape.sizes.hidden * 2 * parallel.etp
    outside = max(0.0, 1 - cluster.per_node / ranks)  # the part of the tokens that goes to other nodes
    inside = (ranks - 1) / ranks - outside
    each = outside / (device.network * NETWORK_SHARE) + inside / (device.nvlink * NVLINK_SHARE)
    return wire * each + 4 * REDUCE_S


def _hop(actor: Actor, cluster: Cluster, tokens: float) -> float:
    """Returns the seconds of sending a micro-batch's residual stream to the next stage and back."""
    shape, parallel = actor.shape, actor.parallel
    if parallel.pp == 1:
        return 0.0
    size = 2 * tokens / parallel.cp * shape.sizes.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    return 2 * parallel.vpp * size / cluster.link(2, parallel.tp * parallel.cp * parallel.dp)
