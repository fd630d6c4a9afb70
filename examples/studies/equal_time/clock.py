"""The CPU-seconds of a run: what arms are compared by, because other work on a machine disturbs them little."""

from __future__ import annotations

import contextlib

import psutil


def cpu_seconds(pid: int) -> float:
    """Returns the CPU-seconds that a process and its descendants have taken, with those of children that ended."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
    return total
