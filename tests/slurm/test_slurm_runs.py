"""Tests runs on a real Slurm cluster: a chain of slices with faults and time limits, a sweep and an evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment, program, tango_settings
from limits import RUN_S
from slurm_site import logs, metrics, rank_process, running, said, submit, wait, works

from megatron_rl.cluster import job_slices
from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def test_a_chain_outlives_every_fault_and_measures_what_an_undisturbed_run_does(site, last_letter, tmp_path):
    """Three slices of two ranks on two nodes meet a killed rank, a requeued job, a crashed node and two warnings."""
    cluster, _ = site
    run = tmp_path / "chain"
    (job,) = submit(
        site,
        *tango_settings(last_letter, tmp_path, "chain"),
        "recipe.args.generator_updates=23",
        "job.nodes=2",
        "job.slices=3",
    )
    works(run, 1)
    assert "running" in said(cluster, "status", str(run))
    rank_process(1, run).kill()
    works(run, 2)
    cluster.run("scontrol", "requeue", running(cluster, job))
    works(run, 3)
    node = cluster.field(running(cluster, job), "BatchHost")
    cluster.crash_node(node)
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")
    works(run, 4)
    cluster.run("scancel", "--batch", "--signal=USR1", running(cluster, job))  # as --signal does before the time limit
    works(run, 5)
    cluster.run("scancel", "--batch", "--signal=USR1", running(cluster, job))
    wait("the run's end", lambda: job_slices.finished(run))
    cluster.wait(job)

    causes = [one.cause or "" for one in job_slices.read(run)]
    assert len(causes) == 6, logs(run)
    assert "status" in causes[0] or "signal" in causes[0]
    assert causes[1] == causes[2] == job_slices.SILENT
    assert "left in time" in causes[3] and "left in time" in causes[4]
    assert causes[5] == "all iterations are done"
    shown = said(cluster, "status", str(run))
    assert "finished" in shown and "left in time" in shown and "31 of 31 iterations" in shown

    program("train", *tango_settings(last_letter, tmp_path, "quiet"), "recipe.args.generator_updates=23")
    assert metrics(run) == metrics(tmp_path / "quiet")


@pytest.mark.parametrize(
    ("wrong", "slices"),
    [
        ("recipe.target=tests.helpers.only_at_home:Tango", [(2, "the config or the command line is wrong")]),
        ("data.path=none.jsonl", [(1, ""), (1, ""), (1, ""), (None, "3 starts made no progress")]),
    ],
    ids=["wrong", "missing"],
)
def test_a_chain_without_progress_stops_and_says_why(site, last_letter, tmp_path, wrong, slices):
    """A config that is wrong on the nodes alone is not tried again; a run whose data is not there ends at the fourth
    start. The host that submits sees neither."""
    cluster, _ = site
    (job,) = submit(site, *tango_settings(last_letter, tmp_path, "stuck"), wrong, "job.slices=8")
    states = cluster.wait(job)
    assert sorted(states.values()).count("FAILED") == 1 and set(states.values()) == {"CANCELLED", "FAILED"}, states
    found = job_slices.read(tmp_path / "stuck")
    assert [one.status for one in found] == [status for status, _ in slices]
    assert all(said in (one.cause or "") for one, (_, said) in zip(found, slices, strict=True))


@pytest.mark.matrix
def test_a_stopped_run_saves_leaves_and_goes_on_when_submitted_again(site, last_letter, tmp_path):
    cluster, _ = site
    settings = [*tango_settings(last_letter, tmp_path, "stopped"), "recipe.args.generator_updates=13"]
    run = tmp_path / "stopped"
    (job,) = submit(site, *settings, "job.slices=4")
    works(run, 1)
    assert "leaves after the iteration" in said(cluster, "stop", str(run))
    cluster.wait(job)
    assert len(job_slices.read(run)) == 1 and not job_slices.finished(run)
    (again,) = submit(site, *settings, "job.slices=4")
    cluster.wait(again)
    assert job_slices.finished(run), logs(run)
    assert job_slices.read(run)[1].iterations_before >= 1


@pytest.mark.matrix  # make test-more ONLY=slurm-runs
def test_a_sweep_of_four_gives_four_runs_and_one_report(site, last_letter, tmp_path):
    cluster, _ = site
    grid = tmp_path / "grid.yaml"
    grid.write_text("optimizer.lr: [1e-3, 3e-3]\nrun.seed: [0, 1]\n")
    (job,) = submit(
        site, "examples/miniatures/last_letter/sft.yaml", f"model.path={last_letter}/task/model",
        f"data.train={last_letter}/task/generator_sft.jsonl", "data.shuffle=true", "steps=4",
        "optimizer.decay_steps=4", "optimizer.warmup_steps=1", "run.name=grid", f"run.dir={tmp_path}",
        "--sweep", str(grid),
    )  # fmt: skip
    states = cluster.wait(job)
    assert set(states.values()) == {"COMPLETED"}, logs(tmp_path / "grid")
    points = json.loads((tmp_path / "grid/sweep.json").read_text())
    assert [point["changes"] for point in points] == [
        {"optimizer.lr": r, "run.seed": s} for r in (1e-3, 3e-3) for s in (0, 1)
    ]
    losses = [read_metrics(tmp_path / "grid" / point["run"])[-1].metrics["loss"] for point in points]
    assert len(set(losses)) == 4
    assert "finished" in said(cluster, "status", str(tmp_path / "grid"))
    page = Path(said(cluster, "report", str(tmp_path / "grid")).strip()).read_text()
    assert (
        "4 of 4 runs are finished" in page
        and "Means over seeds" in page
        and all(f"{loss:.4g}" in page for loss in losses)
    )


def test_an_evaluation_array_does_what_is_not_done(site, last_letter, tmp_path):
    cluster, _ = site
    for name in ("words", "letters"):
        (tmp_path / f"{name}.yaml").write_text(
            f"model: {{path: x}}\nsets: [{{path: {last_letter}/task/test.jsonl, settings: last_letter, limit: 8}}]\n"
            f"template: {ROOT}/examples/miniatures/last_letter/prompts/generator.txt\n"
            "reward: {target: 'megatron_rl.contrib.last_letter:grade'}\nsampling: {max_tokens: 40, temperature: 0.0}\n"
        )
    words = [str(tmp_path / "words.yaml"), str(tmp_path / "letters.yaml"), f"--out={tmp_path}/eval"]
    models = ["--checkpoints", f"{last_letter}/generator/model", f"{last_letter}/task/model"]
    done = tmp_path / "eval" / f"{last_letter.name}_generator.words.json"
    done.parent.mkdir()
    done.write_text("{}")
    (job,) = submit(site, *words, *models)
    states = cluster.wait(job)
    assert set(states.values()) == {"COMPLETED"}, logs(tmp_path / "eval")
    results = sorted((tmp_path / "eval").glob("*.json"))
    assert len(results) == 4 and done.read_text() == "{}"
    assert all("accuracy" in json.loads(path.read_text())["metrics"] for path in results if path != done)


def test_ranks_in_which_nothing_moves_write_their_stacks_and_end(last_letter, tmp_path):
    """The watchdog ends a run whose reward never answers and has no time limit."""
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\ndef grade(response, payload):\n    time.sleep(3600)\n    return 0.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", "train", *tango_settings(last_letter, tmp_path, "hung"),
         "reward.target=slow_reward:grade", "reward.timeout_s=3600", "run.hang_after_s=30", "preflight.enabled=false"],
        cwd=ROOT, env=environment() | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True, text=True,
        timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == job_slices.HUNG, done.stdout + done.stderr
    assert "run.hang_after_s" in done.stderr
    stacks = sorted((tmp_path / "hung/logs").glob("stacks_*"))
    assert len(stacks) == 2 and "grade" in stacks[0].read_text()
