"""Reads this process's Slurm job from its environment, and decides when a run has to leave the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

END, WARNING = "MEGATRON_RL_JOB_END", "MEGATRON_RL_WARNING_S"  # environment variables that slurm/job.sh sets
STOP = "stop"  # a file of this name in the run directory asks the run to save, leave, and not start again
SPARE_S = 60.0  # Slurm may act this much before its time
MARGIN = 1.2  # the next iteration may take longer than the longest so far


@dataclass(frozen=True)
class SlurmJob:
    """One start of a Slurm job. Its `name` differs from restart to restart of the same job."""

    id: str  # as Slurm's commands take it: 17, or 17_3 for an element of an array
    restart: int
    node: str
    step: str | None  # number of the srun step; None in the batch script
    end: float | None  # the time limit in seconds since the epoch
    warning_s: float | None  # how long before the end the batch script asks the run to leave
    scripted: bool = False  # a batch script of ours runs it, and reads the stop file when the run has left

    @property
    def name(self) -> str:
        return f"{self.id}.{self.restart}"


def job_from(environment: Mapping[str, str]) -> SlurmJob | None:
    """Reads the job of an environment. Returns None outside of Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None
    array = environment.get("SLURM_ARRAY_JOB_ID")
    end, warning = environment.get(END), environment.get(WARNING)
    return SlurmJob(
        id=f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"],
        restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
        node=environment.get("SLURMD_NODENAME", ""),
        step=environment.get("SLURM_STEP_ID"),
        end=float(end) if end else None,
        warning_s=float(warning) if warning else None,
        scripted=END in environment,
    )


class Leave:
    """The decision whether a run should save and leave now. The driver calls it after every iteration and evaluation.

    The run should leave when a file asks it to: `stop`, or `leave.JOB`, which the batch script makes when Slurm's
    warning comes. It should also leave when another iteration and a save, as long as the longest so far, would not end
    before the job's time limit.
    """

    def __init__(
        self, directory: Path, job: SlurmJob | None, say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`clock` gives seconds that never jump. `wall`, the time of day in which Slurm gives a job's end, is looked at
        once: setting the clock of a node ends no run."""
        self._directory, self._job, self._say, self._clock = directory, job, say, clock
        self._end = None if job is None or job.end is None else clock() + job.end - wall()
        self._last, self._longest_iteration, self._longest_save = clock(), 0.0, 0.0
        self._warned = False

    def begin(self) -> None:
        """Starts the clock of the first iteration. Loading models and waiting for queued engines is no part of an
        iteration."""
        self._last = self._clock()

    def asked(self) -> bool:
        """Returns whether a file asks the run to leave. It is cheap enough for a loop that waits."""
        return (self._directory / STOP).exists() or (
            self._job is not None and leave_file(self._directory, self._job).exists()
        )

    def __call__(self) -> bool:
        """Returns whether the run should leave now, and says why. The time since the last call counts as an iteration,
        also that of an evaluation."""
        now = self._clock()
        self._longest_iteration, self._last = max(self._longest_iteration, now - self._last), now
        if self._job is not None:
            self._check_warning(self._job)
        if self.asked():
            stopped = (self._directory / STOP).exists()
            self._say(
                f"stopped by {self._directory / STOP}; the same command, or `megatron-rl submit`, goes on from here"
                if stopped
                else "the time limit is near: leaving now"
            )
            return True
        end = self._end
        if end is None or now + self._needed() + SPARE_S < end:
            return False
        self._say(
            f"the job ends in {end - now:.0f} s, another iteration and a save may take {self._needed():.0f} s: "
            "leaving now"
        )
        return True

    def saved(self, seconds: float) -> None:
        """Notes how many seconds a checkpoint took."""
        self._longest_save = max(self._longest_save, seconds)

    def done(self) -> None:
        """Removes the stop file when the run leaves, so that the next start is not stopped at once. A batch script
        reads the file after the run; there `megatron-rl submit` removes it."""
        if self._job is None or not self._job.scripted:
            (self._directory / STOP).unlink(missing_ok=True)

    def _needed(self) -> float:
        return MARGIN * (self._longest_iteration + self._longest_save)

    def _check_warning(self, job: SlurmJob) -> None:
        if job.warning_s is not None and self._needed() + SPARE_S > job.warning_s and not self._warned:
            self._warned = True
            self._say(
                f"an iteration and a save may take {self._needed():.0f} s, but Slurm's warning comes "
                f"{job.warning_s:.0f} s before the end: set job.warning_s to at least {self._needed() + SPARE_S:.0f}; "
                "until then the run leaves by its own clock"
            )


def leave_file(directory: Path, job: SlurmJob) -> Path:
    """Returns the file that the batch script makes when Slurm's warning comes."""
    return directory / f"leave.{job.name}"
