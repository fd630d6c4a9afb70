"""Keeps what malloc holds beyond the memory in use small."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator

TUNABLES, NO_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
M_ARENA_MAX = -8  # number of an option of glibc's mallopt
ARENAS = 2


def restart_without_thread_caches() -> None:
    """Replaces this program by itself, as the same process with the same arguments, without malloc's cache for each
    thread. In the program that begins again it returns. Call it before anything is printed, opened or imported that
    takes time, from a program that Python was started to run.

    glibc keeps up to seven freed blocks of each of 64 sizes for each thread, and returns no page that they lie in. A
    driver with twenty threads grew by 1.6 KiB an iteration with them and by 0.4 without, while it held nothing more
    (docs/log.md). The number of blocks is read from GLIBC_TUNABLES when a program starts. Without glibc, under a
    debugger or a profiler, in a child of multiprocessing, and where GLIBC_TUNABLES gives that number already, nothing
    happens.
    """
    own = os.environ.get(TUNABLES, "")
    if own.endswith(NO_CACHES):
        give_caches_back()
    elif not (_is_watched() or NO_CACHES.partition("=")[0] in own or not _is_program()):
        os.environ[TUNABLES] = f"{own}:{NO_CACHES}" if own else NO_CACHES
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def started_without_thread_caches() -> Iterator[None]:
    """Programs that are started in the block have no caches of threads, unless GLIBC_TUNABLES says how many. They call
    `give_caches_back`."""
    own = os.environ.get(TUNABLES, "")
    if platform.libc_ver()[0] == "glibc" and NO_CACHES.partition("=")[0] not in own:
        os.environ[TUNABLES] = f"{own}:{NO_CACHES}" if own else NO_CACHES
    try:
        yield
    finally:
        give_caches_back()


def give_caches_back() -> None:
    """Takes what this module has put into the environment out again: servers and other programs that this one starts
    have malloc's caches of threads."""
    own = os.environ.get(TUNABLES, "")
    if own.endswith(NO_CACHES):
        rest = own.removesuffix(NO_CACHES).removesuffix(":")
        if rest:
            os.environ[TUNABLES] = rest
        else:
            del os.environ[TUNABLES]


def _is_program() -> bool:
    """Returns whether Python was started to run this program, with glibc, and can be started so again."""
    asked = sys.orig_argv[len(sys.orig_argv) - len(sys.argv[1:]) :] == sys.argv[1:]
    alone = multiprocessing.parent_process() is None and sys.argv[0] not in ("", "-", "-c")
    return bool(sys.executable) and platform.libc_ver()[0] == "glibc" and asked and alone


def _is_watched() -> bool:
    """Returns whether a debugger or a profiler watches this process."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


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

    Closed connections are such objects. Python looks for them rarely, and they hold buffers. Iterations allocate and
    free blocks of many sizes, so that free pages lie between used ones. By itself malloc returns those at the end of
    its heap alone, and a process grows by the others. Before its first iteration a run freezes what is there, so that
    the look takes milliseconds.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
