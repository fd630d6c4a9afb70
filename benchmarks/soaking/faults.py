"""The faults that a soak makes: what is killed, what fills, what jumps, and when."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from soaking import watch
from soaking.watch import Watch

DAY_S = 86_400.0
SHIFTS_S = (-3650 * DAY_S, -DAY_S, -3600.0, 3600.0, DAY_S, 400 * DAY_S)
NOTICE_S = 90.0  # until a run notices that its disk is full
SAVING_S = 20.0  # that a fault waits for a checkpoint
BALLAST, BLOCK = "ballast", 1 << 16
LIMIT = 1 << 12  # bytes of a file, where no disk of our own can be filled
KILLS = ("rank", "launcher", "all", "saving")  # saving: a rank, while a checkpoint is written
ENDS = ("rank", "launcher", "all", "saving", "disk")  # what a run ends by


@dataclass(frozen=True, order=True)
class Fault:
    """A fault that is due when so many iterations are done."""

    iteration: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class World:
    """What faults are made in."""

    mark: str  # of the processes
    disk: Path  # where the run writes
    own_disk: bool  # the disk is the soak's own and may be filled
    clock: Path  # the file with the seconds that the wall clock is wrong by
    rng: random.Random


def plan(rng: random.Random, iterations: int, counts: Sequence[tuple[str, int]]) -> list[Fault]:
    """Spreads faults over a run: each in a share of the iterations of its own, somewhere in it, the kinds in any
    order."""
    kinds = [kind for kind, count in counts for _ in range(count)]
    rng.shuffle(kinds)
    return [Fault(int((i + rng.random()) * iterations / len(kinds)), kind) for i, kind in enumerate(kinds)]


def strike(fault: Fault, world: World, watched: Watch, launcher: psutil.Popen, run: Path) -> bool:
    """Makes a fault. Returns whether there was something to strike yet."""
    match fault.kind:
        case "disk":
            _fill(world, watched, launcher)
            return True
        case "clock":
            set_clock(world.clock, world.rng.choice(SHIFTS_S))
            return True
        case "launcher":
            return _kill([psutil.Process(launcher.pid)])
        case "all":
            return _kill(watch.marked(world.mark))
        case "saving":
            _wait(lambda: any((run / "checkpoints").glob(".iteration_*.tmp")), launcher, SAVING_S)
            return _kill(watched.named(launcher.pid, "rank"), world.rng)
        case kind:
            return _kill(watched.named(launcher.pid, kind), world.rng)


def set_clock(file: Path, seconds: float) -> None:
    """Sets the clock of all processes that read the file. The file keeps its place: it is mapped."""
    with file.open("r+b" if file.exists() else "wb") as clock:
        clock.write(struct.pack("<d", seconds))


def _fill(world: World, watched: Watch, launcher: psutil.Popen) -> None:
    """Leaves no room on the disk until the run has ended, then makes room again."""
    if not world.own_disk:
        for process in watch.family(launcher.pid):
            with contextlib.suppress(psutil.Error):
                process.rlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
        _wait(lambda: False, launcher, NOTICE_S)
        return
    ballast = world.disk / BALLAST
    try:
        with ballast.open("wb", buffering=0) as file:
            for block in (BLOCK, 1):  # to the last byte
                _write_until_full(file.fileno(), block)
        _wait(lambda: False, launcher, NOTICE_S)
    finally:
        ballast.unlink(missing_ok=True)


def _write_until_full(descriptor: int, size: int) -> None:
    try:
        while os.write(descriptor, bytes(size)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _wait(condition: Callable[[], bool], launcher: psutil.Popen, within_s: float) -> None:
    """Waits until the condition holds, the run has ended, or the time is over."""
    end = time.monotonic() + within_s
    while launcher.poll() is None and not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _kill(processes: Sequence[psutil.Process], rng: random.Random | None = None) -> bool:
    """Kills all of these processes, or one of them. Returns whether there was one."""
    for process in [rng.choice(processes)] if rng is not None and processes else processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return bool(processes)
