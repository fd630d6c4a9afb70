"""Calls Slurm's own commands: sbatch, squeue, sacct and scancel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.schema import ConfigError

ANSWER_S = 60.0  # a command that has not answered by then has failed
# Variables of the calling shell that neither Slurm's commands nor the jobs get. Places (CUDA_HOME, TRITON_CACHE_DIR)
# stay, and so does what says which Slurm is meant.
_LEFT_OUT = re.compile(
    # another job's or another launcher's; options of Slurm's commands, which would override #SBATCH lines
    r"(?!SLURM_(CONF(_SERVER)?|CLUSTERS|JWT)$)_?(SLURM|SPANK|SBATCH_|SRUN_|SALLOC_|SQUEUE_|SINFO_|SCANCEL_|SACCT_"
    r"|SCONTROL_|PYXIS_|APPTAINER|SINGULARITY|PMI|PRTE_|PALS_|OMPI_|OPAL_|I_MPI_|MPI|HYD|MV2_|TORCHELASTIC_|MASTER_"
    r"|MEGATRON_RL_).*"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|NODE_RANK|\w+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
    # settings of libraries, of Python and of bash, which change what a run computes or how its script is read
    r"|(NCCL|GLOO|UCX|UCC|FI|CUDA|CUBLAS|CUDNN|NVIDIA|NVTE|TORCH\w*|PYTORCH|TRITON|VLLM|SGLANG|SGL|OMP|GOMP|KMP|MKL"
    r"|OPENBLAS)_(?!\w*(HOME|ROOT|PATH|DIR|CACHE|VERSION)$).*"
    r"|PYTHON.*|LD_PRELOAD|BASH_ENV|ENV|SHELLOPTS|BASHOPTS|CDPATH"
    # directories of the calling host, and settings of slurm/job.sh
    r"|TMPDIR|TMP|TEMP|XDG_RUNTIME_DIR|WARNING_S|MAX_FAULTS|RETRY_S"
)
_FIELDS = ("%i", "%j", "%T", "%N", "%L", "%r", "%S")  # squeue's: id, name, state, nodes, time left, reason, start


class SlurmError(RuntimeError):
    """Raised when a command of Slurm's fails; the message is its own."""


@dataclass(frozen=True)
class Queued:
    """One line of squeue: a job that waits or runs."""

    id: str  # 17_3 for an element of an array; 17_[4-7] for elements that have not begun
    name: str
    state: str
    nodes: str
    left: str
    reason: str
    start: str


def present() -> bool:
    """Returns whether this host has Slurm's commands."""
    return shutil.which("sbatch") is not None


def require() -> None:
    """Raises ConfigError where there is no Slurm."""
    if not present():
        raise ConfigError(
            "there is no sbatch here: run this on a login node of the cluster, or print the scripts with --dry-run"
        )


def left_out(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of those variables of a shell that jobs do not get, so that a job depends on the profile and
    the config and not on the shell that submits it: variables of another job or launcher, options of Slurm's commands,
    settings of libraries, and places on this host alone."""
    return sorted(name for name in environment if _LEFT_OUT.fullmatch(name))


def submit(script: Path, *, dependency: str | None = None) -> str:
    """Submits a batch script and returns the job's id. Raises SlurmError.

    `dependency`: sbatch's, such as after:17_0 or afterok:17. A job whose dependency cannot come true is cancelled.
    """
    words = [
        "sbatch",
        "--parsable",
        *([f"--dependency={dependency}", "--kill-on-invalid-dep=yes"] if dependency else []),
        str(script),
    ]
    return run(words).strip().partition(";")[0]


def queue(jobs: Sequence[str]) -> list[Queued]:
    """Returns those of the jobs that wait or run. Raises SlurmError."""
    if not jobs or not present():
        return []
    try:
        text = run(["squeue", "--noheader", f"--jobs={','.join(jobs)}", f"--format={'|'.join(_FIELDS)}"])
    except SlurmError as error:
        if "Invalid job id" in str(error):  # all of them ended long ago
            return []
        raise
    return [Queued(*line.split("|")) for line in text.splitlines() if line.count("|") == len(_FIELDS) - 1]


def states(jobs: Sequence[str]) -> dict[str, str]:
    """Returns {job: state}, or {job_index: state} for an array, of jobs that ended too. Raises SlurmError.

    Slurm forgets a job after its MinJobAge, usually 300 s.
    """
    found = dict[str, str]()
    for job in jobs:
        try:
            text = run(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T"])
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
            continue
        found |= dict(line.split() for line in text.splitlines())
    return found


def accounted(jobs: Sequence[str]) -> dict[tuple[str, int], str]:
    """Returns how Slurm's accounting says that each start ended: {(job or job_index, number of the start): state}.

    It is empty where there is no accounting.
    """
    if not jobs or shutil.which("sacct") is None:
        return {}
    words = [
        "sacct",
        "--noheader",
        "--allocations",
        "--duplicates",
        "--parsable2",
        "--format=JobID,State",
        f"--jobs={','.join(jobs)}",
    ]
    try:
        lines = run(words).splitlines()
    except SlurmError:
        return {}
    found, starts = dict[tuple[str, int], str](), dict[str, int]()
    for job, _, state in (line.partition("|") for line in lines):
        found[job, starts.setdefault(job, 0)] = state
        starts[job] += 1
    return found


def cancel(jobs: Sequence[str], *, pending: bool = False) -> None:
    """Cancels those of the jobs that wait or run; with `pending` those that wait. Raises SlurmError.

    A job that Slurm has forgotten, or that began meanwhile, is no error.
    """
    for job in sorted({one.id.partition("_")[0] for one in queue(jobs) if one.state == "PENDING" or not pending}):
        try:
            run(["scancel", *(["--state=PENDING"] if pending else []), job])
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise


def run(words: Sequence[str]) -> str:
    """Runs a command without the variables in `left_out`, and returns its output. Raises SlurmError when it fails or
    does not answer."""
    own = {name: value for name, value in os.environ.items() if not _LEFT_OUT.fullmatch(name)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, env=own)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer within {ANSWER_S:.0f} s: is slurmctld there?") from None
    if done.returncode:
        raise SlurmError(f"{' '.join(words)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
