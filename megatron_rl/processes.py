"""Looks into Linux's table of processes: who is below whom, who left a session, and who tidies up behind others.

It needs no rights beyond those over the caller's own processes. Elsewhere than on Linux the table is empty.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

TRACKER = b"multiprocessing.resource_tracker"  # stands in the command line of the process that is meant
PAUSE_S = 0.002  # between two looks at processes that are ending


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table."""

    session: int
    start: int  # in clock ticks from the machine's start; together with the number it names a process for good


def look(pid: int) -> Entry | None:
    """Returns what the table says of a process; None for one that has ended, also where nobody has waited for it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(")")[2].split()  # the command's name, before it, may hold anything
    # A process whose first thread has ended is a zombie by its letter, and lives on by its other threads.
    ended = fields[0] in "ZX" and int(fields[17]) <= 1
    return None if ended else Entry(session=int(fields[3]), start=int(fields[19]))


def children(pid: int) -> list[int]:
    """Returns the children of a process, those that ended and were not waited for among them."""
    if not _lists_children():
        return [other for other in everybody() if _parent(other) == pid]
    out: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            out += _numbers(f"/proc/{pid}/task/{thread}/children")
    return out


def everybody() -> list[int]:
    """Returns all processes that can be seen."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def below(pid: int) -> list[int]:
    """Returns the living processes that a process started, and those that these started."""
    out, stack = [], children(pid)
    while stack:
        one = stack.pop()
        if look(one) is not None:
            out.append(one)
            stack += children(one)
    return out


def members(session: int) -> list[int]:
    """Returns the living processes of a session."""
    return [pid for pid in everybody() if (entry := look(pid)) is not None and entry.session == session]


def is_tracker(pid: int) -> bool:
    """Returns whether a process is the one that removes shared memory and semaphores behind Python's multiprocessing.

    It does so when all that used them have ended, and ends then. Killed together with them, it leaves all in /dev/shm.
    """
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def strays(keeper: int, worker: int) -> list[int]:
    """Returns the processes below `keeper` that left its child `worker`: by the death of their parents, whereupon the
    keeper is their parent, or by a session of their own; and all that these started."""
    entry = look(keeper)
    session = None if entry is None else entry.session
    out, stack = [], [(child, child != worker) for child in children(keeper)]
    while stack:
        pid, stray = stack.pop()
        entry = look(pid)
        if entry is None:
            continue
        stray = stray or entry.session != session
        if stray:
            out.append(pid)
        stack += [(child, stray) for child in children(pid)]
    return out


def end_strays(keeper: int, worker: int) -> None:
    """Kills the strays and waits until none is left. `worker` calls it, after every answer; it is quick without any."""
    if children(keeper) == [worker] and not children(worker):
        return
    killed: set[int] = set()
    while (left := strays(keeper, worker)) or killed:
        for pid in left:
            kill(pid)
        killed.update(left)
        killed = {pid for pid in killed if not _reap(pid)}
        time.sleep(PAUSE_S)


def end_below(tracker_s: float) -> None:
    """Kills all processes below this one, and waits for them. A tracker has `tracker_s` to end by itself.

    This process must be the one that orphans go to (PR_SET_CHILD_SUBREAPER), or those that fork twice are missed.
    """
    if not os.path.exists("/proc/self/stat"):
        return  # nothing can be known of them
    deadline = time.monotonic() + tracker_s
    while True:
        for pid in below(os.getpid()):
            if time.monotonic() > deadline or not is_tracker(pid):
                kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(PAUSE_S)


def kill(pid: int) -> None:
    """Kills a process that may have ended, or be another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> bool:
    """Waits for a child that may have ended. Returns whether it has; True for one that is no child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # its parent waits for it
        return True


def _numbers(path: str) -> list[int]:
    """Returns the numbers in a file; none of one that is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return [int(word) for word in file.readall().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


@functools.cache
def _lists_children() -> bool:
    """Returns whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
