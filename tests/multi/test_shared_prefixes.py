"""An update that computes the prompt of several rollouts once gives the numbers of one that computes it for each."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from prefixes_worker import GROUPS
from ranks import run_ranks
from tiny_models import make_model

WORKER = Path(__file__).parents[1] / "helpers" / "prefixes_worker.py"
SP = {"tp": 2, "sequence_parallel": True}
VPP = {"pp": 2, "vpp": 2, "overlap_p2p": True}
RECOMPUTE = {"recompute": "full"}
SELECTIVE = {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}
CASES: dict[int, list[dict]] = {
    1: [
        {"name": "qwen2", "model": "qwen2"},
        {"name": "qwen2-one-micro-batch", "model": "qwen2", "budget": 4096, "loss": "policy"},
        {"name": "qwen2-recompute", "model": "qwen2", "model_settings": RECOMPUTE, "loss": "distilled"},
        {"name": "gemma3", "model": "gemma3_text", "model_settings": SELECTIVE},
        {"name": "qwen2_moe-replay", "model": "qwen2_moe", "replay": True, "loss": "policy"},
        {"name": "deepseek_v3", "model": "deepseek_v3"},
        {"name": "gpt_oss", "model": "gpt_oss"},
        {"name": "qwen2-lora", "model": "qwen2", "lora": True},
    ],
    2: [
        {"name": "tp2sp", "model": "gemma3_text", "layout": SP},
        {"name": "pp2vpp2", "model": "llama", "layout": VPP},
        {"name": "dp2", "model": "qwen2", "loss": "policy"},
        {"name": "ep2", "model": "mixtral", "layout": {"ep": 2}},
        {"name": "experts-tp2sp-replay", "model": "qwen2_moe", "layout": SP, "replay": True},
    ],
    4: [
        {"name": "tp2sp-pp2", "model": "llama", "layout": SP | {"pp": 2}},
        {"name": "pp2-dp2", "model": "qwen2", "layout": {"pp": 2}, "loss": "distilled"},
    ],
}
SAME = 1e-6  # float32: the difference by the size of what differs
# Gradients of a prompt are sums in another order: twice the largest that was seen on three sets of instructions.
GRADIENTS = 2e-6  # of all gradients, by their norm; of one by the largest
COMPARED = dict.fromkeys(("logprobs", "loss", "update_loss", "entropy"), SAME) | dict.fromkeys(
    ("grad_norm", "gradients", "worst_gradient"), GRADIENTS
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prefixes")
    for family in {case["model"] for cases in CASES.values() for case in cases}:
        make_model(directory / family, family, vocab_size=97)

    @cache
    def of(world: int) -> list[dict]:
        return run_ranks(WORKER, world, directory / f"cases{world}", str(directory), json.dumps(CASES[world]))

    return of


@pytest.mark.multi
@pytest.mark.parametrize(("world", "name"), [(world, case["name"]) for world, cases in CASES.items() for case in cases])
def test_an_update_is_that_of_repeated_prompts(results, world, name):
    for rank, answer in enumerate(results(world)):
        found = answer[name]
        assert found["largest_gradient"] > 1e-3
        for what, bound in COMPARED.items():
            assert found[what] <= bound, f"rank {rank}: {what} is off by {found[what]:.1e}"


@pytest.mark.multi
def test_a_prompt_is_computed_once_in_a_micro_batch(results):
    """One micro-batch holds all: every distinct prompt once. Small ones hold no more than their budget."""
    packed = sum(prompt + own for prompt, answers in GROUPS for own in answers)
    alone = sum({prompt: prompt for prompt, _ in GROUPS}.values()) + sum(sum(answers) for _, answers in GROUPS)
    found = results(1)[0]
    one = found["qwen2-one-micro-batch"]
    assert (one["packed"], one["computed"]) == (packed, alone) and one["shared"] == packed - alone
    small = found["qwen2"]
    assert small["most_computed"] <= 40 and small["computed"] == small["packed"] - small["shared"]
    assert 0 < small["shared"] < one["shared"]
