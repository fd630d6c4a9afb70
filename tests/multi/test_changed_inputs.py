"""Whole runs whose files change between two starts, and whose recipe raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from megatron_rl.data.tiny import write_tiny_model

pytestmark = pytest.mark.multi
RECIPE = """
import dataclasses, json
from megatron_rl.recipes.grpo import Grpo

@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Grpo):
    def rollout(self, iteration, source, context):
        if iteration.number == 1:
            return self.broken()
        return super().rollout(iteration, source, context)

    def broken(self):
        return json.loads("{")

def grade(response, payload):
    return len(set(response)) / 100
"""
TRAIN = {
    "data": {"path": "rows.jsonl", "chat": True},
    "roles": {"generator": {"model": {"path": "model"}, "sampling": {"max_tokens": 8}, "max_prompt_tokens": 40}},
    "recipe": {"target": "odd_recipe:Odd", "args": {"updates": 2, "group_size": 4, "template": "plain.txt"}},
    "reward": {"target": "odd_recipe:grade", "workers": 1}, "preflight": {"reward": False},
    "run": {"name": "train", "prompts_per_iteration": 2, "save_every": 1},
}  # fmt: skip
SFT = {
    "model": {"path": "model"}, "data": {"train": "pairs.jsonl", "max_tokens": 64}, "samples_per_step": 2, "steps": 2,
    "micro_batch_tokens": 64, "run": {"name": "sft", "save_every": 1},
}  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Starts a command on a config in a directory of its own, and returns (status, output, errors)."""
    write_tiny_model(tmp_path / "model")
    (tmp_path / "odd_recipe.py").write_text(RECIPE)
    (tmp_path / "plain.txt").write_text("{question}")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(4)))
    pairs = [{"prompt": f"a{i}", "response": f"b{i}"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def started(command, config, *words):
        (tmp_path / f"{command}.yaml").write_text(json.dumps(config))
        line = [sys.executable, "-m", "megatron_rl", command, f"{command}.yaml", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return started


def test_a_run_whose_recipe_raised_is_mended_and_goes_on(start, tmp_path):
    status, _, errors = start("train", TRAIN)
    why = f"JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) ({tmp_path}/"
    assert status == 1 and f"megatron-rl train: {why}odd_recipe.py:13 in broken)" in errors
    log = (tmp_path / "runs/train/logs/driver.log").read_text()
    assert "Traceback" in log and "json/decoder.py" in log and "in broken" in log
    shown = [sys.executable, "-m", "megatron_rl", "status", "runs/train"]
    told = subprocess.check_output(shown, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    assert "its last start failed: JSONDecodeError" in told and "odd_recipe.py:13 in" in told.replace("\n", " ")
    (tmp_path / "odd_recipe.py").write_text(RECIPE.replace("iteration.number == 1", "iteration.number == 9"))
    status, output, errors = start("train", TRAIN)
    assert status == 0, errors
    assert "changed since the newest checkpoint, and used from here on: module odd_recipe (" in output
    assert json.loads((tmp_path / "runs/train/summary.json").read_text())["failed"] is None
    (tmp_path / "plain.txt").write_text("Answer: {question}")
    status, _, errors = start("train", TRAIN)
    assert status == 2 and "recipe.args.template (plain.txt): bytes 10 -> 18" in errors, "also of a finished run"


@pytest.mark.matrix
def test_fine_tuning_does_not_go_on_in_other_rows(start, tmp_path):
    """It went on in the middle of the new rows, and said nothing."""
    assert start("sft", SFT)[0] == 0
    rows = (tmp_path / "pairs.jsonl").read_text()
    (tmp_path / "pairs.jsonl").write_text(rows.replace("b3", "c3"))
    more = {**SFT, "steps": 3}
    status, _, errors = start("sft", SFT)
    assert status == 2 and "data.train (pairs.jsonl): sha256" in errors and "run.resume=must" in errors
    status, output, errors = start("sft", more, "run.resume=must")
    assert status == 0 and "rows of data.train (pairs.jsonl): sha256" in output and "step 3/3" in output, errors
