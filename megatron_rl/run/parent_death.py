"""Ends a process when its parent process ends for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # id of the prctl option of Linux
# The C library is loaded at import: a process that was just forked from a process with threads should load no library.
_LIBC = ctypes.CDLL(None)


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Makes Linux send this process the signal `number` when the thread that started it ends. No-op on other systems.

    The function is called in the new process. `parent`: process id of the parent; if the parent has ended already, the
    signal is sent at once. The setting survives exec.
    """
    if sys.platform != "linux":
        return
    _LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
