"""The parent process of a reward worker, which kills all processes that the worker leaves behind.

A process that calls setsid leaves the worker's process group, and a process whose parent ends leaves the worker's
process tree. Such processes cannot be killed together with the worker. On Linux an orphan becomes a child of the reaper
(PR_SET_CHILD_SUBREAPER, prctl(2), which needs no privileges). The reaper kills all of its descendants, in any session,
when the worker ends, when the pool sends LEAVE, and when the process of the run is gone. It then ends with the exit
status of the worker.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

from megatron_rl.lib import processes
from megatron_rl.rewards import grading_worker as worker_script
from megatron_rl.run.parent_death import end_with_parent

# signal on which the reaper kills all descendants and ends; Linux sends it when the thread that started the reaper ends
LEAVE = signal.SIGHUP
TRACKER_S = 2.0  # time limit in seconds for multiprocessing's resource tracker to remove shared memory and end
PR_SET_CHILD_SUBREAPER = 36  # number of a prctl option of Linux


def main() -> None:
    """Runs the main function of a grading worker in a child process, kills the processes that the child leaves behind,
    and ends with the exit status of the child.

    The child inherits standard input and output. On systems other than Linux, the worker runs in this process.
    """
    if sys.platform != "linux":
        worker_script.main(None)
        return
    heard = {LEAVE, signal.SIGCHLD}
    signal.signal(LEAVE, signal.SIG_DFL)  # undoes nohup(1), which makes a process ignore this signal
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    end_with_parent(LEAVE, os.getppid())
    reaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        worker_script.main(reaper)
        return
    # These signals are ignored here, because the run itself handles them and then ends the reaper.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (0, 1):  # closes the socket here, so that only the worker has it open until the worker ends
        os.close(descriptor)
    status = _wait(worker)
    processes.end_below(TRACKER_S)
    _end_like(status)


def _wait(worker: int) -> int:
    """Waits until the worker process `worker` (a process id) ends. Kills the worker if this process gets the signal
    LEAVE.

    Returns the worker's exit status, or -N if signal N ended it.
    """
    while True:
        number = signal.sigwait({LEAVE, signal.SIGCHLD})
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return os.waitstatus_to_exitcode(ended[1])
        if number == LEAVE:
            os.kill(worker, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _end_like(status: int) -> None:
    """Ends this process in the way in which a child process ended. `status`: exit status of the child, or -N if signal
    N ended the child."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(max(status, 0))
