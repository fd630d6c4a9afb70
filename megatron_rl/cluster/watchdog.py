"""Ends a run in which nothing moves any more, after it has written the stacks of all its ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.cluster.job_slices import HUNG

POLL_S = 2.0
GRACE_S = 10.0  # time for all ranks to write their stacks


class Watchdog:
    """A rank's guard against hanging. Every rank has one.

    The driver's decides: it beats whenever a part of the run ends, and a rank that hangs keeps it waiting. It also
    beats while the run waits for something under a limit of its own that ends the wait, such as a server
    (`engine.wait_s`). The others see from a file that the driver itself still runs.
    """

    def __init__(self, directory: Path, session: str, rank: int, after_s: float) -> None:
        """`session` names this start of the ranks. `after_s`: seconds without a beat that end the run; 0 is never."""
        self._file, self._alive = directory / f"hang.{session}", directory / f"alive.{session}"
        self._stacks = directory / "logs" / f"stacks_{session}_rank{rank}.txt"
        self._rank, self._after_s = rank, after_s
        self._last, self._done = time.monotonic(), threading.Event()
        self._left = _changed_at(self._file)  # by an earlier start

    def beat(self) -> None:
        """Notes that the run has moved, or that it waits under another limit than this one. Any thread may call it."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the run in a thread while the block runs."""
        if self._after_s == 0:
            yield
            return
        if self._rank == 0:
            self._remove_other_files()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            if self._rank == 0:
                self._alive.unlink(missing_ok=True)

    def _remove_other_files(self) -> None:
        """Removes the files of earlier starts that were killed; a run directory has one trainer at a time."""
        for kind in (self._file, self._alive):
            for path in kind.parent.glob(f"{kind.name.partition('.')[0]}.*"):
                if path != kind:
                    path.unlink(missing_ok=True)

    def _watch(self) -> None:
        seen = None
        while not self._done.wait(min(POLL_S, self._after_s / 4)):
            if self._rank == 0:
                _touch(self._alive)
            elif (now := self._driver_seen_at()) != seen:
                seen = now
                self.beat()
            late = time.monotonic() - self._last > self._after_s
            if late:
                _touch(self._file)
            if late or self._told_to_end():
                self._end()

    def _driver_seen_at(self) -> float | None:
        return _changed_at(self._alive)

    def _told_to_end(self) -> bool:
        """Returns whether another rank asks all to end. A file that was there before belongs to an earlier
        start. No clock is asked, as those of two hosts differ and may be set."""
        return _changed_at(self._file) not in (None, self._left)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("w") as file:
                faulthandler.dump_traceback(file)
        text = (
            f"\nnothing moved for {self._after_s:.0f} s (run.hang_after_s): "
            f"the stacks of rank {self._rank} are in {self._stacks}\n"
        )
        os.write(2, text.encode())
        time.sleep(min(GRACE_S, self._after_s))
        os._exit(HUNG)


def _changed_at(file: Path) -> float | None:
    """Returns the time at which a file was changed; None where there is none."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return None


def _touch(file: Path) -> None:
    """Touches a file if it can: a full disk must neither end this thread nor keep it from ending the rank."""
    with contextlib.suppress(OSError):
        file.touch()
