"""Tests on a real Slurm cluster that a job depends on profile and config alone, whatever shell submits it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment
from limits import RUN_S

from megatron_rl.jobs import slurm_commands

# Stands for the profile's interpreter: a rank writes its environment, and the run is stopped then. Nothing else is
# imported, so that a start takes no time.
PYTHON = """#!/bin/bash
case "$*" in
    *"slice where"*) echo {run} ;;
    *"slice begin"*) env >{seen}/batch; echo "go: 0 iterations are done" ;;
    *"slice end"*) echo "stopped: it was a test" ;;
    *" sft "*) env >{seen}/$SLURM_PROCID; ulimit -n >{seen}/files ;;
esac
"""
# What an interactive job, mpirun, torchrun and a user's settings leave in a shell.
HOSTILE = {
    "SBATCH_PARTITION": "urgent", "SBATCH_ARRAY_INX": "0-40", "SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "7",
    "SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "truncate", "SBATCH_SIGNAL": "INT@5", "SBATCH_JOB_NAME": "other",
    "SBATCH_CONSTRAINT": "none", "SBATCH_DISTRIBUTION": "cyclic", "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXPORT_ENV": "NONE", "SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "3", "SLURM_CPU_BIND": "none",
    "SLURM_MEM_PER_CPU": "7", "SLURM_HINT": "nomultithread", "SLURM_THREADS_PER_CORE": "1",
    "SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_ID": "4", "SLURM_WAIT": "1", "SLURM_NO_KILL": "1",
    "SRUN_CPUS_PER_TASK": "9", "SRUN_EXPORT_ENV": "NONE", "SQUEUE_STATES": "COMPLETED", "PMI_RANK": "3",
    "PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_RANK": "3", "CUDA_VISIBLE_DEVICES": "5", "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x",
    "NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "77", "PYTHONPATH": "/elsewhere", "PYTHONOPTIMIZE": "2",
    "BASH_ENV": "/elsewhere", "WARNING_S": "3", "MAX_FAULTS": "0", "MEGATRON_RL_JOB_END": "5",
    "TMPDIR": "/job/of/another",
}  # fmt: skip


@pytest.mark.multi
def test_faults_of_the_submitting_shell_do_not_reach_the_job(slurm, tmp_path):
    """It is submitted from a step with --distribution=cyclic. Ranks stood on the nodes in turns, and #SBATCH lines
    lost to the shell's variables."""
    run, seen, python = tmp_path / "run", tmp_path / "seen", tmp_path / "python"
    seen.mkdir()
    python.write_text(PYTHON.format(run=run, seen=seen))
    python.chmod(0o755)
    profile = tmp_path / "site.yaml"
    profile.write_text(
        f"time: '00:30:00'\nwarning_s: 120\nranks_per_node: 2\ngpus_per_node: 0\ncpus_per_rank: 2\n"
        f"environment: {{OMP_NUM_THREADS: '1'}}\npython: {python}\n"
    )
    words = [
        sys.executable, "-m", "megatron_rl.main", "submit", "examples/miniatures/last_letter/sft.yaml", "job.nodes=2",
        f"run.dir={tmp_path}", "run.name=run", f"--profile={profile}",
    ]  # fmt: skip
    exports = "; ".join(f"export {name}={value}" for name, value in HOSTILE.items() if name != "PYTHONPATH")
    own = environment() | slurm.environment()
    own["PYTHONPATH"] += ":/elsewhere"
    done = subprocess.run(
        ["srun", "--nodes=1", "--ntasks=1", "--distribution=cyclic", "bash", "-c",
         f"ulimit -n 99; {exports}; exec {shlex.join(words)}"],
        cwd=ROOT, env=own, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    job = re.findall(r"job (\d+)$", done.stdout, re.MULTILINE)[0]
    slurm.wait(job)
    log = next((run / "logs").glob("train-*.out")).read_text()
    ranks = {rank: variables(seen / rank) for rank in "0123"}
    assert [ranks[rank]["SLURMD_NODENAME"] for rank in "0123"] == sorted(
        ranks[rank]["SLURMD_NODENAME"] for rank in "0123"
    ), log
    assert [ranks[rank]["SLURM_LOCALID"] for rank in "0123"] == ["0", "1", "0", "1"]
    for found in (*ranks.values(), variables(seen / "batch")):
        kept = {name: found[name] for name, value in HOSTILE.items() if found.get(name) == value}
        assert not kept, kept
        assert found["OMP_NUM_THREADS"] == "1" and found["PYTHONPATH"] == str(ROOT)
        assert found["SLURM_CPUS_PER_TASK"] == "2" == found["SRUN_CPUS_PER_TASK"]
        assert found["HOME"] == own["HOME"]
    assert int((seen / "files").read_text()) > 99
    show = slurm.run("scontrol", "--oneliner", "show", "job", job)
    for field in ("Partition=batch", "TimeLimit=00:30:00", "Requeue=1", "JobName=run-train", "NumNodes=2"):
        assert field in show, show
    assert "NCCL_ALGO" in done.stdout and "--nodes=2" in done.stdout, "it says what was submitted, and what was not"


def variables(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def test_cases_of_variables_that_jobs_get_and_that_they_do_not(monkeypatch, fake_slurm, tmp_path):
    answers, _ = fake_slurm
    kept = "PATH HOME HF_TOKEN HF_HOME WANDB_API_KEY CUDA_HOME TRITON_CACHE_DIR SLURM_CONF MODULEPATH https_proxy LANG"
    gone = "SLURM_NTASKS SBATCH_QOS SQUEUE_STATES PMIX_RANK HIP_VISIBLE_DEVICES LOCAL_RANK NCCL_P2P_DISABLE TMPDIR"
    gone += " PYTHONHOME LD_PRELOAD _SLURM_SPANK_OPTION_x_y APPTAINER_BIND MEGATRON_RL_WARNING_S VLLM_USE_V1"
    for name in f"{kept} {gone}".split():
        monkeypatch.setenv(name, os.environ["PATH"] if name == "PATH" else "x")
    answers(squeue=f'for name in {kept} {gone}; do [ -z "${{!name:-}}" ] || echo "$name"; done >>{tmp_path}/got')
    slurm_commands.queue(["17"])
    assert (tmp_path / "got").read_text().split() == kept.split()
