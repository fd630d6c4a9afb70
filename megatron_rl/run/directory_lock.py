"""Locks a directory for one process, also on file systems without flock.

A lock by flock is released whenever its process ends. If the file system has no flock (Lustre without `-o flock`:
ENOSYS, NFS without its lock service: ENOLCK, some others: EOPNOTSUPP), a lock file is created exclusively instead. The
lock file identifies the process that created it; if that process was killed on this host, the lock file is replaced.
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

from megatron_rl.lib import processes
from megatron_rl.lib.regular_files import read_text

WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of a file system without flock
UNREAD_S = 2.0  # seconds to wait until another process has written the contents of a lock file that it just created
POLL_S = 0.05  # seconds between two tries
_log = logging.getLogger(__name__)


class Taken(RuntimeError):
    """Raised when another process holds the lock. The message names the process, or is empty if the process is unknown.
    `cure`: a sentence about the lock file that the user may have to remove."""

    def __init__(self, who: str, cure: str = "") -> None:
        super().__init__(who)
        self.cure = cure


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that created a lock file."""

    host: str
    boot: str  # boot id of the machine
    space: str  # id of the process namespace of `pid`
    pid: int
    start: int  # start time of the process, see processes.Entry
    job: str = ""  # id of the process's Slurm job
    restart: int = 0  # restart count of the job; Slurm ends the processes of a job before it restarts the job

    def is_gone(self, caller: Holder) -> bool:
        """Returns whether the process has certainly ended. `caller`: the calling process."""
        if caller.job and caller.job == self.job and self.restart < caller.restart:
            return True
        if not self.boot or (self.host, self.boot, self.space) != (caller.host, caller.boot, caller.space):
            return False  # a different boot id is no proof, because two hosts may have the same name
        entry = processes.look(self.pid)
        return entry is None or entry.start != self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_name(job: str = "", restart: int = 0) -> Holder:
    """Returns the Holder of this process. `job`, `restart`: id and restart count of its Slurm job, if any."""
    entry = processes.look(os.getpid())
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return Holder(socket.gethostname(), boot, space, os.getpid(), entry.start if entry else 0, job, restart)


def flock(file: int) -> bool:
    """Locks an open file until it is closed. Returns False if the file system has no flock, otherwise True.

    `file`: file descriptor. Raises BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT:
            raise
        return False
    return True


@contextlib.contextmanager
def held(file: int, beside: Path, caller: Holder) -> Iterator[None]:
    """Context manager that locks an open file by flock or, if the file system has no flock, by creating a lock file.

    `file`: file descriptor of the open file. `beside`: path of the lock file. `caller`: the calling process. A flock is
    held until the open file is closed. A lock file is removed at the end of the block. Raises Taken if another process
    holds the lock.
    """
    try:
        locked = flock(file)
    except BlockingIOError:
        raise Taken("") from None
    if locked:
        yield
        return
    _log.warning("%s: the file system has no flock; the file %s stands in its place", beside.parent, beside.name)
    _make(beside, caller)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _read(beside) == caller:
                beside.unlink()


def _make(path: Path, caller: Holder) -> None:
    """Creates the lock file. A lock file of a process that has ended is replaced. Raises Taken if another process holds
    the lock."""
    cure = f"when that process is gone, remove {path}"
    end = time.monotonic() + UNREAD_S
    while True:
        with contextlib.suppress(FileExistsError):
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                os.write(file, json.dumps(asdict(caller)).encode())
                os.fsync(file)
            except OSError:  # e.g. the disk is full
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
            return
        holder = _read(path)
        if holder is not None and not holder.is_gone(caller):
            raise Taken(str(holder), cure)
        if holder is not None:
            _remove(path, caller)
        elif time.monotonic() > end:
            raise Taken("a process that is not known", cure)
        else:
            time.sleep(POLL_S)


def _remove(path: Path, caller: Holder) -> None:
    """Removes the lock file of a process that has ended. If several processes try to remove it, one process removes the
    file, and the other processes wait and return."""
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
        if holder is not None and holder.is_gone(caller):
            _log.warning("%s: %s is gone, and its lock is taken over", path, holder)
            path.unlink(missing_ok=True)
    finally:
        breaking.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    """Returns the Holder in a lock file, or None if the file is missing, not written yet, or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        holder = Holder(**json.loads(read_text(path)))
        if isinstance(holder.pid, int) and isinstance(holder.start, int) and isinstance(holder.restart, int):
            return holder
    return None
