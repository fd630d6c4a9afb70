"""Records the starts and ends of a run's trainer in RUN/slices.jsonl, and decides from them what its job does next."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_rl.cluster.slurm_job import STOP, SlurmJob
from megatron_rl.run import json_lines
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunDirectory

FILE = "slices.jsonl"
WRONG_CONFIG = 2  # exit status of `megatron-rl train` for a wrong config
HUNG = 86  # exit status of a rank that ended itself because nothing moved
# Starts that ended without a word (a crashed node, a preemption) are borne this many times as long as others.
SILENT_SHARE = 3
SILENT = "ended without a word: a node or the batch script was killed, or the time limit came before it had saved"


class NextAction(StrEnum):
    """An order to the batch script: what it does now."""

    GO = "go"  # start the ranks
    DONE = "done"  # the target is reached: cancel what waits
    STOPPED = "stopped"  # somebody asked for it, or trying again cannot help: cancel what waits
    SLICE = "slice"  # the run left in time: the next element of the array goes on
    AGAIN = "again"  # there was a fault: the same element starts once more


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One start of the trainer. Its `iterations` are counted in complete checkpoints."""

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
        """Returns whether this start was refused, without any rank, because starts before it had made no progress."""
        return self.ended is not None and self.status is None


def read(directory: Path, *, alive: bool = True) -> list[Slice]:
    """Returns the starts in order.

    A start that ended without a word gets SILENT as its cause. The last one may still run, and gets it only where the
    run is not `alive`.
    """
    found = {
        (one.job, one.restart): one for one in json_lines.read(directory / FILE, _decoded).values
    }  # half a line is no start
    slices = [*found.values()]
    out = [s if s.ended is not None else _silent(s, after) for s, after in zip(slices, slices[1:], strict=False)]
    last = slices[-1:]
    if last and not alive and last[0].ended is None:
        return [*out, replace(last[0], cause=SILENT)]
    return out + last


def begin(directory: Path, job: SlurmJob, nodes: str, stalled: int) -> tuple[NextAction, str]:
    """Records a start. Returns what the batch script does now, and why.

    `stalled`: the chain stops after this many starts of one submission in a row without a new checkpoint, or after
    three times as many that ended without a word. Whoever submits again has mended something: it is counted anew.
    """
    if finished(directory):
        return NextAction.DONE, f"{directory} is finished"
    if (directory / STOP).exists():
        return (
            NextAction.STOPPED,
            f"{directory / STOP} is there: somebody stopped this run; `megatron-rl submit` removes it",
        )
    iterations = iterations_done(directory)
    new = Slice(job=job.id, restart=job.restart, nodes=nodes, began=time.time(), iterations_before=iterations)
    before = [
        s
        for s in read(directory)
        if _submission(s.job) == _submission(job.id) and not s.refused and s.iterations_before == iterations
    ]
    faults = sum((s.cause or SILENT) != SILENT for s in before)
    if faults >= stalled or len(before) >= SILENT_SHARE * stalled:
        causes = "; ".join(dict.fromkeys(s.cause or SILENT for s in before))
        why = f"{len(before)} starts made no progress beyond {iterations} iterations (job.stalled): {causes}"
        _append(directory, replace(new, ended=new.began, iterations_after=iterations, cause=why))
        return NextAction.STOPPED, why
    _append(directory, new)
    return NextAction.GO, f"{iterations} iterations are done"


def end(directory: Path, job: SlurmJob, status: int) -> tuple[NextAction, str]:
    """Records an end. Returns what the batch script does now, and why.

    `status` is srun's; ranks that were asked to leave, and saved, end with 0 too.
    """
    iterations, own = (
        iterations_done(directory),
        [s for s in read(directory) if (s.job, s.restart) == (job.id, job.restart)],
    )
    cause = _cause(status, iterations, finished(directory))
    if own:
        _append(directory, replace(own[-1], ended=time.time(), iterations_after=iterations, status=status, cause=cause))
    if finished(directory):
        return NextAction.DONE, cause
    if status == WRONG_CONFIG or (directory / STOP).exists():
        return NextAction.STOPPED, cause
    return (NextAction.AGAIN if status else NextAction.SLICE), cause


def over(directory: Path) -> bool:
    """Returns whether nothing of this run is to go on: it is finished, or somebody stopped it."""
    return finished(directory) or (directory / STOP).exists()


def finished(directory: Path) -> bool:
    """Returns whether the run has done all its iterations."""
    return bool(RunDirectory(directory).read_summary().get("finished"))


def iterations_done(directory: Path) -> int:
    """Returns the number of iterations in the newest complete checkpoint."""
    newest = Checkpoints(RunDirectory(directory).checkpoints).newest()
    return newest.number if newest else 0


def _decoded(raw: Any) -> Slice:
    """Returns the start of a line. Raises TypeError for a line that is none."""
    one = Slice(**raw)
    numbers = (one.restart, one.began, one.iterations_before, one.ended, one.iterations_after, one.status)
    texts = (one.job, one.nodes, one.cause or "")
    if not all(isinstance(n, int | float | None) for n in numbers) or not all(isinstance(t, str) for t in texts):
        raise TypeError("not a start of the trainer")
    return one


def _submission(job: str) -> str:
    """Returns the id of a job's submission: 17 for 17_3."""
    return job.partition("_")[0]


def _silent(one: Slice, after: Slice) -> Slice:
    return replace(one, iterations_after=after.iterations_before, cause=SILENT)


def _cause(status: int, iterations: int, finished: bool) -> str:
    known = {
        0: "all iterations are done" if finished else f"left in time, saved after {iterations} iterations",
        WRONG_CONFIG: "the config or the command line is wrong: see the log",
        HUNG: "nothing moved for run.hang_after_s: see logs/stacks_*",
    }
    killed = f"killed by signal {status - 128}" if status > 128 else f"failed with status {status}: see the log"
    return known.get(status, killed)


def _append(directory: Path, one: Slice) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    json_lines.append(directory / FILE, json.dumps(asdict(one)).encode())
