"""Shifts the wall clock of every Python process that has this directory on its path, by as many seconds as a file says.

The file, which SOAK_CLOCK names, holds one float64 and may be rewritten at any time. The monotonic clock stays as it
is, as it does where an administrator sets the clock of a host.
"""

import mmap
import os
import struct
import time

FILE = "SOAK_CLOCK"


def shift(name: str) -> None:
    """Has time.time and time.time_ns tell the time of a clock that is wrong by the seconds in the file."""
    with open(name, "rb") as file:
        seconds = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    true_s, true_ns = time.time, time.time_ns
    time.time = lambda: true_s() + struct.unpack("<d", seconds[:8])[0]
    time.time_ns = lambda: true_ns() + int(struct.unpack("<d", seconds[:8])[0] * 1e9)


if FILE in os.environ:
    shift(os.environ[FILE])
