"""Estimates the seconds of a model's training passes, log-probs, generation and refit (weight sync) on given GPUs.

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
from megatron_rl.weights.quantisation import Format

STEP_S = 1.5e-3  # fixed seconds of a decoding step in which the GPU waits for the host
ROW_S = 20e-6  # seconds of host time per sequence in a decoding step: scheduling, inputs, text
# assumed number of times that sampling and log-probs read or write the float32 logits of a decoding step
SAMPLING_PASSES = 10
REDUCE_S = 12e-6  # seconds of a small all-reduce within a node
FAR_REDUCE_S = 120e-6  # seconds of a small all-reduce between nodes
EXPERTS_S = 0.5e-3  # seconds of host time per pass through a layer with experts: the host waits for the token counts
MICRO_S = 15e-3  # seconds of host time per micro-batch: packing, positions, transfer, loss
# Factor by which a GPU's rates are multiplied, because rollouts differ in length and not all micro-batches are full.
PARTIAL = 0.85
SMALL = 2048  # number of tokens of a micro-batch per rank at which matrix products reach half of their maximum rate


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """The sequences of one pass through the model: `sequences` sequences with a mean length of `length` tokens.

    They are packed into micro-batches of up to `micro_tokens` tokens, before context parallelism (cp) splits them.
    """

    sequences: int
    length: float
    micro_tokens: int
    full: bool = False  # whether all sequences have the same length and all micro-batches are full, as in pre-training
    prompt: float = 0.0  # mean number of prompt tokens per sequence
    unwritten: float = 0.0  # mean number of tokens after the prompt that no model generated, e.g. tool results
    # mean number of sequences with the same prompt; a prompt is computed once in each micro-batch that contains it
    per_prompt: float = 1.0

    @property
    def repeated(self) -> float:
        """Returns the number of sequences whose prompt is not computed, because another sequence of the micro-batch has
        the same prompt.
        """
        fitting = max(1.0, (self.micro_tokens - self.prompt) // max(1.0, self.length - self.prompt))
        return max(0.0, self.sequences * (1 - math.ceil(self.per_prompt / fitting) / self.per_prompt))

    @property
    def tokens(self) -> float:
        """Returns the number of tokens that the pass computes. Shared prompts are counted once per micro-batch."""
        return self.sequences * self.length - self.repeated * self.prompt

    @property
    def labels(self) -> float:
        """Returns the number of tokens that go through the output layer: the tokens that a model generated."""
        return self.sequences * (self.length - self.prompt - self.unwritten)

    def micro_batches(self, parallel: Parallel) -> int:
        """Returns the number of micro-batches in a pass of one data-parallel replica."""
        per_replica = self.tokens / parallel.dp
        return max(1, math.ceil(per_replica / max(self.length, self.micro_tokens)))


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The engines that generate for one role, either servers or embedded in the trainer's ranks: `replicas` engines of
    `tp` GPUs each.
    """

    replicas: int
    tp: int
    max_batch: int
    kv_bytes: float  # bytes of the KV cache on one GPU
    expert_parallel: bool = False
    compiled: bool = True  # True for servers with fused kernels; False for plain torch with one kernel per operation
    # whether an engine keeps a sample's KV cache between two answers of the sample, if the cache has enough space
    keeps_prefix: bool = True
    shares_prompt: bool = True  # whether samples with the same prompt share one prefill and one KV cache of the prompt
    overlapped: bool = True  # whether the host prepares the next decoding step while the GPU computes this one
    format: Format | None = None  # format of quantised weights; matmuls are assumed to be as fast as in bfloat16
    cache_width: int | None = None  # bytes per element of the KV cache; None: those of unquantised weights


def forward_flops(shape: Shape, length: float) -> tuple[float, float, float]:
    """Returns the floating-point operations of a forward pass per token in a sequence of `length` tokens: (dense
    layers, experts, output layer).

    Attention is included in the dense layers.
    """
    per_token = flops.of_token(shape)
    attention = float(flops.attention(shape, [length])[0]) / length if length else 0.0
    return per_token.layers + attention, per_token.experts, per_token.head


def _attention_flops(shape: Shape, batch: SequenceBatch) -> float:
    """Returns the floating-point operations of attention in a forward pass, as the mean over all tokens of the batch
    that are computed (a shared prompt is computed once per micro-batch)."""
    sequence_flops, prompt = flops.attention(shape, [batch.length, batch.prompt]).tolist()
    return (batch.sequences * sequence_flops - batch.repeated * prompt) / batch.tokens


def train_flops(shape: Shape, batch: SequenceBatch, lora: Lora | None = None) -> float:
    """Returns the floating-point operations of a forward and backward pass over the batch, without recomputation.

    `lora`: LoRA settings, or None. With LoRA, the model's weights are frozen and have no gradients (see `flops.count`).
    """
    per_token, adapters = flops.of_token(shape), None if lora is None else flops.of_adapters(shape, lora)
    products = per_token.layers + per_token.experts + per_token.head * batch.labels / batch.tokens
    return batch.tokens * flops.training(products, _attention_flops(shape, batch), adapters)


def pass_seconds(
    actor: Actor, cluster: Cluster, batch: SequenceBatch, *, backward: bool, recompute: Collection[str] = ()
) -> float:
    """Returns the seconds of one pass over the batch, without the optimizer.

    The seconds include matrix products, communication within and between layers, and the pipeline bubble. With LoRA,
    the backward pass computes no gradients of the model's weights.

    `backward`: whether the pass includes a backward pass.
    `recompute`: the parts of a layer that the backward pass recomputes (see memory.MicroBatchLoad.recompute).
    """
    shape, parallel, _, lora = actor
    count = batch.micro_batches(parallel)
    tokens = batch.tokens / parallel.dp / count
    layers = layer_seconds(actor, cluster, batch, tokens)
    if backward:
        per_token, scores = flops.of_token(shape), _attention_flops(shape, batch)
        products = per_token.layers + per_token.experts
        adapters = None if lora is None else flops.of_adapters(shape, lora)
        layers *= flops.training(products, scores, adapters) / (products + scores)
        layers += recomputed_seconds(actor, cluster, batch, tokens, recompute)
    # the output layer's time as a multiple of its forward time; a backward pass computes the logits again
    again = 1 if not backward else 4 if lora is None else 3
    rows = tokens * batch.labels / batch.tokens / parallel.cp * shape.sizes.outputs / parallel.tp  # logits of this rank
    device = cluster.device
    # computing log-probs reads or writes the float32 logits about six times
    head = rows * 2 * shape.sizes.hidden / (device.flops * device.dense_share) + rows * 4 * 6 / (device.hbm * HBM_SHARE)
    hop = 0.0  # seconds of sending the residual stream to the next pipeline stage, and its gradient back
    if parallel.pp > 1:
        size = 2 * tokens / parallel.cp * shape.sizes.hidden / (parallel.tp if parallel.sequence_parallel else 1)
        hop = 2 * parallel.vpp * size / cluster.link(2, parallel.tp * parallel.cp * parallel.dp)
    host = 0.0 if batch.full else MICRO_S
    stage = layers * shape.sizes.num_layers / parallel.pp + again * head + host + hop
    return (count + (parallel.pp - 1) / parallel.vpp) * stage


def layer_seconds(actor: Actor, cluster: Cluster, batch: SequenceBatch, tokens: float) -> float:
    """Returns the mean seconds of a layer's forward pass over a micro-batch of `tokens` tokens."""
    shape, parallel = actor.shape, actor.parallel
    dense = flops.of_token(shape).layers + _attention_flops(shape, batch)
    rank_tokens = tokens / parallel.cp
    seconds = rank_tokens * dense / shape.sizes.num_layers / parallel.tp / _dense_rate(cluster, batch, rank_tokens)
    return seconds + _tensor_seconds(actor, cluster, rank_tokens) + _routed_seconds(actor, cluster, batch, rank_tokens)


def recomputed_seconds(
    actor: Actor, cluster: Cluster, batch: SequenceBatch, tokens: float, modules: Collection[str]
) -> float:
    """Returns the seconds that a layer's backward pass spends on recomputing parts of the layer.

    `modules`: names of the recomputed parts, as in memory.MicroBatchLoad.recompute. All-reduces over tensor-parallel
    ranks are counted only if the whole layer is recomputed (WHOLE).
    """
    if WHOLE in modules:
        return layer_seconds(actor, cluster, batch, tokens)
    shape, parallel = actor.shape, actor.parallel
    sizes, rank_tokens = shape.sizes, tokens / parallel.cp
    sparse = sizes.expert_layers / sizes.num_layers
    parts = {
        "core_attn": _attention_flops(shape, batch) / sizes.num_layers,
        "mlp": (1 - sparse) * 2.0 * 3 * sizes.hidden * sizes.ffn,
        "shared_experts": sparse * 2.0 * 3 * sizes.hidden * sizes.shared_ffn,
    }
    dense = sum(parts.get(name, 0.0) for name in modules)
    routed = _routed_seconds(actor, cluster, batch, rank_tokens) if "moe" in modules else 0.0
    return rank_tokens * dense / parallel.tp / _dense_rate(cluster, batch, rank_tokens) + routed


def _routed_seconds(actor: Actor, cluster: Cluster, batch: SequenceBatch, rank_tokens: float) -> float:
    """Returns the mean seconds per layer of computing the experts, and of sending tokens to the experts and back.

    The mean is over all layers, including layers without experts. The result is 0 for a model without experts.
    """
    sizes, travel = actor.shape.sizes, _expert_seconds(actor, cluster, rank_tokens)
    experts = flops.of_token(actor.shape).experts
    if not experts:
        return travel
    rate = cluster.device.flops * cluster.device.expert_share * _share(batch, rank_tokens)
    computed = rank_tokens * experts / sizes.num_layers / actor.parallel.tp / rate
    return computed + (EXPERTS_S + travel) * sizes.expert_layers / sizes.num_layers


def _dense_rate(cluster: Cluster, batch: SequenceBatch, rank_tokens: float) -> float:
    """Returns the floating-point operations per second that dense matrix products reach on a GPU.

    `rank_tokens`: number of tokens of a micro-batch on one rank.
    """
    return cluster.device.flops * cluster.device.dense_share * _share(batch, rank_tokens)


def _share(batch: SequenceBatch, rank_tokens: float) -> float:
    """Returns the factor (at most 1) by which unequal sequence lengths and few tokens per rank reduce a GPU's rate."""
    fill = (rank_tokens / (rank_tokens + SMALL)) / (8192 / (8192 + SMALL)) if rank_tokens < 8192 else 1.0
    return 1.0 if batch.full else PARTIAL * fill


def optimizer_seconds(actor: Actor, cluster: Cluster) -> float:
    """Returns the seconds of one optimizer step, which does not overlap the backward pass.

    Gradients are reduced over the replicas, Adam updates this rank's shard, and the weights are gathered. With LoRA,
    only the gradients and weights of the adapters are counted.
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
    # the last term is the time of zeroing the gradients and of computing their norm
    return seconds + (dense + expert) * GRADIENT / hbm * 2


def decode_step_seconds(
    shape: Shape, engine: EngineSetup, cluster: Cluster, *, rows: float, context: float, width: int
) -> float:
    """Returns the seconds of one decoding step for `rows` sequences with a mean of `context` tokens.

    With few sequences the step is bound by memory bandwidth, with many by compute. `width`: bytes per element of the
    weights.
    """
    sizes, device = shape.sizes, cluster.device
    outside = counting.active(shape) - sizes.expert_layers * shape.active * 3 * sizes.hidden * sizes.expert_ffn
    weights = float(outside)
    if sizes.experts:
        touched = 1 - (1 - shape.active / sizes.experts) ** rows
        experts = touched * sizes.expert_layers * sizes.experts * 3 * sizes.hidden * sizes.expert_ffn
        weights += experts * HBM_SHARE / EXPERT_HBM_SHARE
    head = sizes.vocab * sizes.hidden  # which is never quantised
    read = width * weights
    if engine.format is not None and engine.compiled:  # the embedded engine reads dequantised weights
        read = engine.format.bytes_per_element * (weights - head) + width * head
    cache = rows * context * kv_bytes(shape, engine.cache_width or width)
    memory = (read + cache) / engine.tp / (device.hbm * HBM_SHARE)
    computed = rows * sum(forward_flops(shape, 0)) / engine.tp / (device.flops * device.dense_share)
    calls = 2 * sizes.num_layers * (0 if engine.tp == 1 else 1)
    wire = 2 * rows * sizes.hidden * width * (engine.tp - 1) / engine.tp
    link = cluster.link(engine.tp)
    # plain torch launches about twenty separate kernels per layer, and about twenty more for the layer's experts
    kernels_s = 0.5e-3 if sizes.experts else 0.25e-3
    waiting = STEP_S if engine.compiled else STEP_S + sizes.num_layers * kernels_s
    reduced = calls * (wire / link + (REDUCE_S if engine.tp <= cluster.per_node else FAR_REDUCE_S))
    sampled = SAMPLING_PASSES * 4 * rows * sizes.vocab / (device.hbm * HBM_SHARE)  # every rank processes all logits
    computing, host = max(memory, computed) + reduced + sampled, ROW_S * rows
    return waiting + (max(computing, host) if engine.overlapped else computing + host)


def kv_bytes(shape: Shape, width: int) -> int:
    """Returns the bytes that the KV cache stores per token: the keys and values (or MLA latents) of all layers.
    `width`: bytes per element.
    """
    return width * shape.sizes.num_layers * shape.sizes.cached


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """The time that generating a role's samples takes, and how many sequences are decoded at once."""

    seconds: float
    rows: float  # number of sequences decoded together by one engine
    waves: float  # number of batches of `rows` sequences that one engine decodes one after the other
    # seconds in which an engine generates the longest sample (all its answers), together with the rest of its batch
    alone: float
    # whether a sample's KV cache is kept between the sample's answers; False: each answer prefills the whole context
    kept: bool
    longest: float  # seconds of decoding the longest answer in a batch of `rows` sequences
    places: float  # number of sequences that all engines can decode at once
    step_s: tuple[float, float]  # seconds of a decoding step with one sequence, and with a full batch
    waiting: float = 0.0  # part of `seconds` in which the engines are idle because tools run


def rollout_cost(shape: Shape, engine: EngineSetup, cluster: Cluster, draw: Draw, *, width: int) -> RolloutCost:
    """Returns the cost of generating `draw` (a role's samples of one iteration) on all replicas, without the time of
    tool calls.

    `width`: bytes per element of the weights.

    The KV caches of samples are kept between answers if the caches of all samples of an engine fit at once. Otherwise,
    later samples evict the caches of earlier samples before the earlier samples continue.
    """
    answers, response = draw.episode.answers, draw.response
    engine_samples = draw.samples / engine.replicas
    # key/value heads are replicated if there are fewer key/value heads than tensor-parallel ranks
    copies = shape.sizes.cache_copies(engine.tp)
    per_prompt = draw.per_prompt if engine.shares_prompt else 1.0
    held = draw.length - draw.prompt * (1 - 1 / per_prompt)
    room = engine.kv_bytes * engine.tp / copies / kv_bytes(shape, engine.cache_width or width) / held
    most = max(1.0, min(engine.max_batch, room))
    rows = max(1.0, min(engine_samples, most))
    waves = engine_samples / rows
    context = draw.context(0) / 2 + draw.context(answers - 1) / 2 + response / 2  # mean over all answers
    full, first, last = (
        decode_step_seconds(shape, engine, cluster, rows=count, context=context, width=width)
        for count in (rows, 1.0, most)
    )
    # number of tokens that the longest sample still decodes after most other samples are done
    behind = max(0.0, draw.longest - response) * answers
    late_context = draw.context(answers - 1) + behind + response
    late = decode_step_seconds(shape, engine, cluster, rows=max(1.0, rows / 8), context=late_context, width=width)
    kept = engine.keeps_prefix and engine_samples <= room
    rate = engine.tp * cluster.device.flops * cluster.device.dense_share * PARTIAL
    prefill = engine_samples * _reading_flops(shape, draw, kept=kept, per_prompt=per_prompt) / rate
    sample_s = response * answers * full
    return RolloutCost(
        seconds=prefill + waves * sample_s + behind * late, rows=rows, waves=waves,
        alone=prefill / waves + sample_s + behind * late, kept=kept, longest=draw.longest * full,
        places=most * engine.replicas, step_s=(first, last),
    )  # fmt: skip


def tool_seconds(draw: Draw, alone: float) -> float:
    """Returns the minimum number of seconds that the tool calls of a draw (a role's samples of one iteration) take; 0
    without tools.

    The result is the larger of two lower bounds. The first is the time of all calls at limited concurrency. The second
    is the time of one sample, whose answers and calls run one after the other.

    `alone`: seconds of generating all answers of the longest sample (RolloutCost.alone).
    """
    episode = draw.episode
    calls = (episode.answers - 1) * episode.tool_s
    return max(draw.samples * calls / episode.calls_at_once, alone + calls) if calls else 0.0


def _reading_flops(shape: Shape, draw: Draw, *, kept: bool, per_prompt: float) -> float:
    """Returns the floating-point operations of the prefills of one sample, one prefill before each answer.

    `kept`: whether a prefill computes only the tokens added since the last answer, instead of the whole context.
    `per_prompt`: the number of samples with the same prompt, which share one prefill of the prompt.
    """
    total = 0.0
    for answer in range(draw.episode.answers):
        end = draw.context(answer)
        start = end - draw.episode.told if kept and answer else 0.0
        # The mean cost per token of positions [start, end) equals that of a whole sequence of start + end tokens.
        total += (end - start) * sum(forward_flops(shape, start + end)[:2]) / (1 if answer else per_prompt)
    return total


@dataclass(frozen=True, kw_only=True)
class RefitCost:
    """The cost of a refit (weight sync): sending the weights to a role's engines."""

    sent: float  # total bytes over all links
    seconds: float


def refit_cost(
    actor: Actor, engine: EngineSetup, cluster: Cluster, *, place: Literal["ranks", "gpus", "elsewhere"],
    adapter: bool = False,
) -> RefitCost:  # fmt: skip
    """Returns the cost of a refit (weight sync) in which every engine GPU receives each part of its weights once.

    `place`: where the engines are. "ranks": embedded in the trainer's ranks, with a copy of the whole model in each
    rank. "gpus": in other processes on the trainer's GPUs. "elsewhere": on separate GPUs.
    `adapter`: whether only the LoRA adapter is sent, not the model's weights.
    """
    shape, parallel, numbers, _ = actor
    device, width = cluster.device, numbers.width
    size = counting.engine_bytes(shape, width, engine.format)
    if adapter:
        size = float(width * actor._replace(parallel=Parallel(world=1)).adapters(0))
    network, nvlink = device.network * NETWORK_SHARE, device.nvlink * NVLINK_SHARE
    if place == "ranks":
        shard = size * counting.counts(shape, parallel, counting.heaviest(shape, parallel)).all / counting.total(shape)
        # bytes of weights that the trainer ranks of a node hold in total
        held = min(size, shard * min(cluster.per_node, parallel.tp * parallel.pp))
        seconds = (size - held) / network + (held - shard) / nvlink + shard / (device.hbm * HBM_SHARE)
        return RefitCost(sent=parallel.world * (size - shard), seconds=seconds)
    gpu_bytes = size / engine.tp
    sent = size * engine.replicas
    if place == "gpus":  # weights on the same GPU are copied, and other weights are sent by other trainer GPUs
        apart = parallel.tp * parallel.pp
        link = nvlink if apart <= cluster.per_node else network
        seconds = 2 * gpu_bytes / (device.hbm * HBM_SHARE) + gpu_bytes * (1 - 1 / apart) / link
        return RefitCost(sent=sent, seconds=seconds)
    senders = sent / parallel.world
    return RefitCost(sent=sent, seconds=max(gpu_bytes, senders) / network)


def _tensor_seconds(actor: Actor, cluster: Cluster, rank_tokens: float) -> float:
    """Returns the seconds of tensor- and context-parallel communication in a layer's forward pass.

    Tensor parallelism needs two all-reduces of the residual stream, or equivalent all-gathers and reduce-scatters.
    Context parallelism passes keys and values around a ring.
    """
    sizes, parallel, seconds = actor.shape.sizes, actor.parallel, 0.0
    if parallel.tp > 1:
        wire = 2 * rank_tokens * sizes.hidden * 2 * (parallel.tp - 1) / parallel.tp
        seconds += 2 * (wire / cluster.link(parallel.tp) + REDUCE_S)
    if parallel.cp > 1:
        widths = sizes.kv_heads * (sizes.head_dim + sizes.value_width)
        ring = rank_tokens * widths / min(parallel.tp, sizes.kv_heads) * 2 * (parallel.cp - 1)
        seconds += ring / cluster.link(parallel.cp, parallel.tp) * 0.3  # most of it overlaps with attention
    return seconds


def _expert_seconds(actor: Actor, cluster: Cluster, rank_tokens: float) -> float:
    """Returns the seconds that expert parallelism needs in a layer's forward pass to send tokens to the ranks of their
    experts and back.
    """
    shape, parallel, device = actor.shape, actor.parallel, cluster.device
    ranks = parallel.ep * parallel.etp
    if not shape.active or ranks == 1:
        return 0.0
    stream = rank_tokens / (parallel.tp if parallel.sequence_parallel else 1)
    wire = 2 * stream * shape.active * shape.sizes.hidden * 2 * parallel.etp
    outside = max(0.0, 1 - cluster.per_node / ranks)  # share of the tokens that are sent to other nodes
    inside = (ranks - 1) / ranks - outside
    seconds_per_byte = outside / (device.network * NETWORK_SHARE) + inside / (device.nvlink * NVLINK_SHARE)
    return wire * seconds_per_byte + 4 * REDUCE_S
