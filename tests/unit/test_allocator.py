"""Memory that is free within malloc's heap goes back to the system, threads share few heaps, and Arrow has none."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from megatron_rl.devices import allocator

ROOT = Path(__file__).parents[2]
# Starts threads that allocate at the same time, and prints the number of malloc's arenas.
ARENAS = """
import ctypes, threading
from megatron_rl.devices import allocator
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


# Prints what the program was started with, and whether malloc counts freed memory as in use.
STARTED = """
import ctypes, os, sys
from megatron_rl.devices import allocator
BEFORE
if sys.argv[1] == "leave":
    allocator.restart_without_thread_caches()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena 2 3 4 5 6 7 uordblks 9 10".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def kept():
    blocks = [libc.malloc(1000) for _ in range(20)]
    before = libc.mallinfo2().uordblks
    for block in blocks:
        libc.free(block)
    return 20 * 1008 - (before - libc.mallinfo2().uordblks) > 5000
if __name__ == "__main__":
    print(os.getpid(), kept(), os.environ.get(allocator.TUNABLES), *sys.argv[1:])
"""
HAS_CACHES = platform.libc_ver()[0] == "glibc" and hasattr(ctypes.CDLL(None), "mallinfo2")
caches = pytest.mark.skipif(not HAS_CACHES, reason="only glibc has such caches, and tells of them from 2.33 on")


def started(
    file: Path, *words: str, own: str | None = None, before: str = "", after: str = ""
) -> subprocess.Popen[str]:
    """Starts STARTED as a program of its own, with `own` as GLIBC_TUNABLES, and text in it and behind it."""
    file.write_text(STARTED.replace("BEFORE", before) + after)
    environment = {name: value for name, value in os.environ.items() if name != allocator.TUNABLES}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if own is None else {allocator.TUNABLES: own})
    return subprocess.Popen([sys.executable, str(file), *words], env=environment, stdout=subprocess.PIPE, text=True)


@caches
@pytest.mark.parametrize(
    ("word", "own", "kept"),
    [
        ("stay", None, True),
        ("leave", None, False),
        ("leave", "glibc.malloc.arena_max=3", False),
        ("leave", "glibc.malloc.tcache_count=7", True),
    ],
)
def test_a_program_begins_again_without_the_caches_of_threads_unless_its_user_chose_them(tmp_path, word, own, kept):
    with started(tmp_path / "program.py", word, "two words", own=own) as child:
        said = child.communicate()[0]
    assert said == f"{child.pid} {kept} {own} {word} two words\n", "the same process, and nothing for those under it"


@caches
@pytest.mark.parametrize(
    "before", ["sys.settrace(lambda *_: None)", "sys.argv[1:] = ['leave']", "sys.executable = ''"],
    ids=["debugger", "other arguments than Python was started with", "no interpreter"],
)  # fmt: skip
def test_a_program_that_could_not_begin_again_as_it_began_goes_on(tmp_path, before):
    with started(tmp_path / "program.py", "leave", "x", before=before) as child:
        said = child.communicate()[0].split()
    assert said[:3] == [str(child.pid), "True", "None"]


@caches
def test_a_program_without_outputs_begins_again(tmp_path):
    before = "sys.stdout = sys.stderr = None"
    after = "\n    open(sys.argv[2], 'w').write(str(kept()))\n"
    with started(tmp_path / "program.py", "leave", str(tmp_path / "said"), before=before, after=after) as child:
        child.communicate()
    assert (tmp_path / "said").read_text() == "False"


@caches
@pytest.mark.parametrize("own", [None, "glibc.malloc.arena_max=3"])
def test_children_that_are_started_without_caches_give_them_back_to_theirs(tmp_path, own):
    before = "\n".join(
        ["import multiprocessing", "def tell(queue):", "    allocator.give_caches_back()",
         "    queue.put((kept(), os.environ.get(allocator.TUNABLES)))"]
    )  # fmt: skip
    after = "\n".join(
        ["    context = multiprocessing.get_context('spawn')", "    queue = context.Queue()",
         "    one = context.Process(target=tell, args=(queue,))",
         "    with allocator.started_without_thread_caches():", "        one.start()",
         "    print(*queue.get(), os.environ.get(allocator.TUNABLES))", "    one.join()"]
    )  # fmt: skip
    with started(tmp_path / "program.py", "stay", own=own, before=before, after=after + "\n") as child:
        said = child.communicate()[0].splitlines()
    assert said[1] == f"False {own} {own}"


@caches
@pytest.mark.parametrize("program", [["-m", "megatron_rl"], ["-m", "megatron_rl.main"]])
def test_the_command_begins_again_and_says_its_first_line_once(tmp_path, program):
    """A module on the path says whether Python was started by that very command line, and with what."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nopen(os.environ['STARTS'], 'a').write(str(os.environ.get('GLIBC_TUNABLES')) + '\\n')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != allocator.TUNABLES}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "STARTS": str(tmp_path / "starts")}
    words = [sys.executable, *program, "train", "absent.yaml"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.count("reading absent.yaml") == 1, done.stdout + done.stderr
    assert (tmp_path / "starts").read_text().splitlines() == ["None", allocator.NO_CACHES]
