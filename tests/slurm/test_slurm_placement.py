"""Tests a run on a real Slurm cluster whose roles have ranks, and nodes, of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import program, tango_settings
from slurm_site import logs, metrics, rank_process, running, submit, wait, works

from megatron_rl.cluster import job_slices

pytestmark = [pytest.mark.multi, pytest.mark.slow]
APART = [
    "roles.generator.ranks=0-0", "roles.verifier.ranks=1-1", "rollouts.max_staleness=1", "run.save_every=2",
    "recipe.args.generator_updates=14", "evaluation.every=0",
]  # fmt: skip


def test_placement_on_two_nodes_has_the_same_weights_after_a_killed_rank_and_a_requeue(site, last_letter, tmp_path):
    """The generator has one node and the verifier the other. Rollouts are written one iteration ahead."""
    cluster, _ = site
    run = tmp_path / "apart"
    (job,) = submit(site, *tango_settings(last_letter, tmp_path, "apart"), *APART, "job.nodes=2", "job.slices=2")
    works(run, 1)
    rank_process(1, run).kill()
    works(run, 2)
    cluster.run("scontrol", "requeue", running(cluster, job))
    wait("the run's end", lambda: job_slices.finished(run))
    cluster.wait(job)
    starts = job_slices.read(run)
    causes = [start.cause or "" for start in starts]
    assert len(causes) == 3 and causes[1:] == [job_slices.SILENT, "all iterations are done"], (causes, logs(run))
    assert 0 < starts[1].iterations_before < starts[2].iterations_before, "both resumed from a checkpoint"

    program("train", *tango_settings(last_letter, tmp_path, "quiet"), *APART)
    assert metrics(run) == metrics(tmp_path / "quiet")
    weights = exported(run)
    assert {*weights} == {"generator", "verifier"} and weights == exported(tmp_path / "quiet")


def exported(run: Path) -> dict[str, bytes]:
    """Returns {role: the file of the weights that a run exported}."""
    return {file.parent.name: file.read_bytes() for file in run.glob("models/*/model.safetensors")}
