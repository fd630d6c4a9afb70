"""How fast an update was: seconds of its parts, operations a second, and the share of the peak."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_policy import TablePolicy
from loops import Log, make, train
from one_process import OneProcess

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches import data_parallel_split
from megatron_rl.batches.replica_batch import COUNTED, Work
from megatron_rl.config.run import Run
from megatron_rl.config.schema import LossConfig
from megatron_rl.devices.hardware import peak_flops
from megatron_rl.lib import timing
from megatron_rl.lib.timing import Timer
from megatron_rl.models.shape import read_shape
from megatron_rl.run.metrics import SPEED, Tracker, read_metrics
from megatron_rl.session import builders
from megatron_rl.training import loop
from megatron_rl.training.update import Trainee, update
from megatron_rl.training.update import _speed as speed_of
from megatron_rl.types import Author, Rollout, spans_of
from megatron_rl.weights import flops

SHAPE = read_shape("qwen2.5-1.5b")
LOSS = PolicyLoss(LossConfig(kl_coef=0.1))
VOCAB, PROMPT = 12, 6


def rollouts(count):
    """Groups of three with one prompt each, but for some without one. An environment interrupts the policy."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        own = [(4 + number % 3, Author.POLICY, 0), (2, Author.ENVIRONMENT, -1), (3, Author.POLICY, 0)]
        spans = spans_of(*([(PROMPT, Author.ENVIRONMENT, -1), *own] if number % 4 else own))
        prompt = [number // 3] * PROMPT if number % 4 else []
        tokens = np.concatenate([prompt, rng.integers(0, VOCAB, sum(part[0] for part in own))]).astype(int)
        made.append(
            Rollout(
                role="solver", group=str(number // 3), tokens=tokens, logprobs=-rng.random(len(tokens)), spans=spans,
                advantages=float(rng.normal()),
            )
        )  # fmt: skip
    return made


class Sharing(TablePolicy):
    shares_prefixes = True


class Counting(TablePolicy):
    """A policy that counts the operations of a model."""

    def update(self, work, step, loss):
        with self.timer("forward_backward"):
            return super().update(work, step, loss) | work.flops(step, SHAPE, None)


def test_a_part_within_another_counts_for_itself_alone(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 20.0, 24.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timer = Timer()
    reduce = timer.around("reduction", lambda value: value + 1)
    with timer("passes"):
        assert reduce(1) == 2
    with timer("passes"):
        pass
    assert timer.take() == {"passes": 10.0 - 2.0 + 4.0, "reduction": 2.0} and timer.take() == {}


def test_rates_are_of_all_passes_over_what_is_computed():
    made, policy = rollouts(9), Counting(VOCAB, micro_batch_tokens=60)
    trainee = Trainee(policy=policy, loss=LOSS, samples_per_optimizer_step=5, peak_flops=1e15)
    metrics = update(OneProcess(), trainee, made)
    assert not {*COUNTED} & {*metrics}
    speed = {name.removeprefix(SPEED): value for name, value in metrics.items() if name.startswith(SPEED)}
    seconds = sum(value for name, value in speed.items() if name.startswith("seconds/"))
    assert {name.partition("/")[2] for name in speed if "/" in name} == {
        *("scatter", "reference_logprobs", "old_logprobs", "forward_backward", "waiting")
    }
    page = (Path(__file__).parents[3] / "docs/explanation/concepts.md").read_text()
    defined = set(re.findall(r"^\| `([a-z_/]+)` \|", page.partition("## How fast an update was")[2], re.MULTILINE))
    assert defined == {*speed, "seconds/gradient_reduction", "seconds/optimizer"}  # those of a policy on ranks
    lengths = np.array([len(r.tokens) for r in made])
    labels = sum(int((r.weights[1:] > 0).sum()) for r in made)
    whole = flops.count(SHAPE, lengths, labels=labels)
    assert speed["model_tflops"] * 1e12 * seconds == pytest.approx(whole.training + 2 * whole.forward, rel=1e-6)
    assert speed["mfu"] == pytest.approx(speed["model_tflops"] / 1000)
    assert speed["tokens_per_second"] * seconds == pytest.approx(lengths.sum(), rel=1e-6)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_measures_the_idle_shares_and_how_late_it_trains(tmp_path, staleness):
    (tmp_path / "question.txt").write_text("?{question}\n")
    log, speeds = Log(), list[dict[str, float]]()

    def log_speed(cycle, scope, metrics, *, iteration):
        log(cycle, scope, metrics, iteration=iteration)
        speeds.append({name: value for name, value in metrics.items() if name.startswith("speed/") and "idle" in name})

    setup, progress = make(str(tmp_path / "question.txt"), log, tmp_path / "iterations", max_staleness=staleness)
    setup = replace(setup, log=log_speed, occupied_s=lambda: 0.25 * time.perf_counter())
    train(setup, loop.Plan(iterations=5, evaluate_at_start=False), progress)
    setup.iterations.close()
    trained = [own for own in speeds if own]
    assert len(trained) == 5 and all(0 < own["speed/trainer_idle"] < 1 for own in trained)
    assert all(own["speed/engines_idle"] == pytest.approx(0.75, abs=0.05) for own in trained)
    late = [sum(log.series(f"trained_late/{age}")) for age in (1, 2)]
    assert sum(late) <= 5 and (sum(late) > 0) == (staleness > 0)
    ages = [one for one in log.series("staleness")]
    assert max(ages) <= staleness and not log.series("trained_late/0") + log.series("trained_late/3")


class ThreeRanks(OneProcess):
    """A world of three ranks, of which this process does all the work."""

    size = 3


def test_rates_are_those_of_one_rank():
    made = rollouts(9)
    metrics = update(ThreeRanks(), Trainee(policy=Counting(VOCAB), loss=LOSS, peak_flops=1e15), made)
    speed = {name.removeprefix(SPEED): value for name, value in metrics.items() if name.startswith(SPEED)}
    seconds = sum(value for name, value in speed.items() if name.startswith("seconds/"))
    assert speed["tokens_per_second"] * seconds * 3 == pytest.approx(metrics["packed_tokens"], rel=1e-6)
    assert speed_of(10.0, {"a": 4.0}, ranks=4, flops=8e13, peak=1e13) == {
        f"{SPEED}seconds/a": 4.0, f"{SPEED}seconds/waiting": 6.0, f"{SPEED}model_tflops": 2.0, f"{SPEED}mfu": 0.2,
    }  # fmt: skip
    labels = sum(int((r.weights[1:] > 0).sum()) for r in made)
    whole = flops.count(SHAPE, np.array([len(r.tokens) for r in made]), labels=labels)
    assert speed["model_tflops"] * 3e12 * seconds == pytest.approx(whole.training + whole.forward, rel=1e-6)
    assert speed_of(1.0, {"a": 2.0}, ranks=1, flops=None, peak=1.0) == {
        f"{SPEED}seconds/a": 2.0, f"{SPEED}seconds/waiting": 0.0,
    }  # fmt: skip


def test_a_shared_prompt_counts_as_often_as_it_is_computed():
    made = rollouts(9)
    shares = data_parallel_split.split_over_replicas(made, Sharing(VOCAB, micro_batch_tokens=1000), loss=LOSS)
    work = Work.over(shares.buffer(0), shares.outline, 0)
    counted = sum(int(work.batch(micro).counted.sum()) for micro in work.micros())
    lengths, shared = work.flat.lengths.astype(int), work.flat.shared.astype(int)
    wanted = flops.count(SHAPE, lengths, shared=shared, labels=counted)
    assert work.flops(0, SHAPE, None) == dict(zip(COUNTED, (wanted.forward, wanted.training), strict=True))
    assert shared.sum() > 0


def test_speeds_are_lines_of_their_own_kind(tmp_path):
    with Tracker(tmp_path / "metrics.jsonl") as tracker:
        tracker.log(
            0,
            "solver",
            {"loss": 1.0, "seconds/train": 2.0, "speed/mfu": 0.25, "speed/seconds/optimizer": 0.5},
            iteration=0,
        )
    [row] = read_metrics(tmp_path)
    assert row.speed == {"mfu": 0.25, "seconds/optimizer": 0.5}
    assert row.metrics == {"loss": 1.0} and row.time == {"train": 2.0}


def test_the_peak_is_that_of_the_device_or_the_configured_one(monkeypatch):
    names = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
    names |= {"NVIDIA GH200 480GB": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": None, "NVIDIA L4": None}
    assert {name: peak_flops(name) for name in names} == names
    assert builders.peak_flops(Run(), "bfloat16") is None or torch.cuda.is_available()
    assert builders.peak_flops(Run(peak_tflops=2.0), "float32") == 2e12
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert builders.peak_flops(Run(), "bfloat16") == 989e12 and builders.peak_flops(Run(), "float32") is None
