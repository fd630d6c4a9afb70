"""Whole runs that evaluate as the releases of RL Tango and Tandem RL do, on sets of the last-letter task: nine sets
with the verifier's verdicts, and three sets with four samples, from which the best models are kept.
"""

from __future__ import annotations

import json

import pytest
import torch
from conftest import program, tango_settings
from safetensors.torch import load_file

from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find
from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multi]


def evaluations(run):
    return [(row.iteration, row.metrics) for row in read_metrics(run) if row.scope == "eval"]


def tandem(last_letter, out, name, *settings):
    """Trains two iterations of Tandem RL, evaluated after each on three sets. Returns the run directory."""
    rows = f"path: {last_letter}/task/test.jsonl, settings: last_letter"
    sets = ", ".join(f"{{name: set{i}, {rows}, limit: {4 + 2 * i}}}" for i in range(3))
    program(
        "train", "examples/studies/tandem_last_letter/tandem.yaml",
        f"roles.generator.model.path={last_letter}/generator/model", f"data.path={last_letter}/task/train.jsonl",
        f"evaluation.sets=[{sets}]", "evaluation.every=1", "evaluation.n=4", "evaluation.k=[1, 4]",
        "evaluation.temperature=0.7", "evaluation.top_p=0.8", "evaluation.top_k=20", "evaluation.greedy=false",
        "evaluation.best={metric: generator/pass@4, keep: 3}", "run.keep=1", "run.prompts_per_iteration=8",
        "recipe.args.updates=2", "launch.nproc=1", f"run.dir={out}", f"run.name={name}", *settings,
    )  # fmt: skip
    return out / name


def test_the_best_of_a_tandem_run_are_its_checkpoints_bit_for_bit_also_after_a_resume(last_letter, tmp_path):
    whole = tandem(last_letter, tmp_path, "whole")
    found = dict(evaluations(whole))
    for metrics in found.values():
        own = [metrics[f"generator/set{i}/pass@4"] for i in range(3)]
        assert metrics["generator/pass@4"] == pytest.approx(sum(own) / 3) and "generator/accuracy_greedy" not in metrics
        assert metrics["generator/num_problems"] == 18.0
    best = json.loads((whole / "summary.json").read_text())["best"]
    values = {number: metrics["generator/pass@4"] for number, metrics in found.items()}
    ranked = sorted(values, key=lambda one: (-values[one], one))
    assert [(one["iteration"], one["value"]) for one in best] == [(number, values[number]) for number in ranked]
    rows = [json.loads(line) for line in (whole / "evaluations/iteration_000002.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 18 and {row["set"] for row in rows} == {"set0", "set1", "set2"}
    page = (whole / "report.html").read_text()
    assert "After iteration 2" in page and 'class="sample"' in page
    shown = program("status", str(whole)).stdout
    for number in (1, 2):  # run.keep is 1
        checkpoint = whole / f"checkpoints/iteration_{number:06d}"
        convert.to_hf(find(checkpoint, role="generator"), tmp_path / f"converted_{number}", verify=True)
        exported = load_file(whole / f"best/iteration_{number:06d}/models/generator/model.safetensors")
        converted = load_file(tmp_path / f"converted_{number}/model.safetensors")
        assert exported.keys() == converted.keys()
        assert all(torch.equal(exported[name], converted[name]) for name in exported)
        assert f"best after iteration {number}" in shown
    tandem(last_letter, tmp_path, "cut", "run.iterations=1")
    cut = tandem(last_letter, tmp_path, "cut", "run.iterations=2", "run.resume=must")
    assert evaluations(cut) == evaluations(whole)
    again = json.loads((cut / "summary.json").read_text())["best"]
    assert [(one["iteration"], one["value"]) for one in again] == [(one["iteration"], one["value"]) for one in best]


def test_a_tango_run_has_nine_sets_and_verdicts_on_the_same_answers(last_letter, tmp_path):
    rows = f"path: {last_letter}/task/test.jsonl, settings: last_letter"
    sets = ", ".join(f"{{name: set{i}, {rows}, limit: {2 + i}}}" for i in range(9))
    program(
        "train", *tango_settings(last_letter, tmp_path, "run"),
        f"evaluation={{sets: [{sets}], every: 2, temperature: 0.0, limit: null, best: {{metric: generator/accuracy}}}}",
        "recipe.args.generator_updates=2", "recipe.args.warmup_updates=1", "recipe.args.balanced_per_class=0",
        "launch.nproc=1",
    )  # fmt: skip
    for number, metrics in evaluations(tmp_path / "run"):
        own = [metrics[f"generator/set{i}/accuracy"] for i in range(9)]
        assert metrics["generator/accuracy"] == pytest.approx(sum(own) / 9)
        for i in range(9):
            judged = metrics[f"verifier/set{i}/num_correct"] + metrics[f"verifier/set{i}/num_wrong"]
            assert judged == metrics[f"generator/set{i}/num_problems"] == 2 + i
            assert metrics[f"verifier/set{i}/num_correct"] == round(own[i] * (2 + i))
        content = json.loads((tmp_path / f"run/evaluations/iteration_{number:06d}.json").read_text())
        assert len(content["sets"]) == 9 and content["sets"]["set8"]["solve"]["problems"] == 10
