"""Tests a run with real vLLM servers on a real Slurm cluster; the node of one engine crashes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import ROOT, tango_settings
from limits import RUN_S
from slurm_site import logs, said, submit

from megatron_rl.cluster import job_slices
from megatron_rl.engines.server_registry import ServerRegistry
from megatron_rl.run.metrics import read_metrics
from megatron_rl.session.server_connection import ENGINES
from megatron_rl.training.store import ROLLOUTS, iteration_files, read_rows

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
pytestmark = [
    pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
PROMPTS, SAMPLES, ITERATIONS = 8, 5, 9


@pytest.mark.matrix
def test_a_crashed_engine_node_costs_no_prompt_and_does_not_stop_the_trainer(site, last_letter, tmp_path):
    """The generator's engine comes back on another node, and the run ends by itself.

    The run has two ranks on two nodes and an engine for each role.
    """
    cluster, _ = site
    run = tmp_path / "served"
    trainer, engines = submit(
        site, *tango_settings(last_letter, tmp_path, "served"), "engine.kind=vllm", f"engine.python={PYTHON}",
        "engine.lost_after_s=5", "recipe.args.generator_updates=6", "evaluation.every=0", "job.nodes=2",
    )  # fmt: skip

    def iterations() -> int:
        return sum(row.scope in ("generator", "verifier") for row in read_metrics(run))

    def until(what: str, condition) -> None:
        end = time.monotonic() + RUN_S
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {RUN_S} s\n{logs(run)}"
            time.sleep(0.3)

    until("three iterations", lambda: iterations() >= 3)
    (listing,) = ServerRegistry(run / ENGINES).read("generator")
    assert listing.job == f"{engines}_0" and listing.node in cluster.names
    trained_on = cluster.field(trainer + "_0", "NodeList")
    cluster.crash_node(cluster.field(f"{engines}_0", "BatchHost"))
    cluster.run("scontrol", "update", f"nodename={listing.node}", "state=down", "reason=crash")
    assert iterations() < ITERATIONS, "the crash came too late to matter"
    until("the run's end", lambda: job_slices.finished(run))
    cluster.wait(trainer)
    cluster.wait(engines)

    assert iterations() == ITERATIONS
    assert len(iteration_files(run / ROLLOUTS)) == ITERATIONS
    assert {len(read_rows(path)) for path in iteration_files(run / ROLLOUTS)} == {PROMPTS * SAMPLES}, (
        "every prompt has all its answers"
    )
    (only,) = job_slices.read(run)
    assert only.cause == "all iterations are done" and only.nodes == trained_on, "the trainer was never started again"
    assert int(cluster.field(f"{engines}_0", "Restarts")) >= 1
    assert not ServerRegistry(run / ENGINES).all(), "the engines left with the run"
    assert "finished" in said(cluster, "status", str(run))
