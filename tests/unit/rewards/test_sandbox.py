"""The sandbox: what hostile code tries and does not reach, what honest code can do, and the three ways to end.

Tests that run code are skipped, with the reason, where no sandbox can be built.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sandbox_runs
from sandbox_runs import marked, run

from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import SandboxSettings

ROOT = Path(__file__).parents[3]
built, mark = sandbox_runs.built, sandbox_runs.mark  # fixtures


# A program that does harm runs only when it is somewhere else: these tests run as root, too.
GUARD = "import os\nassert os.getpid() == 2 and os.getuid() == 65534 and not os.path.exists('/proc')\n"


def test_a_fork_bomb_ends_with_the_program(built):
    ran = run(
        GUARD + "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 1000:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        made += 1\n"
        "except OSError as error:\n"
        "    print(made, type(error).__name__)\n",
        processes=8,
    )
    made, error = ran.output.split()
    assert 1 <= int(made) <= 8 and error == "BlockingIOError"


SURVIVOR = (
    GUARD + "import os, signal, sys, time\n"
    "for number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        if len(sys.argv) > 1: os.closerange(0, 64)\n"
    "        time.sleep(60)\n"
    "    os._exit(0)\n"
)


@pytest.mark.parametrize("arguments", [(), ("closed",)], ids=["holds the pipes", "closed them"])
def test_a_process_that_forked_twice_does_not_outlive_the_program(built, mark, arguments):
    start = time.monotonic()
    ran = run(SURVIVOR + "print('gone')\n", arguments=arguments)
    assert ran.output == "gone\n" and not ran.why and time.monotonic() - start < 8
    assert not marked(mark)


def test_neither_does_it_outlive_the_time_limit(built, mark):
    ran = run(SURVIVOR + "print('not seen')\nwhile True: time.sleep(1)\n", timeout_s=0.4)
    assert ran.late and "no answer within 0.4 s" in ran.why and 0.4 <= ran.seconds < 5
    assert not marked(mark)


def test_nothing_of_the_machine_can_be_written_or_deleted(built, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("secret")
    library = Path(os.__file__)
    places = [
        str(tmp_path / "new"),
        str(kept),
        "/etc/new",
        "/new",
        "/usr/new",
        str(library),
        "/dev/new",
        str(ROOT / "new"),
    ]
    ran = run(
        GUARD + "import os, shutil, sys\n"
        "done = []\n"
        "def attempt(what, *given):\n"
        "    try:\n"
        "        what(*given)\n"
        "        done.append((what.__name__, given))\n"
        "    except OSError: pass\n"
        "for place in sys.argv[1:]:\n"
        "    attempt(open, place, 'a')\n"
        "    attempt(os.remove, place)\n"
        "    attempt(os.rename, place, place + '2')\n"
        "    attempt(os.chmod, place, 0o777)\n"
        "    attempt(os.truncate, place, 0)\n"
        "    os.symlink(place, '/tmp/link')\n"
        "    attempt(open, '/tmp/link', 'a')\n"
        "    attempt(os.link, place, '/tmp/hard')\n"
        "    os.remove('/tmp/link')\n"
        "attempt(os.chmod, '/dev/null', 0)\n"
        "attempt(os.chroot, '/tmp')\n"
        "attempt(os.mknod, '/tmp/disk', 0o60666, os.makedev(254, 0))\n"
        "shutil.rmtree(os.path.dirname(os.__file__) + '/json', ignore_errors=True)\n"
        "print(done)\n",
        arguments=places,
    )
    assert ran.output == "[]\n", ran
    assert kept.read_text() == "secret" and library.stat().st_size > 0 and Path(json.__file__).exists()
    assert not any(Path(place).exists() for place in places if place.endswith("new"))


def test_files_of_the_machine_cannot_be_read_and_tmp_is_empty_small_and_new(built, tmp_path):
    (tmp_path / "secret").write_text("secret")
    code = (
        "import os, sys\n"
        "print(os.listdir('/tmp'), os.getcwd(), sorted(set(os.listdir('/')) & {'home', 'proc', 'sys', 'var', 'etc'}))\n"
        "for place in sys.argv[1:]:\n"
        "    try: print(open(place).read())\n"
        "    except OSError as error: print(type(error).__name__)\n"
        "open('/tmp/own', 'w').write('x' * 1000)\n"
        "try:\n"
        "    for i in range(8):\n"
        "        with open(f'/tmp/{i}', 'w') as file: file.write('x' * (1 << 20))\n"
        "except OSError as error: print(i, os.strerror(error.errno))\n"
    )
    for _ in range(2):
        ran = run(code, arguments=[str(tmp_path / "secret"), "/etc/passwd", str(ROOT / "README.md")], scratch_mib=4)
        first, *read, full = ran.output.splitlines()
        assert first.startswith("[] /tmp ") and "proc" not in first and "home" not in first and "var" not in first
        assert read == ["FileNotFoundError"] * 3 and full.endswith("No space left on device"), ran


def test_the_environment_and_other_processes_are_out_of_sight(built, monkeypatch):
    secret = uuid.uuid4().hex
    monkeypatch.setenv("SECRET_TOKEN", secret)
    ran = run(
        "import glob, os, sys\n"
        "found = [open(place, 'rb').read() for place in glob.glob('/proc/*/environ')]\n"
        "print(dict(os.environ), found, os.getpid(), os.getppid(), os.getuid(), os.path.exists('/proc/1'))\n"
    )
    assert not ran.why and secret not in ran.output and str(ROOT) not in ran.output
    assert ran.output.split("}")[1].split()[1:] == ["2", "1", "65534", "False"], ran.output


def test_no_socket_leads_out(built):
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        name = f"\0{uuid.uuid4().hex}"
        unix.bind(name)
        unix.listen()
        inet.settimeout(0.1)
        ran = run(
            "import socket, sys\n"
            "def attempt(family, address, kind=socket.SOCK_STREAM):\n"
            "    try:\n"
            "        with socket.socket(family, kind) as s:\n"
            "            s.settimeout(2)\n"
            "            s.connect(address)\n"
            "        print('reached', address)\n"
            "    except OSError as error: print(type(error).__name__)\n"
            "attempt(socket.AF_INET, ('127.0.0.1', int(sys.argv[1])))\n"
            "attempt(socket.AF_INET, ('10.0.0.1', 80))\n"
            "attempt(socket.AF_INET, ('8.8.8.8', 53), socket.SOCK_DGRAM)\n"
            "attempt(socket.AF_UNIX, '\\0' + sys.argv[2])\n"
            "attempt(socket.AF_UNIX, '/run/docker.sock')\n"
            "attempt(40, (2, 1024))\n"  # vsock, which leads out of virtual machines and knows no namespaces
            "try: print('reached', socket.getaddrinfo('example.com', 80))\n"
            "except OSError as error: print(type(error).__name__)\n",
            arguments=[str(inet.getsockname()[1]), name[1:]],
        )
        assert "reached" not in ran.output and not ran.why and len(ran.output.split()) == 7, ran
        with pytest.raises(TimeoutError):
            inet.accept()


def test_the_c_library_reaches_no_further(built):
    """Every call that leads out is refused by the kernel, not by Python."""
    keys, clone = (250, 56) if os.uname().machine == "x86_64" else (219, 220)
    ran = run(
        GUARD + "import ctypes, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "keys, clone = map(int, sys.argv[1:])\n"
        "calls = dict(\n"
        "    users=libc.unshare(0x10000000), mounts=libc.unshare(0x20000),\n"
        "    mount=libc.mount(b'proc', b'/tmp', b'proc', 0, None), root=libc.chroot(b'/tmp'),\n"
        "    trace=libc.ptrace(16, 1, 0, 0), vsock=libc.socket(40, 1, 0), packets=libc.socket(17, 3, 0),\n"
        "    rings=libc.syscall(425, 8, ctypes.create_string_buffer(256)),\n"
        "    descriptors=libc.syscall(438, libc.syscall(434, 1, 0), 0, 0),\n"
        "    keys=libc.syscall(keys, 0, -3, 0, 0, 0), user=libc.setuid(0), name=libc.sethostname(b'x', 1),\n"
        "    cloned=libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0))\n"
        "print([name for name, result in calls.items() if result != -1])\n",
        arguments=[str(keys), str(clone)],
    )
    assert ran.output == "[]\n", ran


def test_faults_memory_that_no_limit_of_a_process_counts_is_refused(built):
    """Files in memory, System V's shared memory, queues and semaphores, and POSIX message queues."""
    x86 = os.uname().machine == "x86_64"
    ran = run(
        GUARD + "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "shm, queue, semaphores, posix, memory = map(int, sys.argv[1:])\n"
        "calls = dict(\n"
        "    shm=libc.syscall(shm, 0, 1 << 20, 0o1600), queue=libc.syscall(queue, 0, 0o1600),\n"
        "    semaphores=libc.syscall(semaphores, 0, 1, 0o1600), posix=libc.syscall(posix, b'q', 0o102, 0o600, 0),\n"
        "    memory=libc.syscall(memory, b'm', 0), secret=libc.syscall(447, 0))\n"
        "print([name for name, result in calls.items() if result != -1 or ctypes.get_errno() != 1])\n"
        "try: print(os.memfd_create('m'))\n"
        "except PermissionError: print('refused')\n"
        "from multiprocessing import shared_memory\n"  # lies in /tmp, whose size is limited
        "honest = shared_memory.SharedMemory('own', create=True, size=4096)\n"
        "honest.unlink()\n",
        arguments=[str(n) for n in ((29, 68, 64, 240, 319) if x86 else (194, 186, 190, 180, 279))],
    )
    assert ran.output == "[]\nrefused\n" and not ran.why, ran


def test_signals_stay_inside(built):
    ran = run(
        GUARD + "import os, signal, sys, time\n"
        "out = []\n"
        "for target in (int(sys.argv[1]), 1):\n"
        "    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):\n"
        "        try: os.kill(target, number)\n"
        "        except OSError as error: out.append(type(error).__name__)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.killpg(0, signal.SIGTERM)\n"
        "try: os.kill(-1, signal.SIGKILL)\n"
        "except ProcessLookupError: pass\n"
        "print('alive', set(out) <= {'ProcessLookupError', 'PermissionError'})\n",
        arguments=[str(os.getpid())],
    )
    assert ran.output == "alive True\n" and not ran.why, ran


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(built, stream):
    start = time.monotonic()
    ran = run(f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})", output_bytes=50_000)
    most = 50_000 if stream == "stdout" else 1 << 20
    assert ran.cut and ran.why == f"more than {most} bytes of output" and time.monotonic() - start < 8
    assert len(ran.output) == (50_000 if stream == "stdout" else 0)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("bytearray(4 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("raise ValueError('of its own')", "ValueError: of its own"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", "it ended with status 3"),
        ("import sys; sys.exit('no luck')", "no luck"),
        ("import os; os._exit(9)", "it ended with status 9"),
        ("import os; os.abort()", "it was killed (Aborted)"),
        ("import ctypes; ctypes.string_at(0)", "it was killed (Segmentation fault)"),
        ("x = [open('/dev/null') for _ in range(100)]", "OSError: [Errno 24] Too many open files: '/dev/null'"),
        ("\0", "source code string cannot contain null bytes"),
        ("print('\ud800')", "UnicodeEncodeError"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
    ],
)
def test_faults_of_the_code_are_told_in_a_line(built, code, why):
    ran = run(code)
    assert why in ran.why and not ran.output and not ran.late, ran


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "input()\nwhile True: pass"])
def test_the_time_limit(built, code):
    ran = run(code, "a line\n", timeout_s=0.3)
    assert ran.late and ran.why == "no answer within 0.3 s"


# Honest programs

HONEST = """
from __future__ import annotations
import bisect, collections, dataclasses, datetime, decimal, fractions, heapq, itertools, json, math, random, re, sys
import statistics, string, tempfile, threading, subprocess
from concurrent.futures import ThreadPoolExecutor

@dataclasses.dataclass
class Point:
    x: int
    y: int = 2

def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)

sys.setrecursionlimit(20000)
first, *rest = sys.stdin.read().split()
print(json.dumps({"first": first, "rest": rest, "arguments": sys.argv[1:]}))
print(fractions.Fraction(1, 3) + fractions.Fraction(1, 6), math.comb(10, 3), collections.Counter("aab").most_common(1))
print(list(itertools.accumulate([1, 2, 3])), depth(10000), dataclasses.asdict(Point(1)))
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("kept")
    file.seek(0)
    print(file.read(), list(ThreadPoolExecutor(3).map(abs, [-1, -2])))
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout.strip(), __name__)
for i in range(100):
    print(i)
"""


def test_honest_programs_work(built):
    ran = run(HONEST, "ä 2 3\n", arguments=["one", "two"])
    assert not ran.why and not ran.cut
    lines = ran.output.splitlines()
    assert json.loads(lines[0]) == {"first": "ä", "rest": ["2", "3"], "arguments": ["one", "two"]}
    assert lines[1:6] == [
        "1/2 120 [('a', 2)]",
        "[1, 3, 6] 10000 {'x': 1, 'y': 2}",
        "kept [1, 2]",
        "child __main__",
        "0",
    ]
    assert lines[5:] == [str(i) for i in range(100)]


def test_the_order_of_a_set_is_the_same_in_every_run(built):
    code = "print({str(i) for i in range(50)})"
    assert len({run(code).output for _ in range(3)}) == 1


def test_packages_are_shown_when_asked_for(built):
    with tempfile.TemporaryDirectory() as place:  # tmp_path belongs to root alone, and code is the user nobody
        os.chmod(place, 0o755)
        Path(place, "mine.py").write_text("value = 7\n")
        assert run("import mine; print(mine.value)", packages=(place,)).output == "7\n"


def test_a_function_is_called_with_plain_values(built):
    code = (
        "import collections\ndef f(x, *, n=1):\n    print('noise')\n    return collections.Counter(x), (n, 1.5, None)"
    )
    ran = sandbox.call(code, ["aa"], {"n": {1, 2}})
    assert (ran.why, ran.output) == ("", "(Counter({'a': 2}), ({1, 2}, 1.5, None))")
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert sandbox.call(method, [[1], [2]], name="add").output == "[1, 2]"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "it ended without a value of f"),
        ("return 'x' * 100_000", "more than 9000 bytes of output"),
        ("pass\ndel f", "the code has no function f"),
    ],
)
def test_a_function_that_gives_no_value(built, body, why):
    ran = sandbox.call(f"def f():\n    {body}\n", [], settings=SandboxSettings(output_bytes=9000))
    assert why in ran.why and ran.output == ("" if "more" not in why else ran.output)


def test_many_at_a_time_from_threads(built):
    def square(i):
        return run("n = int(input())\nprint(n * n)", f"{i}\n", timeout_s=30.0).output

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(square, range(12))) == [f"{i * i}\n" for i in range(12)]
