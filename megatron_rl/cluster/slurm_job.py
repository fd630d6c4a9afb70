"""Reads the Slurm job of this process from its environment, and decides when a run must save and exit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# names of the environment variables in which slurm/job.sh passes `SlurmJob.end` and `SlurmJob.warning_s`
END, WARNING = "MEGATRON_RL_JOB_END", "MEGATRON_RL_WARNING_S"
# name of a file in the run directory; a user creates it to ask the run to save, exit, and not start again
STOP = "stop"
SPARE_S = 60.0  # safety margin in seconds before the time limit of the job
MARGIN = 1.2  # safety factor on the durations of the longest iteration and the longest save so far


@dataclass(frozen=True)
class SlurmJob:
    """One start of a Slurm job. Each restart of the same job has a different `name`."""

    id: str  # job id in the format of Slurm's commands: 17, or 17_3 for an element of an array
    restart: int
    node: str
    step: str | None  # id of the srun step; None if the process is the batch script
    end: float | None  # time at which the job's time limit is reached, in seconds since the epoch
    warning_s: float | None  # number of seconds before `end` at which the batch script asks the run to save and exit
    scripted: bool = False  # whether the job runs a batch script of this project, which reads the stop file

    @property
    def name(self) -> str:
        return f"{self.id}.{self.restart}"


def job_from(environment: Mapping[str, str]) -> SlurmJob | None:
    """Returns the Slurm job that the environment variables describe, or None outside of Slurm."""
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
    """Decides whether a run should save and exit. The driver calls it after every iteration and evaluation.

    The run should exit when the run directory contains the file `stop`, or the file `leave.JOB`, which the batch script
    creates at Slurm's warning before the time limit. It should also exit when another iteration and save, each as long
    as the longest so far plus a margin, would not end before the time limit.
    """

    def __init__(
        self, directory: Path, job: SlurmJob | None, say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """Prepares the decisions for one start of a run.

        `directory`: the run directory.
        `say`: callback that reports a message.
        `clock`: returns monotonic time in seconds.
        `wall`: returns the time of day in seconds since the epoch, as in `job.end`. It is called only once, so that
        a later change of the node's clock does not end the run.
        """
        self._directory, self._job, self._say, self._clock = directory, job, say, clock
        self._end = None if job is None or job.end is None else clock() + job.end - wall()
        self._last, self._longest_iteration, self._longest_save = clock(), 0.0, 0.0
        self._warned = False

    def begin(self) -> None:
        """Starts to measure the first iteration. Call it after models are loaded and engines have started, so that the
        time for this is not counted as part of an iteration."""
        self._last = self._clock()

    def asked(self) -> bool:
        """Returns whether the stop file or the leave file exists, that is, whether the run is asked to exit. This
        check is cheap enough for a polling loop.
        """
        return (self._directory / STOP).exists() or (
            self._job is not None and leave_file(self._directory, self._job).exists()
        )

    def __call__(self) -> bool:
        """Returns whether the run should save and exit now, and reports the reason through the `say` callback.

        The time since the last call is recorded as the duration of an iteration, including an evaluation.
        """
        now = self._clock()
        self._longest_iteration, self._last = max(self._longest_iteration, now - self._last), now
        needed = MARGIN * (self._longest_iteration + self._longest_save)
        warning_s = None if self._job is None else self._job.warning_s
        if warning_s is not None and needed + SPARE_S > warning_s and not self._warned:
            self._warned = True
            self._say(
                f"an iteration and a save may take {needed:.0f} s, but Slurm's warning comes {warning_s:.0f} s before "
                f"the end: set job.warning_s to at least {needed + SPARE_S:.0f}; until then the run leaves by its own "
                "clock"
            )
        stop, end = self._directory / STOP, self._end
        if stop.exists():
            self._say(f"stopped by {stop}; the same command, or `megatron-rl submit`, goes on from here")
        elif self.asked():
            self._say("the time limit is near: leaving now")
        elif end is not None and now + needed + SPARE_S >= end:
            ends = f"the job ends in {end - now:.0f} s, another iteration and a save may take {needed:.0f} s"
            self._say(f"{ends}: leaving now")
        else:
            return False
        return True

    def saved(self, seconds: float) -> None:
        """Records the duration of a checkpoint save in seconds."""
        self._longest_save = max(self._longest_save, seconds)

    def done(self) -> None:
        """Removes the stop file when the run exits, so that the next start does not stop immediately.

        Keeps the file in a job with a batch script of this project, because the script reads the file after the run.
        In this case, `megatron-rl submit` removes the file.
        """
        if self._job is None or not self._job.scripted:
            (self._directory / STOP).unlink(missing_ok=True)


def leave_file(directory: Path, job: SlurmJob) -> Path:
    """Returns the path of the file that the batch script creates when Slurm's warning signal arrives."""
    return directory / f"leave.{job.name}"
