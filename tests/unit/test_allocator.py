"""Memory that is free within malloc's heap goes back to the system, threads share few heaps, and Arrow has none."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from megatron_rl import allocator

# Starts threads that allocate at the same time, and prints the number of malloc's arenas.
ARENAS = """
import ctypes, threading
from megatron_rl import allocator
allocator.limit_arenas()
together = threading.Barrier(8)
def allocate():
    together.wait()
    blocks = [bytearray(10_000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""
BLOCK, COUNT, KEPT = 24_000, 4_000, 50  # 96 MB of blocks as malloc keeps them in its heap, each fiftieth of them stays


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps free pages so")
def test_free_pages_between_used_ones_go_back():
    blocks = [bytearray(b"x" * BLOCK) for _ in range(COUNT)]
    full = anonymous_mib()
    blocks = blocks[KEPT - 1 :: KEPT]  # the last one stays, so that the heap cannot shrink at its end
    held = full - anonymous_mib()
    allocator.return_free_pages()
    assert full - anonymous_mib() > held + 40, "most of 96 MB, which malloc had not returned"
    assert len(blocks) == COUNT // KEPT


def test_what_only_refers_to_itself_is_freed():
    class Loop:
        def __init__(self) -> None:
            self.own = self

    gc.disable()
    try:
        gone = weakref.ref(Loop())
        assert gone() is not None
        allocator.return_free_pages()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
@pytest.mark.parametrize(("given", "wanted"), [(None, allocator.ARENAS), ("4", 4)])
def test_threads_share_two_arenas_unless_the_environment_says_how_many(given, wanted):
    own = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    own |= {"MALLOC_ARENA_MAX": given} if given else {}
    told = subprocess.run([sys.executable, "-c", ARENAS], env=own, capture_output=True, text=True, check=True).stdout
    assert told.count("<heap nr=") == wanted


def test_arrow_takes_the_memory_of_a_run_from_malloc():
    """Its default pool in C++, which readers and writers of Parquet take: Python's setting does not change that one."""
    own = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    script = (
        "from megatron_rl.main import main; status = main(['train', 'absent.yaml']); import pyarrow; "
        "print(status, pyarrow.default_memory_pool().backend_name)"
    )
    told = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "2 system"


# Prints what the program was started with, and how much freed memory malloc still counts as in use.
STARTED = """
import ctypes, os, sys
from megatron_rl import allocator
if sys.argv[1] == "leave":
    allocator.leave_thread_caches()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena 2 3 4 5 6 7 uordblks 9 10".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = libc.mallinfo2().uordblks
for block in [libc.malloc(1000) for _ in range(7)]:
    libc.free(block)
kept = libc.mallinfo2().uordblks - before
print(os.getpid(), kept > 5000, os.environ.get(allocator.TUNABLES), *sys.argv[1:])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has such caches")
@pytest.mark.parametrize(
    ("word", "own", "kept"),
    [
        ("stay", None, True),
        ("leave", None, False),
        ("leave", "glibc.malloc.arena_max=3", False),
        ("leave", "glibc.malloc.tcache_count=7", True),
    ],
)
def test_a_program_starts_anew_without_the_caches_of_threads_unless_its_user_chose_them(word, own, kept):
    environment = {name: value for name, value in os.environ.items() if name != allocator.TUNABLES}
    environment |= {} if own is None else {allocator.TUNABLES: own}
    words = [sys.executable, "-c", STARTED, word, "two words"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as child:
        said = child.communicate()[0]
    assert said == f"{child.pid} {kept} {own} {word} two words\n", "the same process, and nothing for those under it"


def test_a_program_under_a_debugger_is_not_started_anew():
    debugged = "import sys\nsys.settrace(lambda *_: None)\n" + STARTED
    done = subprocess.run([sys.executable, "-c", debugged, "leave"], capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["True", "None", "leave"], done.stderr
