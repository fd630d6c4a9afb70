"""Measures updates on one GPU: MFU, tokens a second, memory, kernels; transformers' passes in the same run."""

from __future__ import annotations

import functools
import inspect
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from gpu_kit import clock, subjects
from gpu_kit.findings import Findings, NotMeasured, first_sentence, first_that_fits
from gpu_kit.subjects import RandomPolicy, Recompute, Scale
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import statistics_needed
from megatron_rl.batches.replica_batch import Work
from megatron_rl.config.schema import LossConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import pipeline_pass as core_step
from megatron_rl.megatron import vocab_statistics
from megatron_rl.megatron.kernels import choice
from megatron_rl.messages.world import World
from megatron_rl.models.shape import Shape, read_shape
from megatron_rl.planning import memory
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.training.update import scatter
from megatron_rl.weights import flops
from megatron_rl.weights.counting import Parallel

KINDS = ("equal", "varied")
WITHOUT_OPTIMIZER = ("7B",)  # 14 bytes of state for each of 7.6 B parameters are more than one GPU has
FITS = 0.95  # share of the device's free memory up to which a plan is tried
BARS = {f"{name}/16k/{kind}/mfu": 0.45 for name in ("1.5B", "7B") for kind in KINDS}
TOP = 15  # kernels that the profile names
_LOSS = PolicyLoss(LossConfig(kl_coef=0.0))
NAMES = statistics_needed(_LOSS.needs)


@dataclass(frozen=True)
class Case:
    """One model (a directory with its config) and one kind of packed micro-batch."""

    scale: Scale
    directory: Path
    kind: str
    tokens: int

    @property
    def name(self) -> str:
        """Returns the beginning of the names of its figures, such as 1.5B/16k/varied."""
        return f"{self.directory.name}/{subjects.count_name(self.tokens)}/{self.kind}"

    @property
    def batches(self) -> list[list[int]]:
        """Returns the lengths of the sequences of each round, after one to warm up. Varied lengths are new in each."""
        rounds = range(1 + self.scale.rounds)
        return [subjects.lengths_of(self.kind, self.tokens, self.scale, seed) for seed in rounds]


def run(findings: Findings, scale: Scale, folder: Path) -> None:
    """Measures everything: models with bars first, and small batches before large ones, whose errors may end it."""
    findings.take("device", functools.partial(_rates, scale))
    directories = {name: subjects.write_config(folder / name, name, scale) for name in scale.models}
    with subjects.one_rank():
        for name in scale.models:
            for tokens in scale.tokens:
                for kind in KINDS:
                    _one_case(findings, Case(scale, directories[name], kind=kind, tokens=tokens))
        longest = scale.tokens[-1]
        findings.take("head", functools.partial(_head, findings, scale))
        attention = functools.partial(_attention, findings, scale, directories["1.5B"], longest)
        findings.take(f"attention/{subjects.count_name(longest)}", attention)
        for tokens in scale.tokens:
            cudnn = functools.partial(_cudnn, scale, directories["1.5B"], tokens)
            findings.take(f"cudnn/{subjects.count_name(tokens)}", cudnn)
        findings.take("profile", functools.partial(_profile, findings, scale, directories["1.5B"], longest))


def flops_of(shape: Shape, lengths: list[int]) -> float:
    """Returns the operations of a forward and backward pass over whole sequences, of which all tokens but the first are
    labels."""
    return flops.count(shape, np.array(lengths), labels=sum(lengths) - len(lengths)).training


def _rates(scale: Scale) -> dict[str, float]:
    """Returns what this device reaches in a plain copy and in a plain product."""
    return {
        "copy_gb_per_s": clock.copy_rate(scale.copied) / 1e9,
        "product_tflops": clock.product_rate(scale.product) / 1e12,
    }


def _one_case(findings: Findings, case: Case) -> None:
    """Measures our passes and transformers' over one kind of batch."""
    name = case.name
    findings.take(name, functools.partial(_ours, findings, case))
    findings.take(f"{name}/transformers", functools.partial(_theirs, findings, case))
    theirs, ours = (findings.figures.get(f"{name}/{figure}") for figure in ("transformers/pass_s", "pass_s"))
    if theirs is not None and ours is not None:
        findings.figures[f"{name}/times_transformers"] = theirs / ours


def _ours(findings: Findings, case: Case) -> dict[str, float]:
    """Measures a forward and backward pass over one micro-batch, and an update where the optimizer's state fits."""
    shape, optimizer = read_shape(str(case.directory)), case.directory.name not in WITHOUT_OPTIMIZER
    batches, tokens = case.batches, case.tokens

    def attempt(recompute: Recompute) -> dict[str, float]:
        policy = subjects.make_policy(case.directory, recompute=recompute, tokens=tokens, optimizer=optimizer)
        findings.more.setdefault("forms", {})[case.name] = subjects.forms_of(policy)
        works = [work_of(policy, lengths, seed) for seed, lengths in enumerate(batches)]
        peak = clock.peak_gib(lambda: both_passes(policy, works[0]))
        seconds = [clock.device_seconds(functools.partial(both_passes, policy, work)) for work in works[1:]]
        rates = [flops_of(shape, lengths) / s for lengths, s in zip(batches[1:], seconds, strict=True)]
        figures = {"pass_s": statistics.median(seconds), "tflops": statistics.median(rates) / 1e12, "peak_gib": peak}
        if optimizer:
            policy.update(works[0], 0, _LOSS)
            updates = [clock.device_seconds(functools.partial(policy.update, work, 0, _LOSS)) for work in works[1:]]
            rates = [flops_of(shape, lengths) / s for lengths, s in zip(batches[1:], updates, strict=True)]
            figures |= {
                "update_s": statistics.median(updates),
                "update_tflops": statistics.median(rates) / 1e12,
                "update_tokens_per_s": tokens / statistics.median(updates),
            }
        return figures | {"tokens_per_s": tokens / figures["pass_s"]}

    tries = [
        (recompute.name, functools.partial(attempt, recompute))
        for recompute in _fitting(shape, tokens, optimizer=optimizer)
    ]
    chosen, figures = first_that_fits(tries)
    findings.more.setdefault("recomputed", {})[case.name] = chosen
    if "device/product_tflops" in findings.figures:
        figures["of_product"] = figures["tflops"] / findings.figures["device/product_tflops"]
    # Operations of the optimizer do not count: an update takes longer than its passes, and so has a lower MFU.
    for name, rate in {"mfu": "tflops", "update_mfu": "update_tflops"}.items():
        try:
            if rate in figures:
                figures[name] = figures[rate] * 1e12 / clock.peak_flops()
        except NotMeasured as reason:
            findings.lack(f"{case.name}/{name}", str(reason))
    return figures


def _fitting(shape: Shape, tokens: int, *, optimizer: bool) -> list[Recompute]:
    """Returns the recomputations with which the micro-batch fits by plan, the fastest first; the thriftiest always."""
    free, _ = torch.cuda.mem_get_info()
    fitting = []
    for recompute in subjects.RECOMPUTES:
        modules = recompute.settings.get("recompute_modules", (memory.WHOLE,) if recompute.settings else ())
        load = MicroBatchLoad(tokens=tokens, recompute=frozenset(modules))
        held = memory.training(Actor(shape, Parallel(world=1), Precision.gpu("bfloat16")), load, stage=0)
        if held.peak - (0 if optimizer else held.optimizer) < FITS * free or recompute is subjects.RECOMPUTES[-1]:
            fitting.append(recompute)
    return fitting


def work_of(policy: RandomPolicy, lengths: list[int], seed: int) -> Work:
    """Returns one optimizer step on random sequences."""
    rollouts = subjects.rollouts_of(lengths, policy.arch.vocab, seed)
    return scatter(World(), policy, rollouts, loss=_LOSS)


def both_passes(policy: RandomPolicy, work: Work) -> None:
    """Runs the forward and backward pass of an update, without the optimizer."""
    with policy.active():
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        scale = 1 / work.steps[0].denominator
        policy._run(work, 0, core_step.Pass(names=NAMES, loss=_LOSS, scale=scale, backward=True))


def _theirs(findings: Findings, case: Case) -> dict[str, float]:
    """Measures the same passes by transformers: rows of equal length, or packed with a mask that it makes itself."""
    model: Any = subjects.transformers_model(case.directory).train()

    def attempt(checkpointing: bool) -> dict[str, float]:
        if checkpointing:
            model.gradient_checkpointing_enable()
        inputs = [_inputs(case, model.config.vocab_size, seed) for seed in range(1 + case.scale.rounds)]
        peak = clock.peak_gib(lambda: _their_passes(model, inputs[0]))
        seconds = [clock.device_seconds(functools.partial(_their_passes, model, batch)) for batch in inputs[1:]]
        return {"pass_s": statistics.median(seconds), "peak_gib": peak}

    tries = [(name, functools.partial(attempt, name == "full")) for name in ("none", "full")]
    chosen, figures = first_that_fits(tries)
    findings.more.setdefault("recomputed", {})[f"{case.name}/transformers"] = chosen
    return figures | {"tokens_per_s": case.tokens / figures["pass_s"]}


def _inputs(case: Case, vocab: int, seed: int) -> dict[str, Tensor]:
    """Returns the arguments of transformers' model for the case's batch of this number."""
    lengths = case.batches[seed]
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (1, sum(lengths)), generator=draw)
    labels, places = tokens.clone(), torch.cat([torch.arange(n) for n in lengths])[None]
    labels[places == 0] = -100  # a sequence's first token has no label
    shape = (len(lengths), -1) if case.kind == "equal" else (1, -1)
    tensors = {"input_ids": tokens, "labels": labels, "position_ids": places}
    return {name: value.view(shape).to("cuda") for name, value in tensors.items()}


def _their_passes(model: Any, inputs: dict[str, Tensor]) -> None:
    model.zero_grad()
    model(**inputs, use_cache=False).loss.backward()


def _head(findings: Findings, scale: Scale) -> dict[str, float]:
    """Measures log-probs of labels and their gradient from hidden states: ours by Triton kernels, where they can be had
    here, and by torch's operations, and as torch users write it."""
    tokens, width, vocab = scale.head
    hidden, weight = (torch.randn(n, width, device="cuda").bfloat16().requires_grad_() for n in (tokens, vocab))
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    group = torch.distributed.group.WORLD

    def ours(triton: bool) -> Tensor:
        return vocab_statistics.vocab_parallel_statistics(
            hidden, weight, labels, first_row=0, vocab=vocab, temperature=1.0, group=group, names=["logprobs"],
            triton=triton,
        )[0]  # fmt: skip

    def plain() -> Tensor:
        return -F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")

    ways = {"torch": functools.partial(ours, triton=False), "plain": plain}
    if problem := choice.obstacle():
        findings.lack("head/triton", problem)
    else:
        ways["triton"] = functools.partial(ours, triton=True)
    figures: dict[str, float] = {}
    for name, way in ways.items():
        figures |= {f"{name}_{figure}": value for figure, value in _timed(way, (hidden, weight), scale).items()}
        # the forward product and the two of its gradient; logits that are computed again do not count
        figures[f"{name}_tflops"] = 6 * tokens * width * vocab / figures[f"{name}_passes_s"] / 1e12
    return figures


def _timed(way: Callable[[], Tensor], inputs: tuple[Tensor, ...], scale: Scale) -> dict[str, float]:
    """Returns the seconds of a function's forward pass and of both its passes, and the memory that both add."""

    def passes() -> None:
        for tensor in inputs:
            tensor.grad = None
        way().sum().backward()

    gib_before = torch.cuda.memory_allocated() / 2**30
    peak = clock.peak_gib(passes)
    both = clock.median_seconds(passes, rounds=scale.rounds)
    with torch.no_grad():
        only_forward = clock.median_seconds(way, rounds=scale.rounds)
    return {"forward_s": only_forward, "passes_s": both, "added_gib": peak - gib_before}


def _attention(findings: Findings, scale: Scale, directory: Path, tokens: int) -> dict[str, float]:
    """Measures one layer's attention over packed sequences of varied lengths: ours, and torch's for varied lengths."""
    policy = subjects.make_policy(directory, recompute=subjects.RECOMPUTES[0], tokens=tokens, optimizer=False)
    lengths, sizes = subjects.lengths_of("varied", tokens, scale), policy.arch
    (micro,) = policy._micro_batches(work_of(policy, lengths, 0), 0)
    core = models.unwrap(policy.chunks[0]).decoder.layers[0].self_attention.core_attention
    heads = [
        torch.randn(tokens, heads, sizes.head_dim, device="cuda").bfloat16().requires_grad_()
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    ]

    def ours() -> Tensor:
        return core(*heads, packed_seq_params=micro.layout).float()

    figures = {f"ours_{name}": value for name, value in _timed(ours, tuple(heads), scale).items()}
    try:
        varlen = _varlen(lengths, sizes.heads // sizes.kv_heads)
        theirs = _timed(lambda: varlen(*heads).float(), tuple(heads), scale)
    except (NotMeasured, NotImplementedError, RuntimeError, ImportError) as error:
        findings.lack(f"attention/{subjects.count_name(tokens)}/torch_varlen", first_sentence(error))
        return figures
    return figures | {f"torch_varlen_{name}": value for name, value in theirs.items()}


def _varlen(lengths: list[int], repeats: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns torch's own causal attention over packed sequences, which takes no rotary embedding."""
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10

    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    takes: Any = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in takes else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not grouped and repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        attended: Any = varlen_attn(query, key, value, ends, ends, max(lengths), max(lengths), **causal, **grouped)
        return attended

    return attend


def _cudnn(scale: Scale, directory: Path, tokens: int) -> dict[str, float]:
    """Measures passes with cuDNN's attention allowed and not, over lengths that are new each time.

    Attention is torch's SDPA, which may take cuDNN's. Flash attention for variable lengths, which a policy takes by
    itself, never does.
    """
    policy = subjects.make_policy(
        directory, recompute=subjects.RECOMPUTES[0], tokens=tokens, optimizer=False, attention="sdpa"
    )
    if subjects.forms_of(policy)["attention"] != "sdpa":
        raise NotMeasured("attention is Transformer Engine's here, which torch's setting of cuDNN does not reach")
    figures: dict[str, float] = {}
    for name, allowed in (("off", False), ("on", True)):
        seeds = range(100 * allowed, 100 * allowed + 1 + 2 * scale.rounds)
        works = [work_of(policy, subjects.lengths_of("varied", tokens, scale, seed), seed) for seed in seeds]
        with subjects.cudnn_attention(allowed):
            both_passes(policy, works[0])
            seconds = [clock.device_seconds(functools.partial(both_passes, policy, work)) for work in works[1:]]
        figures[f"{name}_pass_s"] = statistics.median(seconds)
    return figures | {"on_over_off": figures["on_pass_s"] / figures["off_pass_s"]}


def _profile(findings: Findings, scale: Scale, directory: Path, tokens: int) -> dict[str, float]:
    """Notes the kernels that take the most of a forward and backward pass, and counts all of them."""
    policy = subjects.make_policy(directory, recompute=subjects.RECOMPUTES[0], tokens=tokens, optimizer=False)
    works = [work_of(policy, subjects.lengths_of("varied", tokens, scale, seed), seed) for seed in range(2)]
    both_passes(policy, works[0])
    activities = supported_activities()
    on_device = ProfilerActivity.CUDA in activities
    with profile(activities=[a for a in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if a in activities]) as taken:
        both_passes(policy, works[1])
        torch.cuda.synchronize()

    def spent(event: Any) -> float:
        return event.self_device_time_total if on_device else event.self_cpu_time_total

    if not on_device:
        findings.lack("profile/kernels", "the profiler of this torch sees the host alone: its operators are listed")
    events = [event for event in taken.key_averages() if spent(event) > 0]
    if on_device:  # an operator of the host's has its kernels' time once more, and so have marked stretches
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    total = sum(map(spent, events))
    top = sorted(events, key=spent, reverse=True)[:TOP]
    findings.more["profile"] = [
        {"name": event.key[:160], "calls": event.count, "ms": spent(event) / 1e3, "share": spent(event) / total}
        for event in top
    ]
    for row in findings.more["profile"]:
        print(f"{row['ms']:10.3f} ms {row['share']:6.1%} {row['calls']:7d}  {row['name']}")
    return {"total_ms": total / 1e3, "launches": float(sum(event.count for event in events))}
