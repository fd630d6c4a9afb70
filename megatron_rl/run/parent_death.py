"""Ends a process when the one that started it is gone, however that came."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # number of a prctl option of Linux
_LIBC = ctypes.CDLL(None)  # looked up here: a process that was just forked of one with threads should load nothing


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Has Linux send this process a signal when the thread that started it ends; elsewhere it does nothing.

    It is called in the new process. `parent` is the process that started it: where that is gone already, the signal
    comes at once. A program that is started in this process's place keeps the setting.
    """
    if sys.platform != "linux":
        return
    _LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
