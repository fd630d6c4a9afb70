"""Whole iterations of Tango with two models on one CUDA device."""

from __future__ import annotations

import gpu_rank
from conftest import ROOT, tango_settings

from megatron_rl.main import main
from megatron_rl.run.metrics import read_metrics

pytestmark = gpu_rank.MARKS


def test_iterations_of_both_roles_with_sleep(last_letter, tmp_path, monkeypatch):
    """Rollouts, verdicts, updates, refits and a checkpoint of generator and verifier, each asleep in the other's
    iteration."""
    monkeypatch.chdir(ROOT)
    settings = [
        "launch.nproc=1", "recipe.args.generator_updates=1", "recipe.args.warmup_updates=1",
        "run.prompts_per_iteration=4",
        "evaluation.sets=[]", "roles.generator.sleep=true", "roles.verifier.sleep=true",
        "roles.generator.model.dtype=bfloat16",
    ]  # fmt: skip
    assert main(["train", *tango_settings(last_letter, tmp_path, "tango"), *settings]) == 0
    rows = [row for row in read_metrics(tmp_path / "tango") if "grad_norm" in row.metrics]
    assert {row.scope for row in rows} == {"generator", "verifier"}
    assert all(row.metrics["grad_norm"] > 0 and row.metrics["loss"] == row.metrics["loss"] for row in rows)
