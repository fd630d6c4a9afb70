"""Whole turns of Tango with two models on one CUDA device."""

from __future__ import annotations

import json

from megatron_rl.main import main


def test_turns_of_both_roles_with_sleep_and_an_evaluation(tmp_path, monkeypatch):
    """Generation, review, refits and updates of generator and verifier; each sleeps in the other's turn."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "tango", "tango.yaml", "--tiny", "tiny"]) == 0
    settings = [
        "recipe.args.generator_updates=3", "recipe.args.generator_turns=2", "recipe.args.reviewed=all",
        "recipe.args.review_below=null", "roles.generator.sleep=true", "roles.verifier.sleep=true",
        "roles.generator.model.dtype=bfloat16", "run.dir=runs", "run.name=gpu", "evaluation.num_prompts=4",
    ]  # fmt: skip
    assert main(["train", "tango.yaml", *settings]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/gpu/metrics.jsonl").read_text().splitlines()]
    print(rows)
