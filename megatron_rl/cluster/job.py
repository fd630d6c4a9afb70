"""This process's Slurm job, and when a run has to leave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

END, WARNING = "MEGATRON_RL_JOB_END", "MEGATRON_RL_WARNING_S"  # set by slurm/job.sh
STOP = "stop"  # a file in the run directory: save, leave, and do not start again
SPARE_S = 60.0  # Slurm may act so much before its time
MARGIN = 1.2  # a turn may take longer than the longest so far


@dataclass(frozen=True)
class Job:
    """`name` differs from restart to restart of the same job."""

    id: str  # as Slurm's commands take it: 17, or 17_3 of an array
    restart: int
    node: str
    step: str | None  # of srun; None in the batch script
    end: float | None  # seconds since the epoch: the time limit
    warning_s: float | None  # how long before the end the batch script asks the run to leave

    @property
    def name(self) -> str:
        return f"{self.id}.{self.restart}"


def job_from(environment: Mapping[str, str]) -> Job | None:
    """None outside of Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None
    array = environment.get("SLURM_ARRAY_JOB_ID")
    end, warning = environment.get(END), environment.get(WARNING)
    return Job(
        id=f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"],
        restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
        node=environment.get("SLURMD_NODENAME", ""),
        step=environment.get("SLURM_STEP_ID"),
        end=float(end) if end else None,
        warning_s=float(warning) if warning else None,
    )


class Leave:
    """Whether the run should save and leave now. Called after every turn, on the driver.

    It should when a file asks it to (`stop`, or `leave.JOB` from the batch script, which got Slurm's warning), and when another turn
    and a save would not end before the job's time limit, by the longest so far.
    """

    def __init__(
        self, directory: Path, job: Job | None, say: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._directory, self._job, self._say, self._clock = directory, job, say, clock
        self._last, self._longest_turn, self._longest_save = clock(), 0.0, 0.0
        self._warned = False

    def begin(self) -> None:
        """Before the first turn: loading models and waiting for engines, which may be queued for an hour, is no part of one."""
        self._last = self._clock()

    def asked(self) -> bool:
        """By a file. Cheap: also for a loop that waits."""
        return (self._directory / STOP).exists() or (
            self._job is not None and leave_file(self._directory, self._job).exists()
        )

    def __call__(self) -> bool:
        now = self._clock()
        self._longest_turn, self._last = max(self._longest_turn, now - self._last), now
        if self._job is not None:
            self._compare(self._job)
        if self.asked():
            stopped = (self._directory / STOP).exists()
            self._say(
                f"stopped by {self._directory / STOP} (remove it to go on)"
                if stopped
                else "the time limit is near: leaving now"
            )
            return True
        end = None if self._job is None else self._job.end
        if end is None or now + self._needed() + SPARE_S < end:
            return False
        self._say(
            f"the job ends in {end - now:.0f} s, another turn and a save may take {self._needed():.0f} s: leaving now"
        )
        return True

    def saved(self, seconds: float) -> None:
        """How long a checkpoint took."""
        self._longest_save = max(self._longest_save, seconds)

    def _needed(self) -> float:
        return MARGIN * (self._longest_turn + self._longest_save)

    def _compare(self, job: Job) -> None:
        if job.warning_s is not None and self._needed() + SPARE_S > job.warning_s and not self._warned:
            self._warned = True
            self._say(
                f"a turn and a save may take {self._needed():.0f} s, but Slurm's warning comes {job.warning_s:.0f} s before the end: "
                f"set job.warning_s to at least {self._needed() + SPARE_S:.0f}; until then the run leaves by its own clock"
            )


def leave_file(directory: Path, job: Job) -> Path:
    """What the batch script makes when Slurm's warning comes."""
    return directory / f"leave.{job.name}"
