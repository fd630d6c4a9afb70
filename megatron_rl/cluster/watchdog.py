"""A watchdog that ends a hanging run after writing the stack traces of all its ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.cluster.job_slices import HUNG
from megatron_rl.lib.regular_files import regular, touch

POLL_S = 2.0
GRACE_S = 10.0  # time in seconds that all ranks have to write their stack traces before they are ended


class Watchdog:
    """The watchdog of one rank, which ends the rank when the run hangs. Every rank has one.

    The driver (on rank 0) calls `beat` whenever a step of the run, such as an iteration, ends. If any rank hangs, the
    driver waits for this rank and the beats stop. The driver also calls `beat` during waits that have a separate
    timeout, such as the wait for a server (`engine.wait_s`). A command to ranks that runs for too long ends the run,
    too, also while the driver gets answers from other ranks. The other ranks watch a file that rank 0 touches regularly
    to show that it is running.
    """

    def __init__(self, directory: Path, session: str, rank: int, after_s: float) -> None:
        """Creates the watchdog of rank `rank`.

        `directory`: the run directory.
        `session`: id of this start of the ranks.
        `after_s`: number of seconds without a call of `beat` after which the run is ended; 0 disables the watchdog.
        """
        self._file, self._alive = directory / f"hang.{session}", directory / f"alive.{session}"
        self._stacks = directory / "logs" / f"stacks_{session}_rank{rank}.txt"
        self._rank, self._after_s = rank, after_s
        self._last, self._done = time.monotonic(), threading.Event()
        # on rank 0: returns (seconds, description) of the longest running command, see messages.commands
        self.longest: Callable[[], tuple[float, str] | None] = lambda: None
        # modification time of the hang file (which asks the ranks to end) if an earlier start left one, otherwise None
        self._left = _changed_at(self._file)

    def beat(self) -> None:
        """Records that the run has made progress, or that the run waits for something with a separate timeout. Any
        thread may call this method.
        """
        self._last = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that watches the run in a background thread while the block is executed."""
        if self._after_s == 0:
            yield
            return
        if self._rank == 0:
            # Removes the files of earlier starts that were killed. A run directory has only one trainer at a time.
            for kind in (self._file, self._alive):
                for path in {*kind.parent.glob(f"{kind.name.partition('.')[0]}.*")} - {kind}:
                    path.unlink(missing_ok=True)
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            if self._rank == 0:
                self._alive.unlink(missing_ok=True)

    def _watch(self) -> None:
        seen = None
        while not self._done.wait(min(POLL_S, self._after_s / 4)):
            if self._rank == 0:
                _touch(self._alive)
            elif (now := _changed_at(self._alive)) != seen:
                seen = now
                self.beat()
            command = self.longest()
            late = time.monotonic() - self._last > self._after_s
            if late or (command is not None and command[0] > self._after_s):
                _touch(self._file)
            elif not self.told_to_end():
                continue
            self._end("" if command is None else f"; {command[1]} for {command[0]:.0f} s")

    def told_to_end(self) -> bool:
        """Returns whether another rank has asked all ranks to end. The other rank asks by touching the hang file.

        A hang file that has not changed since this watchdog was created is from an earlier start, and is ignored. The
        modification time is never compared with a clock, because the clocks of hosts may differ.
        """
        return _changed_at(self._file) not in (None, self._left)

    def _end(self, waits_for: str) -> None:
        """Ends this process. `waits_for`: what the driver waits for, for the message."""
        with contextlib.suppress(OSError):
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with open(self._stacks, "w", opener=regular) as file:
                faulthandler.dump_traceback(file)
        text = (
            f"\nnothing moved for {self._after_s:.0f} s (run.hang_after_s){waits_for}: "
            f"the stacks of rank {self._rank} are in {self._stacks}\n"
        )
        os.write(2, text.encode())
        time.sleep(min(GRACE_S, self._after_s))
        os._exit(HUNG)


def _changed_at(file: Path) -> float | None:
    """Returns the modification time of a file, or None if the file does not exist."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return None


def _touch(file: Path) -> None:
    """Updates the modification time of a file, and ignores errors: a full disk must not prevent the watchdog thread
    from ending the rank.
    """
    with contextlib.suppress(OSError):
        touch(file)
