"""Our actor equals Hugging Face transformers: log-probs, loss, every gradient, and the weights after one optimizer step."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_models import make_model

WORKER = Path(__file__).parent / "parity_worker.py"
TP, PP = {"tp": 2}, {"pp": 2}
SP = {"tp": 2, "sequence_parallel": True}
EP, ETP = {"ep": 2}, {"etp": 2}
VPP = {"pp": 2, "vpp": 2, "overlap_p2p": True}

CASES: dict[int, list[dict]] = {
    1: [
        {"name": "tp1-packed", "layout": {}, "packed": True},
        {"name": "tp1-padded", "layout": {}, "packed": False},
        {"name": "tp1-one-micro-batch", "layout": {}, "packed": True, "budget": 4096},
        {"name": "tp1-tied-recompute", "model": "qwen2_tied", "layout": {}, "packed": True, "recompute": "full"},
        {"name": "qwen3-packed", "model": "qwen3", "layout": {}, "packed": True},
        {"name": "llama3-packed", "model": "llama", "layout": {}, "packed": True},
        {"name": "mistral-packed", "model": "mistral", "layout": {}, "packed": True},
        {"name": "mixtral-packed", "model": "mixtral", "layout": {}, "packed": True},
        {"name": "qwen3_moe-packed", "model": "qwen3_moe", "layout": {}, "packed": True},
        {"name": "qwen3_moe-renormalised-padded", "model": "qwen3_moe_renormalised", "layout": {}, "packed": False},
        {"name": "qwen2_moe-packed", "model": "qwen2_moe", "layout": {}, "packed": True},
        {"name": "qwen2_moe-recompute-padded", "model": "qwen2_moe", "layout": {}, "packed": False, "recompute": "full"},
    ],
    2: [
        {"name": "tp2-packed", "layout": TP, "packed": True},
        {"name": "tp2-padded", "layout": TP, "packed": False},
        {"name": "tp2sp-packed", "layout": SP, "packed": True},
        {"name": "tp2sp-padded", "layout": SP, "packed": False},
        {"name": "pp2-packed", "layout": PP, "packed": True},
        {"name": "pp2-padded", "layout": PP, "packed": False},
        {"name": "pp2-tied", "model": "qwen2_tied", "layout": PP, "packed": True},
        {"name": "pp2vpp2-packed", "layout": VPP, "packed": True},
        {"name": "dp2-packed", "layout": {}, "packed": True},
        {"name": "dp2-padded", "layout": {}, "packed": False},
        {"name": "qwen3-tp2-packed", "model": "qwen3", "layout": TP, "packed": True},
        {"name": "qwen3-tp2sp-packed", "model": "qwen3", "layout": SP, "packed": True},
        {"name": "mistral-tp2sp-packed", "model": "mistral", "layout": SP, "packed": True},
        {"name": "mixtral-ep2-packed", "model": "mixtral", "layout": EP, "packed": True},
        {"name": "mixtral-etp2-padded", "model": "mixtral", "layout": ETP, "packed": False},
        {"name": "mixtral-dp2-packed", "model": "mixtral", "layout": {}, "packed": True},
        {"name": "qwen3_moe-ep2-padded", "model": "qwen3_moe", "layout": EP, "packed": False},
        {"name": "qwen3_moe-tp2sp-packed", "model": "qwen3_moe", "layout": SP, "packed": True},
        {"name": "qwen3_moe-tp2sp-etp1-packed", "model": "qwen3_moe_renormalised", "layout": SP | {"etp": 1}, "packed": True},
        {"name": "qwen2_moe-tp2sp-ep2-packed", "model": "qwen2_moe", "layout": SP | EP | {"etp": 1}, "packed": True},
        {"name": "qwen2_moe-tp2sp-padded", "model": "qwen2_moe", "layout": SP, "packed": False},
        {"name": "qwen2_moe-pp2-packed", "model": "qwen2_moe", "layout": PP, "packed": True},
        {"name": "qwen3_moe-pp2vpp2-packed", "model": "qwen3_moe_renormalised", "layout": VPP, "packed": True},
    ],
    4: [
        {"name": "tp2pp2-packed", "layout": TP | PP, "packed": True},
        {"name": "tp2pp2sp-padded", "layout": SP | PP, "packed": False},
        {"name": "tp2dp2-packed", "layout": TP, "packed": True},
        {"name": "pp2dp2-packed", "layout": PP, "packed": True},
        {"name": "mixtral-tp2sp-ep2-packed", "model": "mixtral", "layout": SP | EP, "packed": True},
        {"name": "qwen2_moe-tp2sp-dp2-ep2-etp1-padded", "model": "qwen2_moe", "layout": SP | EP | {"etp": 1}, "packed": False},
        {"name": "qwen3_moe-pp2-ep2-packed", "model": "qwen3_moe", "layout": PP | EP, "packed": True},
        {"name": "qwen3_moe-pp2vpp2-ep2-padded", "model": "qwen3_moe_renormalised", "layout": VPP | EP, "packed": False},
        {"name": "qwen3_moe-ep2-dp4-packed", "model": "qwen3_moe", "layout": EP, "packed": True},
    ],
}
GRADIENTS = 2e-6  # largest error over largest gradient
BOUNDS = {  # absolute, fp32, one Adam step of lr 1e-2
    "logprobs": 2e-6,
    "reference": 2e-6,
    "loss": 5e-7,
    "loss_forward": 5e-7,
    "entropy": 1e-6,
    "grad_norm": 1e-6,
    "weights": 2e-6,
    "names": 0.0,
    "swap": 0.0,
    "buckets": 0.0,
    "cast": 0.0,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("parity")
    sizes = dict(vocab_size=97)  # odd: the vocabulary is padded under tp 2
    make_model(directory / "qwen2", "qwen2", **sizes)
    make_model(directory / "qwen2_tied", "qwen2", tie_word_embeddings=True, **sizes)
    make_model(directory / "qwen3", "qwen3", **sizes)
    for family in ("llama", "mistral", "mixtral", "qwen3_moe", "qwen2_moe"):
        make_model(directory / family, family, **sizes)
    make_model(directory / "qwen3_moe_renormalised", "qwen3_moe", norm_topk_prob=True, num_hidden_layers=4, **sizes)

    @cache
    def of(world: int) -> list[dict]:
        return run_ranks(WORKER, world, directory / f"world{world}", str(directory), json.dumps(CASES[world]))

    return of


@pytest.mark.multi
@pytest.mark.parametrize(("world", "name"), [(world, case["name"]) for world, cases in CASES.items() for case in cases])
def test_parity_with_transformers(results, world, name):
    for rank, answer in enumerate(results(world)):
        errors = answer[name]
        assert errors["moved"] > 5e-3, "the optimizer step changed nothing"
        assert errors["largest_gradient"] > 1e-2
        relative = errors["gradients"] / errors["largest_gradient"]
        assert relative <= GRADIENTS, f"rank {rank}: gradients are off by {relative:.1e} of the largest"
        for what, bound in BOUNDS.items():
            assert errors[what] <= bound, f"rank {rank}: {what} is off by {errors[what]:.2e}, bound {bound:.0e}"
