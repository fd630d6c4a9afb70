"""The load-balancing loss of experts does not depend on how sequences are split over replicas, ranks and micro-batches:
its gradient equals transformers' in float64.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_models import make_model

WORKER = Path(__file__).parents[1] / "helpers" / "router_aux_worker.py"
SP, CP = {"tp": 2, "sequence_parallel": True, "etp": 1}, {"cp": 2}
VPP = {"pp": 2, "vpp": 2, "overlap_p2p": True}
FULL = {"recompute": "full"}
MOE = {"recompute": "selective", "recompute_modules": ["moe"]}
SEVERAL = [5, 17, 9, 23, 12, 7, 30, 3]
CASES: dict[int, list[dict]] = {
    1: [
        {"name": "one micro-batch", "lengths": SEVERAL, "budget": 4096},
        {"name": "several micro-batches", "lengths": SEVERAL, "budget": 30},
        {"name": "recomputed experts", "model": "qwen2_moe", "lengths": SEVERAL, "model_settings": MOE},
    ],
    2: [
        {"name": "one sequence on two replicas", "lengths": [21], "budget": 21},
        {"name": "three full micro-batches on two replicas", "lengths": [21, 21, 21], "budget": 21},
        {"name": "uneven replicas", "lengths": SEVERAL, "budget": 40, "layout": {"ep": 2}, "model_settings": FULL},
        {"name": "padding of cp", "lengths": [21], "layout": CP},
        {"name": "padding of tp with sp", "model": "mixtral", "lengths": [21], "layout": SP},
        {"name": "interleaved stages", "lengths": SEVERAL, "layout": VPP, "model_settings": FULL},
    ],
    4: [
        {"name": "replicas of sp", "lengths": [21, 5, 13], "budget": 21, "layout": SP},
        {"name": "sp with cp", "lengths": [21, 6, 7], "budget": 40, "layout": SP | CP},
        {"name": "replicas of stages", "lengths": [21, 6, 7], "budget": 24, "layout": {"pp": 2}},
    ],
}


@pytest.mark.multi
@pytest.mark.parametrize("world", CASES)
def test_cases_the_load_balancing_loss_is_the_same_for_every_split(tmp_path, world):
    for family in ("qwen3_moe", "qwen2_moe", "mixtral"):
        make_model(tmp_path / family, family, vocab_size=97, num_hidden_layers=4)
    cases = [{"model": "qwen3_moe", "layout": {}, **case} for case in CASES[world]]
    for rank, answers in enumerate(run_ranks(WORKER, world, tmp_path / "out", str(tmp_path), json.dumps(cases))):
        unbalanced, balanced = answers.pop("norms")
        assert unbalanced == 0.0 < balanced, "two roles on one model: the second alone has the loss"
        for name, errors in answers.items():
            assert errors["largest"] > 1e-3, f"{name}: the loss has no gradient"
            off = errors["error"] / errors["largest"]
            assert off < 4e-6, f"{name}, rank {rank}: a gradient is off by {off:.1e} of the largest"
