"""Locks that hold a directory for one process, also on file systems without flock.

flock ends with its process, however that ends. Where the file system has none (Lustre without `-o flock`: ENOSYS, NFS
without its lock service: ENOLCK, some others: EOPNOTSUPP), a file that only one process can make stands in its place.
It names its maker, so that one who was killed on this host is known to be gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl import processes

WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # what says that there is no flock
UNREAD_S = 2.0  # for a file that has just been made to be written
POLL_S = 0.05
_log = logging.getLogger(__name__)


class Taken(RuntimeError):
    """Raised when another process holds the lock. The message names that process as far as it is known; `cure` says
    which file may have to be removed."""

    def __init__(self, who: str, cure: str = "") -> None:
        super().__init__(who)
        self.cure = cure


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that made a file which stands for a lock."""

    host: str
    boot: str  # name of this start of the machine
    space: str  # name of the process namespace, within which `pid` is a process's number
    pid: int
    start: int  # the process's, see processes.Entry
    job: str = ""  # id of its Slurm job
    restart: int = 0  # of that job: Slurm ends the processes of a job before it starts the job again

    def is_gone(self, here: Holder) -> bool:
        """Returns whether the process is known to have ended, as seen by the process `here`."""
        if here.job and here.job == self.job and self.restart < here.restart:
            return True
        if not self.boot or (self.host, self.boot, self.space) != (here.host, here.boot, here.space):
            return False  # two hosts may have one name: another start of the machine proves nothing
        entry = processes.look(self.pid)
        return entry is None or entry.start != self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_name(job: str = "", restart: int = 0) -> Holder:
    """Returns the Holder that describes this process, with its Slurm job where it has one."""
    entry = processes.look(os.getpid())
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return Holder(socket.gethostname(), boot, space, os.getpid(), entry.start if entry else 0, job, restart)


def flock(file: int) -> bool:
    """Takes the lock of an open file, until it is closed. Returns False where the file system has none.

    Raises BlockingIOError when another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT:
            raise
        return False
    return True


@contextlib.contextmanager
def held(file: int, beside: Path, here: Holder) -> Iterator[None]:
    """Holds the lock of an open file for the process `here`, this one; `beside` is made where there is no flock.

    The lock of flock lasts until the file is closed, the other until the block's end. Raises Taken.
    """
    try:
        locked = flock(file)
    except BlockingIOError:
        raise Taken("") from None
    if locked:
        yield
        return
    _log.warning("%s: the file system has no flock; the file %s stands in its place", beside.parent, beside.name)
    _make(beside, here)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _read(beside) == here:
                beside.unlink()


def _make(path: Path, here: Holder) -> None:
    """Creates the file, and replaces the file of a process that has ended. Raises Taken."""
    cure = f"when that process is gone, remove {path}"
    end = time.monotonic() + UNREAD_S
    while True:
        with contextlib.suppress(FileExistsError):
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                os.write(file, json.dumps(asdict(here)).encode())
                os.fsync(file)
            except OSError:  # a full disk
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
            return
        holder = _read(path)
        if holder is not None and not holder.is_gone(here):
            raise Taken(str(holder), cure)
        if holder is not None:
            _remove(path, here)
        elif time.monotonic() > end:
            raise Taken("a process that is not known", cure)
        else:
            time.sleep(POLL_S)


def _remove(path: Path, here: Holder) -> None:
    """Removes the file of a process that has ended. Of several processes that try it, one removes the file and the
    others wait."""
    breaking = path.with_name(f"{path.name}.breaking")
    try:
        os.close(os.open(breaking, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        time.sleep(POLL_S)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - breaking.stat().st_mtime > UNREAD_S * 10:
                raise Taken("a process that is not known", f"when no other starts here, remove {breaking}") from None
        return
    try:
        holder = _read(path)
        if holder is not None and holder.is_gone(here):
            _log.warning("%s: %s is gone, and its lock is taken over", path, holder)
            path.unlink(missing_ok=True)
    finally:
        breaking.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    """Returns the Holder in a file; None for a file that is missing, not written yet, or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        found = Holder(**json.loads(path.read_text()))
        if isinstance(found.pid, int) and isinstance(found.start, int) and isinstance(found.restart, int):
            return found
    return None
