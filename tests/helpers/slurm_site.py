"""What tests do with runs on the cluster of the `slurm` fixture."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from conftest import ROOT, environment
from limits import RUN_S
from slurm_cluster import Cluster

from megatron_rl.cluster import job_slices
from megatron_rl.run.metrics import read_metrics


def submit(site: tuple[Cluster, Path], *words: str) -> list[str]:
    """-> the jobs' numbers."""
    cluster, profile = site
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", "submit", *words, f"--profile={profile}"],
        cwd=ROOT, env=environment() | cluster.environment(), capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"job (\d+)$", done.stdout, re.MULTILINE)


def said(cluster: Cluster, *words: str) -> str:
    """Returns what a command of the program prints on the cluster."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", *words],
        cwd=ROOT, env=environment() | cluster.environment(), capture_output=True, text=True, timeout=RUN_S, check=True,
    ).stdout  # fmt: skip


def running(cluster: Cluster, job: str) -> str:
    """The element that runs, of a chain."""
    (element,) = [element for element, state in cluster.states(job).items() if state == "RUNNING"]
    return element


def logs(run: Path) -> str:
    return "\n".join(f"==> {path}\n{path.read_text()[-3000:]}" for path in sorted((run / "logs").glob("*.out")))


def metrics(run: Path) -> list[tuple[int, str, dict[str, float]]]:
    """All that a run measured but for times."""
    return [(row.iteration, row.scope, dict(row.metrics)) for row in read_metrics(run)]


def works(run: Path, starts: int) -> None:
    """Waits until the run has started so often and saved an iteration since."""

    def saved() -> bool:
        begun = job_slices.read(run)
        return len(begun) >= starts and job_slices.iterations_done(run) > begun[starts - 1].iterations_before

    wait(f"an iteration of start {starts} of {run}", saved)


def wait(what: str, condition: Callable[[], bool]) -> None:
    """Looks now and then: the runs need the processor."""
    end = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {RUN_S} s"
        time.sleep(0.2)


def rank_process(number: int, run: Path) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_train = words[1:5] == ["-P", "-m", "megatron_rl.main", "train"] and str(run / "jobs/config.yaml") in words
        if is_train and process.environ().get("SLURM_PROCID") == str(number):
            return process
    raise AssertionError(f"no rank {number} of {run}")
