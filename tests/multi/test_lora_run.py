"""A whole run whose two roles train adapters (LoRA) on one frozen model: what it writes, and that it can be cut."""

from __future__ import annotations

import json

import cut_runs
import pytest
import torch
from conftest import program
from safetensors.torch import load_file
from test_resume_methods import RUBRIC

from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.weights.dist_checkpoint import DistCheckpoint

pytestmark = pytest.mark.multi
LORA = {"proposer": {"rank": 4, "alpha": 8}, "solver": {"rank": 2, "targets": ["q_proj", "down_proj"]}}


def settings(base, name):
    """Self-play between two roles that start from one model."""
    own = cut_runs.self_play(base, name)
    for role, lora in LORA.items():
        own["roles"][role] = cut_runs.role(
            base, model="player_a", lr=0.02, lora=lora, loss={"kl_coef": 0.01, "centering": 4}
        )
    return own


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("lora_runs")
    cut_runs.write_data(base, RUBRIC)
    cut_runs.write_players(base)
    named = [("whole", None), ("cut", 2), ("cut", None)]
    cut_runs.run_all(base, [(settings(base, name), leave_after) for name, leave_after in named])
    return base / "runs"


def test_lora_run_that_was_cut_goes_on_exactly(runs):
    cut_runs.assert_same(runs / "whole", runs / "cut")
    for role in LORA:
        first, second = (runs / name / "adapters" / role / "adapter_model.safetensors" for name in ("whole", "cut"))
        assert first.read_bytes() == second.read_bytes()


def test_lora_run_writes_adapters_and_merged_models(runs):
    before = load_file(runs.parent / "player_a/model.safetensors")
    for role, lora in LORA.items():
        told = json.loads((runs / "whole/adapters" / role / "adapter_config.json").read_text())
        assert (told["r"], told["base_model_name_or_path"]) == (lora["rank"], str(runs.parent / "player_a"))
        merged = load_file(runs / "whole/models" / role / "model.safetensors")
        changed = {name for name in before if not torch.equal(before[name], merged[name])}
        targets = lora.get("targets", told["target_modules"])
        assert changed == {name for name in before if any(f".{target}.weight" in name for target in targets)}


def test_lora_checkpoints_are_merged_by_convert(runs, tmp_path):
    """From the run's newest checkpoint, and from the adapter that it wrote; a checkpoint itself holds no model."""
    step = Checkpoints(runs / "whole/checkpoints").newest().path
    for role in LORA:
        assert all(".lora." in key for key in DistCheckpoint(step / role).shapes)
        program("convert", "to-hf", runs / "whole", tmp_path / role, "--role", role, "--verify")
        program("convert", "to-hf", runs / "whole/adapters" / role, tmp_path / f"{role}2")
        want = load_file(runs / "whole/models" / role / "model.safetensors")
        for place in (tmp_path / role, tmp_path / f"{role}2"):
            found = load_file(place / "model.safetensors")
            assert found.keys() == want.keys()
            assert max((found[name] - want[name]).abs().max().item() for name in want) < 1e-6
    refused = program("convert", "reshard", step / "solver", tmp_path / "cut", "--tp", "2", check=False)
    assert refused.returncode == 2 and "holds adapters alone" in refused.stderr
    refused = program(
        "convert", "to-hf", step / "solver", tmp_path / "other", "--model", runs.parent / "player_b", check=False
    )
    assert refused.returncode == 2 and "an adapter means nothing without its base" in refused.stderr


def test_lora_is_said_by_check_and_counted_by_plan(runs, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(settings(runs.parent, "checked")))
    said = program("check", file).stdout
    assert "proposer: trains adapters of rank 4 on q_proj, k_proj" in said
    assert (
        "solver: trains adapters of rank 2 on q_proj, down_proj" in said and "it is the copy that proposer has" in said
    )
