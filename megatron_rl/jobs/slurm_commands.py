"""Wrappers of the Slurm commands sbatch, squeue, sacct and scancel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.schema import ConfigError

ANSWER_S = 60.0  # timeout of a command in seconds
# Matches the names of environment variables that are not passed to Slurm's commands and to jobs.
# Does not match variables that hold paths (e.g. CUDA_HOME) or select a Slurm cluster, because these are passed.
_LEFT_OUT = re.compile(
    # jobs do not get variables of another job or launcher, and options of Slurm (they would override #SBATCH lines)
    r"(?!SLURM_(CONF(_SERVER)?|CLUSTERS|JWT)$)_?(SLURM|SPANK|SBATCH_|SRUN_|SALLOC_|SQUEUE_|SINFO_|SCANCEL_|SACCT_"
    r"|SCONTROL_|PYXIS_|APPTAINER|SINGULARITY|PMI|PRTE_|PALS_|OMPI_|OPAL_|I_MPI_|MPI|HYD|MV2_|TORCHELASTIC_|MASTER_"
    r"|MEGATRON_RL_).*"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|NODE_RANK|\w+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
    # jobs do not get settings of libraries, Python and bash, which may change results or how a script is interpreted
    r"|(NCCL|GLOO|UCX|UCC|FI|CUDA|CUBLAS|CUDNN|NVIDIA|NVTE|TORCH\w*|PYTORCH|TRITON|VLLM|SGLANG|SGL|OMP|GOMP|KMP|MKL"
    r"|OPENBLAS)_(?!\w*(HOME|ROOT|PATH|DIR|CACHE|VERSION)$).*"
    r"|PYTHON.*|LD_PRELOAD|BASH_ENV|ENV|SHELLOPTS|BASHOPTS|CDPATH"
    # jobs do not get the submitting host's temporary directories, and settings of slurm/job.sh
    r"|TMPDIR|TMP|TEMP|XDG_RUNTIME_DIR|WARNING_S|MAX_FAULTS|RETRY_S"
)
# squeue's format: id, name, state, nodes, time left, reason, start
_FIELDS = ("%i", "%j", "%T", "%N", "%L", "%r", "%S")


class SlurmError(RuntimeError):
    """Raised when a Slurm command fails or times out. The message contains the error output of the command."""


@dataclass(frozen=True)
class Queued:
    """One line of squeue's output: a pending or running job. All fields are the text that squeue prints."""

    id: str  # job id: 17, 17_3 for an element of an array, or 17_[4-7] for pending elements
    name: str
    state: str
    nodes: str
    time_left: str
    reason: str
    start: str


def present() -> bool:
    """Returns whether Slurm's commands are installed on this host."""
    return shutil.which("sbatch") is not None


def require() -> None:
    """Raises ConfigError if Slurm's commands are not installed on this host."""
    if not present():
        raise ConfigError(
            "there is no sbatch here: run this on a login node of the cluster, or print the scripts with --dry-run"
        )


def left_out(environment: Mapping[str, str]) -> list[str]:
    """Returns the sorted names of the variables in `environment` that are not passed to jobs.

    These are variables of another job or launcher, options of Slurm's commands, settings of libraries, and paths that
    are specific to this host. Without them, a job depends only on the profile and the config, and not on the shell that
    submits the job.
    """
    return sorted(name for name in environment if _LEFT_OUT.fullmatch(name))


def submit(script: Path, *, dependency: str | None = None) -> str:
    """Submits a batch script and returns the id of the job. Raises SlurmError when sbatch fails.

    `dependency`: value of sbatch's --dependency, such as "after:17_0" or "afterok:17". Slurm cancels a job whose
    dependency can never be satisfied.
    """
    options = [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"] if dependency else []
    return run(["sbatch", "--parsable", *options, str(script)]).strip().partition(";")[0]


def queue(jobs: Sequence[str]) -> list[Queued]:
    """Returns the pending and running jobs among `jobs` (job ids). Raises SlurmError when squeue fails.

    Returns an empty list on a host without Slurm.
    """
    if not jobs or not present():
        return []
    text = _run_if_known(["squeue", "--noheader", f"--jobs={','.join(jobs)}", f"--format={'|'.join(_FIELDS)}"])
    return [Queued(*line.split("|")) for line in text.splitlines() if line.count("|") == len(_FIELDS) - 1]


def states(jobs: Sequence[str]) -> dict[str, str]:
    """Returns the states of jobs, including ended jobs: {job: state}, or {job_index: state} for elements of an array.

    Slurm forgets an ended job after MinJobAge, usually 300 s; forgotten jobs are left out. Raises SlurmError when
    squeue fails.
    """
    state_of = dict[str, str]()
    for job in jobs:
        text = _run_if_known(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T"])
        state_of |= dict(line.split() for line in text.splitlines())
    return state_of


def accounted(jobs: Sequence[str]) -> dict[tuple[str, int], str]:
    """Returns the final state of each start of the jobs, from Slurm's accounting database (sacct).

    The keys are (job id such as "17", or "17_3" for an element of an array; index of the start, counted from 0). The
    result is empty if the cluster has no accounting.
    """
    if not jobs or shutil.which("sacct") is None:
        return {}
    command = ["sacct", "--noheader", "--allocations", "--duplicates", "--parsable2", "--format=JobID,State"]
    try:
        lines = run([*command, f"--jobs={','.join(jobs)}"]).splitlines()
    except SlurmError:
        return {}
    state_of, starts = dict[tuple[str, int], str](), dict[str, int]()
    for job, _, state in (line.partition("|") for line in lines):
        state_of[job, starts.setdefault(job, 0)] = state
        starts[job] += 1
    return state_of


def cancel(jobs: Sequence[str], *, pending: bool = False) -> None:
    """Cancels the pending and running jobs among `jobs` or, if `pending` is True, only the pending jobs.

    Jobs that Slurm has forgotten, or that have started in the meantime, are ignored. Raises SlurmError when a command
    fails for another reason.
    """
    for job in sorted({job.id.partition("_")[0] for job in queue(jobs) if job.state == "PENDING" or not pending}):
        _run_if_known(["scancel", *(["--state=PENDING"] if pending else []), job])


def run(words: Sequence[str]) -> str:
    """Runs a command and returns its output. The command does not get the environment variables that `left_out`
    returns.

    Raises SlurmError when the command fails or does not end within ANSWER_S seconds.
    """
    environment = {name: value for name, value in os.environ.items() if not _LEFT_OUT.fullmatch(name)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, env=environment)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer within {ANSWER_S:.0f} s: is slurmctld there?") from None
    if done.returncode:
        raise SlurmError(f"{' '.join(words)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def _run_if_known(words: Sequence[str]) -> str:
    """Runs a command like `run`, but returns "" if Slurm has forgotten the command's jobs because they ended long
    ago.
    """
    try:
        return run(words)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return ""
        raise
