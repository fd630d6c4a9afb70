"""The starts and ends of a run's trainer, in RUN/slices.jsonl: from them comes what its job does next."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from megatron_rl.cluster.job import STOP, Job
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.directory import RunDirectory

FILE = "slices.jsonl"
CONFIG = 2  # exit status of `megatron-rl train`: wrong config
HUNG = 86  # of a rank that ended itself because nothing moved
SILENT_SHARE = (
    3  # starts that ended without a word, a crashed node or a preemption, are borne so many times as long as others
)
SILENT = "ended without a word: a node or the batch script was killed, or the time limit came before it had saved"


class Next(StrEnum):
    """What the batch script does now."""

    GO = "go"  # start the ranks
    DONE = "done"  # the target is reached: cancel what waits
    STOPPED = "stopped"  # somebody asked for it, or trying again cannot help: cancel what waits
    SLICE = "slice"  # left in time: the next element goes on
    AGAIN = "again"  # a fault: the same element once more


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One start of the trainer. `turns` are those in a complete checkpoint."""

    job: str
    restart: int
    nodes: str
    began: float  # seconds since the epoch
    turns_before: int
    ended: float | None = None
    turns_after: int | None = None
    status: int | None = None
    cause: str | None = None

    @property
    def refused(self) -> bool:
        """It started no rank: those before it had made no progress."""
        return self.ended is not None and self.status is None


def read(directory: Path, *, alive: bool = True) -> list[Slice]:
    """In order; those that ended without a word have SILENT as their cause, but for the last, which may still run: not where the run is
    not `alive`."""
    path, found = directory / FILE, dict[tuple[str, int], Slice]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            one = Slice(**json.loads(line))
        except (ValueError, TypeError):
            continue  # half a line, of a node that died while it wrote
        found[one.job, one.restart] = one
    slices = [*found.values()]
    out = [s if s.ended is not None else _silent(s, after) for s, after in zip(slices, slices[1:], strict=False)]
    last = slices[-1:]
    if last and not alive and last[0].ended is None:
        return [*out, replace(last[0], cause=SILENT)]
    return out + last


def begin(directory: Path, job: Job, nodes: str, stalled: int) -> tuple[Next, str]:
    """Notes a start -> (what to do, why). `stalled`: so many starts of one submission, one after the other, without a new checkpoint are
    enough; of those that ended without a word three times as many. Who submits again has mended something."""
    if finished(directory):
        return Next.DONE, f"{directory} is finished"
    if (directory / STOP).exists():
        return Next.STOPPED, f"{directory / STOP} is there: somebody stopped this run (remove it to go on)"
    turns = turns_done(directory)
    new = Slice(job=job.id, restart=job.restart, nodes=nodes, began=time.time(), turns_before=turns)
    before = [
        s
        for s in read(directory)
        if _submission(s.job) == _submission(job.id) and not s.refused and s.turns_before == turns
    ]
    faults = sum((s.cause or SILENT) != SILENT for s in before)
    if faults >= stalled or len(before) >= SILENT_SHARE * stalled:
        causes = "; ".join(dict.fromkeys(s.cause or SILENT for s in before))
        why = f"{len(before)} starts made no progress beyond {turns} turns (job.stalled): {causes}"
        _append(directory, replace(new, ended=new.began, turns_after=turns, cause=why))
        return Next.STOPPED, why
    _append(directory, new)
    return Next.GO, f"{turns} turns are done"


def end(directory: Path, job: Job, status: int) -> tuple[Next, str]:
    """Notes an end -> (what to do, why). `status`: of srun; ranks that were asked to leave, and saved, end with 0 too."""
    turns, own = turns_done(directory), [s for s in read(directory) if (s.job, s.restart) == (job.id, job.restart)]
    cause = _cause(status, turns, finished(directory))
    if own:
        _append(directory, replace(own[-1], ended=time.time(), turns_after=turns, status=status, cause=cause))
    if finished(directory):
        return Next.DONE, cause
    if status == CONFIG or (directory / STOP).exists():
        return Next.STOPPED, cause
    return (Next.AGAIN if status else Next.SLICE), cause


def over(directory: Path) -> bool:
    """Whether nothing of this run is to go on: finished, or stopped by somebody."""
    return finished(directory) or (directory / STOP).exists()


def finished(directory: Path) -> bool:
    return bool(RunDirectory(directory).read_summary().get("finished"))


def turns_done(directory: Path) -> int:
    newest = Checkpoints(RunDirectory(directory).checkpoints).newest()
    return newest.number if newest else 0


def _submission(job: str) -> str:
    """17 of 17_3."""
    return job.partition("_")[0]


def _silent(one: Slice, after: Slice) -> Slice:
    return replace(one, turns_after=after.turns_before, cause=SILENT)


def _cause(status: int, turns: int, finished: bool) -> str:
    known = {
        0: "all turns are done" if finished else f"left in time, saved after {turns} turns",
        CONFIG: "the config or the command line is wrong: see the log",
        HUNG: "nothing moved for run.hang_after_s: see logs/stacks_*",
    }
    killed = f"killed by signal {status - 128}" if status > 128 else f"failed with status {status}: see the log"
    return known.get(status, killed)


def _append(directory: Path, one: Slice) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    cut = path.exists() and not path.read_bytes().endswith(b"\n")  # half a line before this one must not take it along
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + json.dumps(asdict(one)) + "\n")
        file.flush()
        os.fsync(file.fileno())
