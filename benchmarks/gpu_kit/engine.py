"""Measures the embedded engine against transformers' `generate`, refits over CUDA IPC, and sleep, on one GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_kit import clock, subjects
from gpu_kit.findings import Findings
from gpu_kit.subjects import RandomPolicy, Scale
from gpu_kit.two_processes import pair
from megatron_rl.engines.batched_session import Row
from megatron_rl.engines.embedded.cuda_graphs import GraphRecorder
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import memory
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.weights.counting import Parallel

NAME = "1.5B"
BARS = {f"rows{rows}/times_generate": 5.0 for rows in subjects.FULL.rows}
BARS |= {"sleep/frees_of_said": 0.95}
LIMITS = {"refit/seconds": 0.2}  # the weights are copied twice, and each message has its handshake


def run(findings: Findings, scale: Scale, folder: Path) -> None:
    """Measures everything."""
    directory = subjects.write_config(folder / NAME, NAME, scale)
    findings.take("device", lambda: {"copy_gb_per_s": clock.copy_rate(scale.copied) / 1e9})
    cudnn = {"ours": False, "generate": torch.backends.cuda.cudnn_sdp_enabled()}  # a run's setting, and torch's own
    findings.more["cudnn_attention"] = cudnn
    for rows in scale.rows:
        findings.take(f"rows{rows}", functools.partial(_rollout, scale, directory, rows, cudnn))
    for rows in scale.varied_rows:
        findings.take(f"varied{rows}", functools.partial(varied_rollout, scale, directory, rows))
    with subjects.one_rank():
        tokens = scale.tokens[0]
        make = functools.partial(
            subjects.make_policy, directory, recompute=subjects.RECOMPUTES[0], tokens=tokens, optimizer=True
        )
        findings.take("sleep", lambda: _sleep(make(), tokens))
        for name, verify in (("refit", "off"), ("refit_verified", "full")):
            findings.take(name, lambda n=name, v=verify: _refit(findings, scale, make(), folder / n, v))


def _rollout(scale: Scale, directory: Path, rows: int, cudnn: Mapping[str, bool]) -> dict[str, float]:
    """Has both sides write `scale.new` tokens in each of `rows` rows, with cuDNN's attention as `cudnn` allows it.

    Ours draws them at temperature 1 with a log-prob of each; `generate` is greedy, which is the least work for it, and
    gives no log-probs.
    """
    model: Any = subjects.transformers_model(directory).eval()
    engine = EmbeddedEngine(directory, dtype=torch.bfloat16, max_batch=rows)
    engine.load(model.named_parameters(), version=0)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, model.config.vocab_size, (rows, scale.prompt))

    def ours(new: int) -> int:
        rows_made = complete(engine, prompts.tolist(), Sampling(max_tokens=new))
        return sum(len(completion.tokens) for row in rows_made for completion in row)

    def theirs(new: int) -> int:
        tokens = torch.from_numpy(prompts).to("cuda")
        generated = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new, use_cache=True
        )
        return rows * (generated.shape[1] - scale.prompt)

    figures: dict[str, float] = {}
    for name, way in (("ours", ours), ("generate", theirs)):
        written: list[int] = []
        with subjects.cudnn_attention(cudnn[name]):
            way(min(16, scale.new))
            seconds = clock.wall_seconds(lambda way=way, written=written: written.append(way(scale.new)))
        if written != [rows * scale.new]:
            raise RuntimeError(f"{name} wrote {written} tokens in {rows} rows of {scale.new}: rows have ended early")
        figures |= {f"{name}_s": seconds, f"{name}_tokens_per_s": rows * scale.new / seconds}
    return figures | {"times_generate": figures["generate_s"] / figures["ours_s"]}


class CountingRecorder(GraphRecorder):
    """A recorder that passes steps on to another recorder, and counts captures and replays."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder, self.captures, self.replays = recorder, 0, 0

    def rehearse(self, step: Callable[[], None]) -> None:
        """Runs a step for the first time."""
        self._recorder.rehearse(step)

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Records a step. Returns a function that replays and counts it, or None if the step cannot be recorded."""
        replay = self._recorder.record(step)
        if replay is None:
            return None
        self.captures += 1

        def counted() -> None:
            self.replays += 1
            replay()

        return counted


def varied_rollout(scale: Scale, directory: Path, rows: int) -> dict[str, float]:
    """Measures rollouts whose lengths vary as those of a reasoning model do: row by row log-normal around `scale.new`
    tokens, at most twice as many. At most `scale.rows[-1]` rows are decoded together, and waiting rows follow.

    Measures them with CUDA graphs and without, after 16 tokens of each row. The seconds with graphs include the
    captures, as in training, where each iteration captures anew.
    """
    model: Any = subjects.transformers_model(directory).eval()
    engine = EmbeddedEngine(directory, dtype=torch.bfloat16, max_batch=min(rows, scale.rows[-1]))
    engine.load(model.named_parameters(), version=0)
    del model
    draw, sigma = np.random.default_rng(0), 0.8
    drawn = draw.lognormal(np.log(scale.new) - sigma**2 / 2, sigma, rows)
    lengths = drawn.round().clip(1, 2 * scale.new).astype(int).tolist()
    prompts = draw.integers(0, engine.arch.vocab, (rows, scale.prompt))

    def seconds(most: int) -> float:
        samplings = [Sampling(max_tokens=min(length, most)) for length in lengths]
        pairs = zip(prompts, samplings, strict=True)
        rows_asked = [Row(prompt, key, 0, sampling) for key, (prompt, sampling) in enumerate(pairs)]
        lengths_made: list[int] = []
        taken = clock.wall_seconds(
            lambda: lengths_made.extend(len(completion.tokens) for completion in engine.generate_rows(rows_asked))
        )
        if lengths_made != [sampling.max_tokens for sampling in samplings]:
            raise RuntimeError(f"{sum(lengths_made)} tokens were written in {rows} rows: rows have ended early")
        return taken

    figures: dict[str, float] = {"tokens": sum(lengths), "longest": max(lengths)}
    with subjects.cudnn_attention(False):
        if engine._recorder is not None:
            seconds(16)
            engine._recorder = recorder = CountingRecorder(engine._recorder)
            figures |= {"seconds": seconds(max(lengths)), "captures": recorder.captures, "replays": recorder.replays}
            figures["tokens_per_s"] = sum(lengths) / figures["seconds"]
        engine._recorder = None
        figures["without_graphs_tokens_per_s"] = sum(lengths) / seconds(max(lengths))
    return figures


def _sleep(policy: RandomPolicy, tokens: int) -> dict[str, float]:
    """Puts a policy to sleep and wakes it, against what `megatron-rl plan` says that sleep frees."""
    shape = read_shape(str(policy.role.model.path))
    load = MicroBatchLoad(tokens=tokens)
    held = memory.training(Actor(shape, Parallel(world=1), Precision.gpu("bfloat16")), load, stage=0)
    clock.wall_seconds(policy.memory.sleep)  # host memory is pinned the first time
    clock.wall_seconds(policy.memory.wake)
    at_first = torch.cuda.memory_allocated()
    asleep_s = clock.wall_seconds(policy.memory.sleep)
    freed = at_first - torch.cuda.memory_allocated()
    awake_s = clock.wall_seconds(policy.memory.wake)
    return {
        "said_gib": (held.gradients + held.optimizer) / 2**30,
        "freed_gib": freed / 2**30,
        "frees_of_said": freed / (held.gradients + held.optimizer),
        "back_of_held": torch.cuda.memory_allocated() / at_first,
        "sleep_s": asleep_s,
        "wake_s": awake_s,
        "sleep_gb_per_s": held.optimizer / asleep_s / 1e9,  # gradients are not copied
        "wake_gb_per_s": held.optimizer / awake_s / 1e9,
    }


def _refit(findings: Findings, scale: Scale, policy: RandomPolicy, folder: Path, verify: str) -> dict[str, float]:
    """Brings an engine in another process on the same GPU to the policy's weights, several times."""
    with pair(policy, folder, verify=verify, texts=[]) as engine:
        engine.await_engine()
        first = engine.refit(0)  # plans, opens handles and makes slots
        figures = [engine.refit(version) for version in range(1, 1 + scale.refits)]
        kinds = engine.kinds
    if kinds != ["cuda_ipc"]:
        raise RuntimeError(f"weights went by {kinds}, not by cuda_ipc")
    seconds = sorted(refit["refit/seconds"] for refit in figures)[len(figures) // 2]
    moved = figures[-1]["refit/gigabytes"] + figures[-1]["refit/local_gigabytes"]
    rates = {"first_s": first["refit/seconds"], "seconds": seconds, "gigabytes": moved, "gb_per_s": moved / seconds}
    if "device/copy_gb_per_s" in findings.figures:
        rates["of_device_copy"] = rates["gb_per_s"] / findings.figures["device/copy_gb_per_s"]
    return rates
