"""Keeps what malloc holds beyond the memory in use small."""

from __future__ import annotations

import ctypes
import gc
import os
import platform

M_ARENA_MAX = -8  # number of an option of glibc's mallopt
ARENAS = 2


def limit_arenas() -> None:
    """Has the threads that this process starts from now on share two of malloc's arenas. Without glibc, or where
    MALLOC_ARENA_MAX says how many there are, nothing happens. Arenas that exist stay.

    glibc gives each new thread an arena of its own, up to eight for each core, and every one keeps pages that were
    freed in it. A run has some twenty threads, of which few allocate at the same time.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def return_free_pages() -> None:
    """Frees objects that only refer to each other, and returns whole pages that malloc keeps for later, also those
    between pages in use. Without glibc no page is returned.

    Closed connections are such objects. Python looks for them rarely, and they hold buffers. Turns allocate and free
    blocks of many sizes, so that free pages lie between used ones. By itself malloc returns those at the end of its
    heap alone, and a process grows by the others. Before its first turn a run freezes what is there, so that the look
    takes milliseconds.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
