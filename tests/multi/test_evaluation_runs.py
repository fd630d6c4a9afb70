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
from megatron_rl.rewards.verdicts import final_verdict
from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multi]


def evaluations(run):
    return [(row.iteration, row.metrics) for row in read_metrics(run) if row.scope == "eval"]


def tandem(last_letter, out, name, *settings):
    """Trains four iterations of Tandem RL, evaluated before and after each on three sets. Returns the run directory.

    The learning rate rises until it spoils the model, so that the best evaluation is neither the first nor the last.
    """
    rows = f"path: {last_letter}/task/test.jsonl, settings: last_letter"
    sets = ", ".join(f"{{name: set{i}, {rows}, limit: {4 + 2 * i}}}" for i in range(3))
    program(
        "train", "examples/studies/tandem_last_letter/tandem.yaml",
        f"roles.generator.model.path={last_letter}/generator/model", f"data.path={last_letter}/task/train.jsonl",
        f"evaluation.sets=[{sets}]", "evaluation.every=1", "evaluation.n=4", "evaluation.k=[1, 4]",
        "evaluation.temperature=1.3", "evaluation.greedy=false",
        "evaluation.best={metric: generator/pass@4, keep: 2}", "run.keep=1", "run.prompts_per_iteration=8",
        "roles.generator.optimizer.lr=4e-3", "roles.generator.optimizer.warmup_steps=8", "run.seed=1",
        "recipe.args.updates=4", "launch.nproc=1", f"run.dir={out}", f"run.name={name}", *settings,
    )  # fmt: skip
    return out / name


def best_of(run):
    return [(one["iteration"], one["value"]) for one in json.loads((run / "summary.json").read_text())["best"]]


def assert_exports_are_the_checkpoints(run, number, roles, out):
    """The exported models of an iteration are bit for bit what its checkpoint is converted to."""
    checkpoint = run / f"checkpoints/iteration_{number:06d}"
    for role in roles:
        convert.to_hf(find(checkpoint, role=role), out / f"{number}_{role}", verify=True)
        exported = load_file(run / f"best/iteration_{number:06d}/models/{role}/model.safetensors")
        converted = load_file(out / f"{number}_{role}/model.safetensors")
        assert exported.keys() == converted.keys()
        assert all(torch.equal(exported[name], converted[name]) for name in exported)


@pytest.mark.matrix
def test_the_best_of_a_tandem_run_are_its_checkpoints_bit_for_bit_also_after_resumes_around_the_best(
    last_letter, tmp_path
):
    whole = tandem(last_letter, tmp_path, "whole")
    found = dict(evaluations(whole))
    for metrics in found.values():
        own = [metrics[f"generator/set{i}/pass@4"] for i in range(3)]
        assert metrics["generator/pass@4"] == pytest.approx(sum(own) / 3) and "generator/accuracy_greedy" not in metrics
        assert metrics["generator/num_problems"] == 18.0
    values = {number: metrics["generator/pass@4"] for number, metrics in found.items()}
    ranked = sorted(values, key=lambda one: (-values[one], one))
    assert 1 < ranked[0] < 4, "cuts before, at and after the best"
    assert best_of(whole) == [(number, values[number]) for number in ranked[:2]]
    rows = [json.loads(line) for line in (whole / "evaluations/iteration_000002.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 18 and {row["set"] for row in rows} == {"set0", "set1", "set2"}
    page = (whole / "report.html").read_text()
    assert "After iteration 4" in page and 'class="sample"' in page
    assert f"best after iteration {ranked[0]}" in program("status", str(whole)).stdout
    assert_exports_are_the_checkpoints(whole, ranked[0], ["generator"], tmp_path)  # run.keep is 1

    for done in range(1, 5):
        cut = tandem(
            last_letter, tmp_path, "cut", f"run.iterations={done}", f"run.resume={'must' if done > 1 else 'auto'}"
        )
        assert best_of(cut)[0] == max(((n, values[n]) for n in range(done + 1)), key=lambda one: (one[1], -one[0]))
    assert evaluations(cut) == evaluations(whole) and best_of(cut) == best_of(whole)
    name = f"best/iteration_{ranked[0]:06d}/models/generator/model.safetensors"
    assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_a_tango_run_has_nine_sets_every_ten_updates_and_verdicts_on_the_same_answers(last_letter, tmp_path):
    rows = f"path: {last_letter}/task/test.jsonl, settings: last_letter"
    sets = ", ".join(f"{{name: set{i}, {rows}, limit: {2 + i}}}" for i in range(9))
    program(
        "train", *tango_settings(last_letter, tmp_path, "run"),
        f"evaluation={{sets: [{sets}], every: 13, at_start: false, temperature: 0.0, limit: null}}",
        "evaluation.best.metric=generator/accuracy",
        "recipe.args.generator_updates=10", "recipe.args.warmup_updates=0", "recipe.args.balanced_per_class=0",
        "run.prompts_per_iteration=4", "launch.nproc=1",
    )  # fmt: skip
    run = tmp_path / "run"
    assert [number for number, _ in evaluations(run)] == [13]
    assert sum(row.scope == "generator" for row in read_metrics(run)) == 10
    for number, metrics in evaluations(run):
        own = [metrics[f"generator/set{i}/accuracy"] for i in range(9)]
        assert metrics["generator/accuracy"] == pytest.approx(sum(own) / 9)
        for i in range(9):
            judged = metrics[f"verifier/set{i}/num_correct"] + metrics[f"verifier/set{i}/num_wrong"]
            assert judged == metrics[f"generator/set{i}/num_problems"] == 2 + i
            assert metrics[f"verifier/set{i}/num_correct"] == round(own[i] * (2 + i))
        content = json.loads((run / f"evaluations/iteration_{number:06d}.json").read_text())
        assert len(content["sets"]) == 9 and content["sets"]["set8"]["solve"]["problems"] == 10
    rows = [json.loads(line) for line in (run / "evaluations/iteration_000013.jsonl").read_text().splitlines()]
    assert len(rows) == 54 and all((r["confidence"] == 1.0) is bool(final_verdict(r["verification"])) for r in rows)
    page = (run / "report.html").read_text()
    assert "After iteration 13" in page and 'class="sample"' in page and "<b>Verification</b>" in page
    assert [number for number, _ in best_of(run)] == [13]
    assert_exports_are_the_checkpoints(run, 13, ["generator", "verifier"], tmp_path)
