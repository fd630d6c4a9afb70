"""Limits how much freed memory malloc keeps instead of returning it to the operating system."""

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
M_ARENA_MAX = -8  # constant of glibc's mallopt
ARENAS = 2


def restart_without_thread_caches() -> None:
    """Restarts this program (exec, same process id and arguments) without malloc's per-thread caches. In the restarted
    program, this function returns without another restart. Call it first in a Python main program, before the program
    prints, opens files, or imports slow modules.

    glibc keeps up to seven freed blocks of each of 64 sizes per thread, and does not return their memory pages to the
    operating system. A driver process (rank 0) with twenty threads grew by 1.6 KiB per iteration with these caches and
    by 0.4 KiB without, while the memory in use stayed the same (docs/experiments/log.md). The cache size is read from
    GLIBC_TUNABLES when a program starts. Does nothing without glibc, under a debugger or profiler, in a child of
    multiprocessing, and if GLIBC_TUNABLES already sets the size.
    """
    # sys.monitoring is available from Python 3.12
    monitoring = vars(sys).get("monitoring")
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]
    watched = sys.gettrace() is not None or sys.getprofile() is not None or any(tools)
    arguments = sys.orig_argv[len(sys.orig_argv) - len(sys.argv[1:]) :]
    alone = multiprocessing.parent_process() is None and sys.argv[0] not in ("", "-", "-c")
    if os.environ.get(TUNABLES, "").endswith(NO_CACHES):
        give_caches_back()
    elif sys.executable and alone and arguments == sys.argv[1:] and not watched and _switch_caches_off():
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def started_without_thread_caches() -> Iterator[None]:
    """A context manager: programs that are started inside the `with` block have no per-thread malloc caches, unless
    GLIBC_TUNABLES already sets the cache size. These programs must call `give_caches_back`.
    """
    _switch_caches_off()
    try:
        yield
    finally:
        give_caches_back()


def give_caches_back() -> None:
    """Removes from GLIBC_TUNABLES the setting that turns off malloc's per-thread caches, so that programs that this
    process starts later (such as servers) have the caches again.
    """
    tunables = os.environ.get(TUNABLES, "")
    if tunables.endswith(NO_CACHES):
        rest = tunables.removesuffix(NO_CACHES).removesuffix(":")
        if rest:
            os.environ[TUNABLES] = rest
        else:
            del os.environ[TUNABLES]


def _switch_caches_off() -> bool:
    """Sets GLIBC_TUNABLES so that programs started from now on have no per-thread malloc caches. Returns True on
    success. Returns False, and sets nothing, if the C library is not glibc or GLIBC_TUNABLES already sets the cache
    size.
    """
    tunables = os.environ.get(TUNABLES, "")
    if platform.libc_ver()[0] != "glibc" or NO_CACHES.partition("=")[0] in tunables:
        return False
    os.environ[TUNABLES] = f"{tunables}:{NO_CACHES}" if tunables else NO_CACHES
    return True


def limit_arenas() -> None:
    """Limits malloc to two arenas for threads started from now on. Does nothing if the C library is not glibc, or if
    MALLOC_ARENA_MAX is set. Existing arenas (separate heaps of malloc) remain.

    The limit saves memory, because every arena keeps its freed pages, and glibc by default gives each new thread a
    separate arena (up to eight per core). Two arenas suffice: a run has about twenty threads, but few of them allocate
    at the same time.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def return_free_pages() -> None:
    """Collects reference cycles and returns whole free pages of malloc to the operating system, including pages between
    used pages. If the C library is not glibc, no pages are returned.

    Without these calls, the memory of the process would grow. Closed connections are reference cycles that hold
    buffers, and Python collects them rarely. Iterations allocate and free blocks of many sizes, so free pages lie
    between used pages, but malloc itself returns only pages at the end of its heap. The collection takes only
    milliseconds, because a run excludes the objects that exist before the first iteration from it (gc.freeze).
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
