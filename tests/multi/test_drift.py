"""The drift test: gaps are measured where they are, a steady one passes, and one that grows with every refit
does not.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import program
from fake_engines import TableEngine
from fake_policy import TablePolicy
from one_process import CommandsAtOnce, OneProcess
from tiny_models import make_model
from toys import characters

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.schema import LossConfig
from megatron_rl.engines.protocol import Sampling
from megatron_rl.session.drift import Gap, Probes, judge, measure
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rank_fleet import RankFleet
from megatron_rl.training.update import Trainee

LIMIT = 0.05


def test_gaps_are_measured_by_their_place_in_the_response():
    noise = [0.0, 0.0, 0.125, 0.125, 0.25, 0.25, 0.5, 0.5]
    engine = np.array([*noise, *noise[::2], 0.375], np.float32)  # two responses, and one of a token: its first quarter
    gap = measure(np.array([8, 4, 1]), engine, np.zeros(13, np.float32), version=7)
    assert (gap.version, gap.tokens) == (7, 13)
    assert gap.quarters == pytest.approx([0.375 / 4, 0.125, 0.25, 0.5])
    assert gap.mean == pytest.approx(3.0 / 13) and gap.max == 0.5 and 0.375 < gap.p99 <= 0.5
    assert gap.error > 0


def gaps(*means: float, error: float = 0.001) -> list[Gap]:
    return [Gap(version=v, tokens=9, mean=m, error=error, p99=m, max=m, quarters=[m] * 4) for v, m in enumerate(means)]


@pytest.mark.parametrize(
    "series, grows, above",
    [
        (gaps(0.01, 0.0105, 0.0098, 0.0101), False, False),
        (gaps(0.01, 0.02, 0.03, 0.04), True, False),
        (gaps(0.04, 0.03, 0.02, 0.01), False, False),
        (gaps(0.01, 0.01, 0.06, 0.01, error=0.05), False, True),
        (gaps(1e-7, 2e-7, 3e-7, error=0.0), False, False),  # float32
        (gaps(0.01, float("nan"), 0.01), False, True),
    ],
)
def test_what_grows_and_what_is_above_the_limit(series, grows, above):
    verdict = judge(series, LIMIT)
    assert (verdict.grows, verdict.above) == (grows, above)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_refits_that_spoil_the_weights_a_little_more_each_time_are_found(noise):
    """A context engine whose refits round, or add noise to what the engine holds."""
    vocab = 7
    policy, engine, generator = TablePolicy(vocab, lr=0.0), TableEngine(vocab, eos=1), torch.Generator().manual_seed(0)

    def refit(version: int) -> None:
        spoiled = policy.table.detach() + noise * version * torch.randn(policy.table.shape, generator=generator)
        engine.load([("table", spoiled)], version=version)

    context = RolloutContext(
        engines={"a": engine}, tokenizers={"a": characters("abtex")},
        samplings={"a": Sampling(max_tokens=20)}, max_prompt_tokens={"a": 8}, grade=lambda responses, payloads: [],
    )  # fmt: skip
    trainee = Trainee(policy=policy, loss=PolicyLoss(LossConfig(kl_coef=0.0)))
    fleet = RankFleet(
        CommandsAtOnce(), DeviceMemory({"a": trainee}), {"a": refit}, world_of=lambda policy: OneProcess(),
        ranks={"a": [0]},
    )  # fmt: skip
    fleet.start({})
    probes = Probes(fleet, context, ("a",), ["text"] * 64)
    for version in range(6):
        probes.round("a", version)
    verdict = judge(probes.gaps["a"], LIMIT)
    assert verdict.grows == (noise > 0) and probes.gaps["a"][0].mean < 1e-6


@pytest.mark.multi
def test_the_command_on_two_ranks_with_the_embedded_engine(tmp_path):
    # wide enough for whole 8-bit blocks on two ranks
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4}
    make_model(tmp_path / "model", "qwen3", vocab_size=97, **wide)
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "problems.jsonl").write_text(
        "".join(json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(40))
    )
    (tmp_path / "template.txt").write_text("{question}")
    settings = {
        "roles": {"generator": {"model": {"path": f"{tmp_path}/model"}, "layout": {"tp": 2},
                                "optimizer": {"lr": 0.01, "min_lr": 0.01},
                                "sampling": {"max_tokens": 24, "temperature": 0.6, "top_k": 3}, "max_prompt_tokens": 32,
                                "micro_batch_tokens": 128}},
        "recipe": {"target": "megatron_rl.recipes.grpo:Grpo",
                   "args": {"updates": 1, "template": f"{tmp_path}/template.txt"}},
        "data": {"path": f"{tmp_path}/problems.jsonl", "fields": {"question": "question", "answer": "answer"}},
        "run": {"dir": str(tmp_path), "name": "drift", "prompts_per_iteration": 16}, "launch": {"nproc": 2},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    text = program("drift", tmp_path / "config.yaml", "--updates", "2").stdout
    assert "generator: the mean gap is flat" in text and "quarter 4" in text
    found = json.loads((tmp_path / "drift/drift.json").read_text())
    refits = found["roles"]["generator"]["refits"]
    assert found["passed"] and [r["version"] for r in refits] == [0, 1, 2]
    assert all(0 < r["mean"] < 1e-5 and r["tokens"] > 100 for r in refits)
    assert not (tmp_path / "drift/refits.jsonl").exists() and not (tmp_path / "drift/metrics.jsonl").exists()

    eight = ("engine.quantization=fp8", "run.name=eight", "--updates", "1")
    program("drift", tmp_path / "config.yaml", *eight)
    found = json.loads((tmp_path / "eight/drift.json").read_text())
    assert found["passed"] and found["max_logprob_gap"] == 0.2
    assert all(1e-3 < r["mean"] < 0.2 for r in found["roles"]["generator"]["refits"])

    done = program("drift", tmp_path / "config.yaml", "preflight.max_logprob_gap=0.0", "--updates", "1", check=False)
    assert done.returncode == 1 and "ABOVE preflight.max_logprob_gap = 0.0" in done.stdout, done.stdout + done.stderr

    (tmp_path / "drift/metrics.jsonl").write_text("a run\n")
    done = program("drift", tmp_path / "config.yaml", check=False)
    assert done.returncode == 2 and "give the drift test a directory of its own" in done.stderr
