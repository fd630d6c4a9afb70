"""`megatron-rl sft` on preference pairs is TRL's DPOTrainer (tests/oracles/trl_dpo_run)."""

from __future__ import annotations

import json

import pytest
from conftest import program
from oracles import FOLDER
from safetensors.torch import load_file

RUN = FOLDER / "trl_dpo_run"


# On data-parallel ranks with a shared prompt computed once and the reference's log-probs computed once, and on pipeline
# stages with neither.
LAYOUTS = {
    "dp": {"shared_prefixes": True, "loss": {"precompute_ref_log_probs": True}},
    "pp": {"layout": {"pp": 2}},
}


@pytest.mark.multi
@pytest.mark.parametrize("layout", LAYOUTS)
def test_preferences_weights_and_metrics_of_three_steps_are_those_of_trls_dpo_trainer(layout, tmp_path):
    record = json.loads((RUN / "record.json").read_text())
    theirs, start = record["settings"], FOLDER / "trl_run/model"
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, record["rows"])))
    config = {
        "model": {"path": str(start), "dtype": "float32"},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "validation": str(tmp_path / "pairs.jsonl"), "max_tokens": 10},
        "loss": {"objective": "dpo", "objective_args": {"beta": theirs["beta"]}} | LAYOUTS[layout].get("loss", {}),
        "optimizer": {
            "lr": theirs["learning_rate"], "betas": [theirs["adam_beta1"], theirs["adam_beta2"]],
            "eps": theirs["adam_epsilon"], "weight_decay": theirs["weight_decay"], "clip_grad": theirs["max_grad_norm"],
        },
        "samples_per_step": 5, "steps": 3, "micro_batch_tokens": 20,
        "run": {"dir": str(tmp_path), "name": "run"}, "launch": {"nproc": 2},
    }  # fmt: skip
    config |= {name: value for name, value in LAYOUTS[layout].items() if name != "loss"}
    (tmp_path / "dpo.json").write_text(json.dumps(config))
    program("sft", tmp_path / "dpo.json")

    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    ours = [line["metrics"] for line in lines if line["scope"] == "sft"]
    assert len(ours) == len(record["steps"]) == 3
    for found, wanted in zip(ours, record["steps"], strict=True):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert "engine_gap" not in found
        if layout == "dp":  # the prompt of each pair is computed once
            assert found["shared_tokens"] >= sum(len(row["prompt"].split()) for row in record["rows"])
    assert ours[-1]["validation_rewards/accuracies"] == 1.0 and ours[-1]["validation_loss"] < ours[-1]["loss"]
    assert (tmp_path / "run/reference_logprobs.npz").exists() == (layout == "dp")
    before, after = load_file(start / "model.safetensors"), load_file(RUN / "after.safetensors")
    now = load_file(tmp_path / "run/model/model.safetensors")
    apart = max((now[name] - after[name]).abs().max().item() for name in after)
    moved = max((before[name] - after[name]).abs().max().item() for name in after)
    assert apart < 1e-4 * moved and moved > 5e-3
