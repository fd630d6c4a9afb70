"""Records the starts and ends of a run's trainer in RUN/slices.jsonl, and decides what the job does next."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import pydantic

from megatron_rl.cluster.slurm_job import STOP, SlurmJob
from megatron_rl.run import json_lines
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunDirectory

FILE = "slices.jsonl"
WRONG_CONFIG = 2  # exit status of `megatron-rl train` for a wrong config
HUNG = 86  # exit status of a rank that ended itself because the run made no progress
# The limit of starts without a new checkpoint is this many times higher when silently ended (preempted) starts count.
SILENT_SHARE = 3
SILENT = "ended without a word: a node or the batch script was killed, or the time limit came before it had saved"


class NextAction(StrEnum):
    """What the batch script does next."""

    GO = "go"  # start the ranks
    DONE = "done"  # the run is finished: cancel the waiting jobs
    # retrying cannot help (the user stopped the run, a wrong config, starts without progress): cancel the waiting jobs
    STOPPED = "stopped"
    # the run saved a checkpoint and left before the time limit: the next element of the job array continues the run
    SLICE = "slice"
    AGAIN = "again"  # an error occurred: start the same element of the job array again


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One start of the trainer in a Slurm job.

    `iterations_before` and `iterations_after` count the training iterations done at the newest complete checkpoint.
    """

    job: str
    restart: int
    nodes: str
    began: float  # seconds since the epoch
    iterations_before: int
    ended: float | None = None
    iterations_after: int | None = None
    status: int | None = None
    cause: str | None = None

    @property
    def refused(self) -> bool:
        """Returns whether the batch script refused this start before any rank began, because earlier starts made no
        progress.
        """
        return self.ended is not None and self.status is None


def read(directory: Path, *, alive: bool = True) -> list[Slice]:
    """Returns the recorded starts of the run in `directory`, oldest first.

    A start whose end was not recorded gets the cause SILENT (ended without a message). The last start may still be
    running, so the last start gets SILENT only if `alive` is False.
    """
    # incomplete lines, and lines that are not a valid Slice, are skipped
    lines = json_lines.read(directory / FILE, pydantic.TypeAdapter(Slice).validate_python).values
    slices = [*{(start.job, start.restart): start for start in lines}.values()]
    ended = [
        s if s.ended is not None else replace(s, iterations_after=following.iterations_before, cause=SILENT)
        for s, following in zip(slices, slices[1:], strict=False)
    ]
    last = slices[-1:]
    if last and not alive and last[0].ended is None:
        return [*ended, replace(last[0], cause=SILENT)]
    return ended + last


def begin(directory: Path, job: SlurmJob, nodes: str, stalled: int) -> tuple[NextAction, str]:
    """Records a start of the trainer, and decides whether the ranks may begin. Returns (next action of the batch
    script, reason).

    `nodes`: names of the job's nodes.
    `stalled`: maximum number of consecutive failed starts without a new checkpoint before the run is stopped. The limit
    is three times higher if starts that ended silently are included. Only starts of the same submission are counted,
    because a user who submits again has presumably fixed the problem.
    """
    if finished(directory):
        return NextAction.DONE, f"{directory} is finished"
    if (directory / STOP).exists():
        why = f"{directory / STOP} is there: somebody stopped this run; `megatron-rl submit` removes it"
        return NextAction.STOPPED, why
    iterations = iterations_done(directory)
    new = Slice(job=job.id, restart=job.restart, nodes=nodes, began=time.time(), iterations_before=iterations)
    earlier = [
        s
        for s in read(directory)
        if _submission(s.job) == _submission(job.id) and not s.refused and s.iterations_before == iterations
    ]
    faults = sum((s.cause or SILENT) != SILENT for s in earlier)
    if faults >= stalled or len(earlier) >= SILENT_SHARE * stalled:
        causes = "; ".join(dict.fromkeys(s.cause or SILENT for s in earlier))
        why = f"{len(earlier)} starts made no progress beyond {iterations} iterations (job.stalled): {causes}"
        _append(directory, replace(new, ended=new.began, iterations_after=iterations, cause=why))
        return NextAction.STOPPED, why
    _append(directory, new)
    return NextAction.GO, f"{iterations} iterations are done"


def end(directory: Path, job: SlurmJob, status: int) -> tuple[NextAction, str]:
    """Records that the trainer, which the batch script started with srun, has ended. Returns (next action of the batch
    script, cause of the end).

    `status`: exit status of srun. The status 0 means that the run is finished, or that the trainer saved a checkpoint
    and exited early, because of the job's time limit or because a user requested it.
    """
    iterations = iterations_done(directory)
    starts = [s for s in read(directory) if (s.job, s.restart) == (job.id, job.restart)]
    causes = {
        0: "all iterations are done" if finished(directory) else f"left in time, saved after {iterations} iterations",
        WRONG_CONFIG: "the config or the command line is wrong: see the log",
        HUNG: "nothing moved for run.hang_after_s: see logs/stacks_*",
    }
    killed = f"killed by signal {status - 128}" if status > 128 else f"failed with status {status}: see the log"
    cause = causes.get(status, killed)
    if starts:
        _append(
            directory, replace(starts[-1], ended=time.time(), iterations_after=iterations, status=status, cause=cause)
        )
    if finished(directory):
        return NextAction.DONE, cause
    if status == WRONG_CONFIG or (directory / STOP).exists():
        return NextAction.STOPPED, cause
    return (NextAction.AGAIN if status else NextAction.SLICE), cause


def over(directory: Path) -> bool:
    """Returns whether the run is over: it is finished, or its directory contains a stop file."""
    return finished(directory) or (directory / STOP).exists()


def finished(directory: Path) -> bool:
    """Returns whether the run has completed all its iterations."""
    return bool(RunDirectory(directory).read_summary().get("finished"))


def iterations_done(directory: Path) -> int:
    """Returns the number of training iterations done at the newest complete checkpoint, or 0 if there is no complete
    checkpoint.
    """
    newest = Checkpoints(RunDirectory(directory).checkpoints).newest()
    return newest.number if newest else 0


def _submission(job: str) -> str:
    """Returns the id of the submission that a job belongs to, for example 17 for element 17_3 of an array."""
    return job.partition("_")[0]


def _append(directory: Path, start: Slice) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    json_lines.append(directory / FILE, json.dumps(asdict(start)).encode())
