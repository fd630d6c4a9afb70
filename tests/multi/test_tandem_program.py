"""Whole runs with a junior: Tandem RL by its own recipe, and Tango with a tandem generator, on last-letter models."""

from __future__ import annotations

import pytest
from conftest import program, tango_settings

from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multi]


def rows_of(run, scope):
    return [row.metrics for row in read_metrics(run) if row.scope == scope]


def test_a_tandem_run_learns_from_its_seniors_tokens(last_letter, tmp_path):
    """Two ranks, two optimizer steps per update; the preflight compares log-probs on senior tokens."""
    program(
        "train", "examples/studies/tandem_last_letter/tandem.yaml",
        f"roles.generator.model.path={last_letter}/generator/model",
        f"data.path={last_letter}/task/train.jsonl",
        f"evaluation.sets=[{{path: {last_letter}/task/test.jsonl, settings: last_letter}}]",
        "evaluation.limit=32",
        "run.prompts_per_iteration=8", "recipe.args.updates=2", "roles.generator.samples_per_optimizer_step=32",
        "launch.nproc=2", f"run.dir={tmp_path}", "run.name=run",
    )  # fmt: skip
    iterations = rows_of(tmp_path / "run", "generator")
    assert len(iterations) == 2
    for row in iterations:
        assert 0.3 < row["senior_share"] < 0.7 and row["switches"] > 1
        assert row["skipped"] or row["trained_tokens"] == pytest.approx(row["senior_share"] * row["tokens"])
        assert row["skipped"] or row["engine_gap"] < 1e-3


def test_tango_with_a_tandem_generator_trains_both(last_letter, tmp_path):
    settings = ["roles.generator.tandem={}", "evaluation.sets=[]", "run.iterations=2", "run.save_every=0"]
    program("train", *tango_settings(last_letter, tmp_path, "run"), *settings)
    assert all(0.3 < row["senior_share"] < 0.7 for row in rows_of(tmp_path / "run", "generator"))
    assert all("senior_share" not in row for row in rows_of(tmp_path / "run", "verifier"))
    assert rows_of(tmp_path / "run", "generator") and rows_of(tmp_path / "run", "verifier")


def test_the_recipe_without_a_junior_stops_before_the_first_update(last_letter, tmp_path):
    done = program(
        "train", "examples/studies/tandem_last_letter/tandem.yaml",
        f"roles.generator.model.path={last_letter}/generator/model",
        f"data.path={last_letter}/task/train.jsonl", "evaluation.sets=[]", "roles.generator.tandem=null",
        f"run.dir={tmp_path}", "run.name=run", check=False,
    )  # fmt: skip
    assert done.returncode and "set roles.generator.tandem" in done.stderr
    assert not rows_of(tmp_path / "run", "generator")
