"""Keeps what malloc holds beyond the memory in use small."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys

TUNABLES, NO_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
AGAIN = "megatron_rl_again"  # an option -X, which Python passes on to nobody
M_ARENA_MAX = -8  # number of an option of glibc's mallopt
ARENAS = 2


def leave_thread_caches() -> None:
    """Starts this program anew, as the same process, without malloc's cache for each thread. Call it before anything is
    printed, opened or imported that takes time. In the program that was started anew it returns.

    glibc keeps up to seven freed blocks of each of 64 sizes for each thread, and returns no page that they lie in. A
    driver with twenty threads grew by 1.6 KiB a turn with them and by 0.4 without, while it held nothing more
    (docs/log.md). The number of blocks is read from GLIBC_TUNABLES when a program starts. It is taken out again, so
    that servers and other programs that this one starts have their caches. Without glibc, under a debugger or a
    profiler, and where GLIBC_TUNABLES gives that number itself, nothing happens.
    """
    own = os.environ.get(TUNABLES, "")
    if AGAIN in sys._xoptions:
        rest = own.removesuffix(NO_CACHES).removesuffix(":")
        os.environ.update({TUNABLES: rest}) if rest else os.environ.pop(TUNABLES, None)
        return
    watched = sys.gettrace() is not None or sys.getprofile() is not None
    if watched or platform.libc_ver()[0] != "glibc" or NO_CACHES.partition("=")[0] in own:
        return
    os.environ[TUNABLES] = f"{own}:{NO_CACHES}" if own else NO_CACHES
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, "-X", AGAIN, *sys.orig_argv[1:]])


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
