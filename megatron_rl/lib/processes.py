"""Finds and kills processes by means of Linux's process table: descendants of a process, processes that left a session,
and resource trackers.

Needs no special privileges. On systems other than Linux, no processes are found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# substring that identifies the command line of multiprocessing's resource tracker
TRACKER = b"multiprocessing.resource_tracker"
PAUSE_S = 0.002  # seconds between two checks of processes that are ending


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of one process in the process table (/proc)."""

    parent: int
    session: int
    # start time of the process in clock ticks since boot; start time and pid together identify a process uniquely
    start: int


def look(pid: int) -> Entry | None:
    """Returns the table entry of a process, or None if the process has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # Split at the last ")", where the command name ends, because the command name itself may contain ")" and spaces.
    fields = text.rpartition(")")[2].split()
    # A process whose main thread has ended has the state zombie, but is alive while it has other threads.
    ended = fields[0] in "ZX" and int(fields[17]) <= 1
    return None if ended else Entry(parent=int(fields[1]), session=int(fields[3]), start=int(fields[19]))


def children(pid: int) -> list[int]:
    """Returns the child processes of a process, including zombies."""
    if not os.path.exists("/proc/thread-self/children"):  # if the kernel was built without CONFIG_PROC_CHILDREN
        return [child for child in everybody() if (entry := look(child)) is not None and entry.parent == pid]
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += _numbers(f"/proc/{pid}/task/{thread}/children")
    return pids


def everybody() -> list[int]:
    """Returns the ids of all visible processes."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def below(pid: int) -> list[int]:
    """Returns all descendants of a process that are alive."""
    descendants, stack = [], children(pid)
    while stack:
        descendant = stack.pop()
        if look(descendant) is not None:
            descendants.append(descendant)
            stack += children(descendant)
    return descendants


def members(session: int) -> list[int]:
    """Returns the processes of a session that are alive."""
    return [pid for pid in everybody() if (entry := look(pid)) is not None and entry.session == session]


def is_tracker(pid: int) -> bool:
    """Returns whether a process is the resource tracker of Python's multiprocessing, which removes leaked shared memory
    and semaphores.

    The tracker removes them when all processes that used them have ended, and then exits. If the tracker is killed
    together with these processes, the shared memory stays in /dev/shm.
    """
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def strays(keeper: int, worker: int) -> list[int]:
    """Returns the stray descendants of the process `keeper`: all children of the keeper except `worker` (such as
    orphans that the keeper adopted), all descendants in another session than the keeper's, and all descendants of such
    processes.
    """
    entry = look(keeper)
    session = None if entry is None else entry.session
    stray_pids, stack = [], [(child, child != worker) for child in children(keeper)]
    while stack:
        pid, stray = stack.pop()
        entry = look(pid)
        if entry is None:
            continue
        stray = stray or entry.session != session
        if stray:
            stray_pids.append(pid)
        stack += [(child, stray) for child in children(pid)]
    return stray_pids


def end_strays(keeper: int, worker: int) -> None:
    """Kills the stray processes that `strays` returns and waits until none is left. The process `worker` calls this
    function after each graded response. If there are no strays, the call is fast.
    """
    if children(keeper) == [worker] and not children(worker):
        return
    killed: set[int] = set()
    while (stray_pids := strays(keeper, worker)) or killed:
        for pid in stray_pids:
            kill(pid)
        killed.update(stray_pids)
        for pid in [*killed]:
            with contextlib.suppress(ChildProcessError):  # not a child: its parent reaps it
                if os.waitpid(pid, os.WNOHANG)[0] != pid:
                    continue
            killed.remove(pid)
        time.sleep(PAUSE_S)


def end_below(tracker_s: float) -> None:
    """Kills all descendants of this process and waits for them. A resource tracker gets `tracker_s` seconds to exit by
    itself.

    This process must be a subreaper (PR_SET_CHILD_SUBREAPER), so that orphaned descendants become its children.
    Otherwise descendants whose parent has exited (daemons that fork twice) are missed.
    """
    if not os.path.exists("/proc/self/stat"):
        return  # without /proc, no descendants can be found
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
    """Kills a process. Ignores processes that have ended or belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _numbers(path: str) -> list[int]:
    """Returns the integers in a file, or an empty list if the file does not exist any more."""
    try:
        with open(path, "rb", buffering=0) as file:
            return [int(word) for word in file.readall().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
