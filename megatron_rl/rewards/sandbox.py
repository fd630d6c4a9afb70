"""Runs Python code that nobody has read, a program or one function of it, in a bubblewrap sandbox.

The code has no network, sees only Python and shared libraries of the machine's files, writes only to a small /tmp of
its own, sees no other process, and has limits on memory, time, processes, files and output. When its main process ends
or its time is over, the kernel kills all processes that the code started. docs/tools.md says how the sandbox is built,
what a machine must allow, and what is not kept out.

A run ends in one of three ways: the code ended (`Ran` without `why`), the code failed (`Ran.why`, a text that a model
can be told), or the sandbox failed (SandboxFailure, which must never become a reward of 0). Calls may come from many
threads and processes at a time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import math
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron_rl.rewards import sandbox_walls

START_TIMEOUT_S = 30.0  # time for a sandbox to start, and to end, on a busy machine
ERROR_BYTES = 1 << 20  # limit of standard error; more ends the code
KEPT_ERROR_BYTES = 4096  # of standard error, from its end
# The whole environment of the code. The fixed hash seed makes the order of a set of texts the same in every run.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each arena takes 64 MiB of the memory limit, used or not
}  # fmt: skip


class SandboxFailure(RuntimeError):
    """A sandbox could not be built, was lost, or did not answer. Nothing is known of the code in it."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Limits of what code in a sandbox may use."""

    timeout_s: float = 10.0  # wall-clock time, from the start of the code to its end
    memory_mib: int = 512  # of one process; /tmp is counted separately
    processes: int = 16  # processes and threads at a time, the first included
    scratch_mib: int = 32  # size of /tmp, which is in memory, and of the largest file
    open_files: int = 64
    output_bytes: int = 1 << 20  # limit of standard output; more ends the code
    packages: Sequence[str] = ()  # directories of modules beside the standard library that the code may import

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mib", "processes", "scratch_mib", "open_files", "output_bytes"):
            value = vars(self)[name]
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}: give a number above 0")


DEFAULTS = SandboxSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of code that ran in a sandbox."""

    output: str  # what a program printed, up to the limit; of a call: the repr of the returned value
    why: str = ""  # one line that says what went wrong: the last line of the traceback, or a limit; "": nothing
    late: bool = False  # the code was ended because its time was over
    cut: bool = False  # the code was ended because it printed more than the limit
    seconds: float  # from the start of the code to its end


def run_program(
    code: str,
    stdin: str = "",
    *,
    arguments: Sequence[str] = (),
    show_value: bool = False,
    settings: SandboxSettings = DEFAULTS,
) -> Ran:
    """Runs `code` as Python runs a file, with `stdin` as its standard input and `arguments` in sys.argv.

    With `show_value`, the value of a last expression is printed if the code printed nothing. Raises SandboxFailure.
    """
    require()
    return _run(code, stdin, settings, {"arguments": list(arguments), "show_value": show_value})


def call(
    code: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    name: str = "f",
    settings: SandboxSettings = DEFAULTS,
) -> Ran:
    """Runs `code` and calls its function `name`, or the method `name` of its class Solution, with plain values.

    A plain value is what a Python literal can be. What the code prints is thrown away. Raises SandboxFailure.
    """
    require()
    what = {"function": name, "values": list(arguments), "keywords": dict(keywords or {})}
    ran = _run(code, "", settings, what)
    if ran.why:
        return ran
    if not ran.output.startswith(("=", "!")):
        return Ran(output="", why=f"it ended without a value of {name}", seconds=ran.seconds)
    raised = ran.output[1:] if ran.output.startswith("!") else ""
    return Ran(output="" if raised else ran.output[1:], why=raised, seconds=ran.seconds)


@functools.cache  # remembers a success; a failure is tried again
def require() -> None:
    """Checks that this machine can build a sandbox. Raises SandboxFailure, which says what is missing."""
    try:
        ran = _run("import math, random\nprint(math.factorial(5))\n", "", SandboxSettings(timeout_s=20.0), {})
    except SandboxFailure as error:
        raise SandboxFailure(sandbox_walls.refusal(str(error))) from None
    if ran.output != "120\n":
        raise SandboxFailure(sandbox_walls.refusal(f"Python does not run in it: {ran.why}"))


def _request(code: str, settings: SandboxSettings, what: Mapping[str, Any]) -> bytes:
    """Returns what sandbox_inside.py reads: the code, how to run it, and its resource limits by name."""
    limits = {
        "RLIMIT_AS": settings.memory_mib << 20,
        "RLIMIT_CPU": math.ceil(settings.timeout_s) + 1,
        "RLIMIT_FSIZE": settings.scratch_mib << 20,
        "RLIMIT_NOFILE": settings.open_files,
        "RLIMIT_NPROC": settings.processes + 1,  # bubblewrap's own process counts, too
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    packages = [os.path.abspath(path) for path in settings.packages]
    usual = {"function": None, "show_value": False, "arguments": [], "values": [], "keywords": {}}
    return marshal.dumps({"code": code, "limits": limits, "packages": packages, **usual, **what})


def _run(code: str, stdin: str, settings: SandboxSettings, what: Mapping[str, Any]) -> Ran:
    """Starts a sandbox, has it run the code, and returns when all of its processes are gone."""
    with contextlib.ExitStack() as stack:
        output, errors = (stack.enter_context(tempfile.TemporaryFile("a+b", buffering=0)) for _ in range(2))
        passed = {
            "request": _file_of(_request(code, settings, what), stack),
            "seccomp": _file_of(sandbox_walls.call_filter(), stack),
        }
        info, passed["info"] = _pipe(stack)
        ready, passed["ready"] = _pipe(stack)
        passed["mapped"], mapped = _pipe(stack)
        fds = {name: file.fileno() for name, file in passed.items()}
        try:
            process = subprocess.Popen(
                sandbox_walls.command(settings.scratch_mib << 20, settings.packages, fds),
                stdin=_file_of(stdin.encode("utf-8", "replace"), stack),
                stdout=output,
                stderr=errors,
                pass_fds=list(fds.values()),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxFailure(f"no process could be started for it: {error}") from error
        stack.enter_context(process)
        stack.callback(process.kill)  # the end of bubblewrap is the end of the sandbox
        for file in passed.values():
            file.close()
        first = _let_in(info, mapped, stack)
        stands = first is not None and _readable(ready, START_TIMEOUT_S) and os.read(ready.fileno(), 16)
        begun = time.monotonic() if stands else None
        late = begun is not None and not _readable(_pidfd(process.pid, stack), settings.timeout_s)
        seconds = time.monotonic() - (begun or 0.0)
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            if not _readable(first, START_TIMEOUT_S):  # it becomes readable when the kernel has killed all
                raise SandboxFailure(f"its processes did not end within {START_TIMEOUT_S:g} s")
        status, told = process.wait(), _end_of(errors).splitlines()
        if begun is None:
            raise SandboxFailure(told[-1] if told else "it was lost before its code began")
        limits = {output: settings.output_bytes, errors: ERROR_BYTES}
        cut = next((most for file, most in limits.items() if _size(file) > most), None)
        output.seek(0)
        text = output.read(settings.output_bytes).decode("utf-8", "replace")
        if cut is not None:
            return Ran(output=text, why=f"more than {cut} bytes of output", cut=True, seconds=seconds)
        why = f"no answer within {settings.timeout_s:g} s" if late else _fault(status, told)
        return Ran(output=text, why=why, late=late, seconds=seconds)


def _let_in(info: IO[bytes], mapped: IO[bytes], stack: contextlib.ExitStack) -> int | None:
    """Waits for bubblewrap's report of the sandbox's first process, maps its users, and lets bubblewrap go on.

    Returns a pidfd of that process, whose end is the end of all others in the sandbox; None where bubblewrap failed.
    The first process waits until its users are mapped, so that its process id cannot belong to another process yet.
    """
    report = info.read()
    if not report:
        return None
    first = json.loads(report)["child-pid"]
    try:
        found = _pidfd(first, stack)
        sandbox_walls.map_users(first)
        mapped.write(b"1")
    except OSError as error:
        raise SandboxFailure(f"its users cannot be mapped: {error}") from error
    return found


def _fault(status: int, errors: Sequence[str]) -> str:
    """Returns the fault of code that ended with this exit status, in one line; "" without a fault.

    Raises SandboxFailure where a signal ended bubblewrap itself.
    """
    if status < 0:
        raise SandboxFailure("it was lost: something else than its code ended it")
    if status - 128 in signal.valid_signals():  # as shells count signals
        return f"it was killed ({signal.strsignal(status - 128)})"
    return "" if status == 0 else errors[-1].strip() if errors else f"it ended with status {status}"


def _readable(file: IO[bytes] | int, timeout_s: float) -> bool:
    """Waits until a pipe or a pidfd is readable. Returns whether it is."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _pidfd(process: int, stack: contextlib.ExitStack) -> int:
    found = os.pidfd_open(process)
    stack.callback(os.close, found)
    return found


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _end_of(file: IO[bytes]) -> str:
    """Returns the last characters of a file."""
    file.seek(max(0, _size(file) - KEPT_ERROR_BYTES))
    return file.read().decode("utf-8", "replace").strip()


def _file_of(data: bytes, stack: contextlib.ExitStack) -> IO[bytes]:
    """Returns a read-only file that holds `data`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return stack.enter_context(open(file.name, "rb", buffering=0))


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the two ends of a pipe, to be read and to be written."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))
