"""Runs a reward's worker as a child, and sees to it that nothing which the worker started is left.

A process that calls setsid, or whose parent ends, leaves the worker's process group and cannot be killed with it. On
Linux such an orphan becomes the reaper's child (PR_SET_CHILD_SUBREAPER, prctl(2)), which every user may ask for. When
the worker ends, when the pool says so, and when the run's process is gone, the reaper kills all processes below it,
whatever session they are in, and ends as the worker did.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

from megatron_rl import processes
from megatron_rl.rewards import grading_worker as worker_script

LEAVE = signal.SIGHUP  # asks the reaper to end all; Linux sends it too when the thread that started the reaper ends
TRACKER_S = 2.0  # for the process that removes the shared memory of a reward
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # numbers of prctl options of Linux


def main() -> None:
    """Runs the worker's main function in a child process, and ends with the exit status of the child.

    The child has the standard input and output of this process.
    """
    if sys.platform != "linux":
        worker_script.main(None)
        return
    heard = {LEAVE, signal.SIGCHLD}
    signal.signal(LEAVE, signal.SIG_DFL)  # nohup(1) has it ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, LEAVE, 0, 0, 0)
    reaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        worker_script.main(reaper)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # they are for the run itself
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (0, 1):  # the worker's end must be seen at the other end of its pipes
        os.close(descriptor)
    status = _wait(worker)
    processes.end_below(TRACKER_S)
    _end_like(status)


def _wait(worker: int) -> int:
    """Waits for the end of the worker or for the signal to end it. Returns its exit status, negative for a signal."""
    while True:
        number = signal.sigwait({LEAVE, signal.SIGCHLD})
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return os.waitstatus_to_exitcode(ended[1])
        if number == LEAVE:
            os.kill(worker, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _end_like(status: int) -> None:
    """Ends this process with the exit status of a child, or by the signal that killed the child."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(max(status, 0))
