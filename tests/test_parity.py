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
VPP = {"pp": 2, "vpp": 2, "overlap_p2p": True}

CASES: dict[int, list[dict]] = {
    1: [
        {"name": "tp1-packed", "layout": {}, "packed": True},
        {"name": "tp1-padded", "layout": {}, "packed": False},
        {"name": "tp1-one-micro-batch", "layout": {}, "packed": True, "budget": 4096},
        {"name": "tp1-tied-recompute", "model": "qwen2_tied", "layout": {}, "packed": True, "recompute": "full"},
        {"name": "qwen3-packed", "model": "qwen3", "layout": {}, "packed": True},
        {"name": "llama3-packed", "model": "llama", "layout": {}, "packed": True},
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
    ],
    4: [
        {"name": "tp2pp2-packed", "layout": TP | PP, "packed": True},
        {"name": "tp2pp2sp-padded", "layout": SP | PP, "packed": False},
        {"name": "tp2dp2-packed", "layout": TP, "packed": True},
        {"name": "pp2dp2-packed", "layout": PP, "packed": True},
    ],
}
GRADIENTS = 1e-6  # largest error over largest gradient
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
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("parity")
    sizes = dict(vocab_size=97)  # odd: the vocabulary is padded under tp 2
    make_model(directory / "qwen2", "qwen2", **sizes)
    make_model(directory / "qwen2_tied", "qwen2", tie_word_embeddings=True, **sizes)
    make_model(directory / "qwen3", "qwen3", **sizes)
    make_model(directory / "llama", "llama", **sizes)

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
