"""Runs untrusted Python code, a program or one of its functions, in a bubblewrap sandbox.

The code has no network access. Of the machine's files it only sees Python and shared libraries, and it can only write
to a small private /tmp. It sees no other process, and has limits on memory, time, processes, files and output. When its
main process ends or its time is over, the kernel kills all processes that the code started. docs/how_to/tools.md
describes how the sandbox is built, what the machine must allow, and what the sandbox does not protect against.

A run has one of three results: the code ended (`Ran` with an empty `why`), the code failed (`Ran.why` is a message that
can be shown to a model), or the sandbox failed (SandboxFailure, which must never become a reward of 0). The functions
may be called from many threads and processes concurrently.
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

# Time limit in seconds for the start of a sandbox, and for the end of a sandbox after the code has ended.
# The limit is long enough for a busy machine.
START_TIMEOUT_S = 30.0
ERROR_BYTES = 1 << 20  # limit in bytes of standard error; the code is ended if it prints more
KEPT_ERROR_BYTES = 4096  # only this many bytes from the end of standard error are stored
# All environment variables that the sandboxed code gets.
# The fixed hash seed makes the iteration order of a set of strings the same in every run.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # one malloc arena, because each arena reserves 64 MiB of the memory limit
}  # fmt: skip


class SandboxFailure(RuntimeError):
    """Raised when a sandbox cannot be built, ends unexpectedly, or does not respond. The result of the code is then
    unknown."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """The resource limits of the code that runs in a sandbox."""

    timeout_s: float = 10.0  # wall-clock time limit in seconds, from the start of the code to its end
    memory_mib: int = 512  # memory limit in MiB of one process, not counting files in /tmp
    processes: int = 16  # maximum number of concurrent processes and threads, including the first
    scratch_mib: int = 32  # size in MiB of /tmp, which is held in memory; also the maximum size of a file
    open_files: int = 64
    output_bytes: int = 1 << 20  # limit in bytes of standard output; the code is ended if it prints more
    packages: Sequence[str] = ()  # directories of modules that the code may import, besides the standard library

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mib", "processes", "scratch_mib", "open_files", "output_bytes"):
            value = vars(self)[name]
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}: give a number above 0")


DEFAULTS = SandboxSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of code that ran in a sandbox."""

    output: str  # the text that a program printed, up to the limit; for a function call, the repr of the returned value
    why: str = ""  # error message of one line, such as the last line of the traceback; empty if there was no error
    late: bool = False  # whether the code was ended because its time was over
    cut: bool = False  # whether the code was ended because it printed more than the limit
    seconds: float  # seconds from the start of the code to its end


def run_program(
    code: str,
    stdin: str = "",
    *,
    arguments: Sequence[str] = (),
    show_value: bool = False,
    settings: SandboxSettings = DEFAULTS,
) -> Ran:
    """Runs `code` as a Python script, with `stdin` as its standard input and `arguments` in sys.argv.

    With `show_value`, the value of the script's last expression is printed if the script printed nothing. Raises
    SandboxFailure if the sandbox could not run the code.
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
    """Runs `code` and calls its function `name`, or the method `name` of its class Solution.

    The arguments and keyword arguments are values that can be written as Python literals. Printed text is discarded.
    Raises SandboxFailure if the sandbox could not run the code.
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


@functools.cache  # a successful check is not repeated; a failed check raises an error, which is not cached
def require() -> None:
    """Checks that this machine can build a sandbox. Otherwise raises SandboxFailure with the cause and a remedy."""
    try:
        ran = _run("import math, random\nprint(math.factorial(5))\n", "", SandboxSettings(timeout_s=20.0), {})
    except SandboxFailure as error:
        raise SandboxFailure(sandbox_walls.refusal(str(error))) from None
    if ran.output != "120\n":
        raise SandboxFailure(sandbox_walls.refusal(f"Python does not run in it: {ran.why}"))


def _request(code: str, settings: SandboxSettings, what: Mapping[str, Any]) -> bytes:
    """Returns the marshalled request for sandbox_inside.py: the code, how to run it, and resource limits by name."""
    limits = {
        "RLIMIT_AS": settings.memory_mib << 20,
        "RLIMIT_CPU": math.ceil(settings.timeout_s) + 1,
        "RLIMIT_FSIZE": settings.scratch_mib << 20,
        "RLIMIT_NOFILE": settings.open_files,
        "RLIMIT_NPROC": settings.processes + 1,  # one more, because the process of bubblewrap also counts
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    packages = [os.path.abspath(path) for path in settings.packages]
    usual = {"function": None, "show_value": False, "arguments": [], "values": [], "keywords": {}}
    return marshal.dumps({"code": code, "limits": limits, "packages": packages, **usual, **what})


def _run(code: str, stdin: str, settings: SandboxSettings, what: Mapping[str, Any]) -> Ran:
    """Runs the code in a new sandbox, and returns when all processes of the sandbox have ended. `what`: items of the
    request to sandbox_inside.py, such as the function to call, that override the defaults of `_request`."""
    with contextlib.ExitStack() as stack:
        output, errors = (stack.enter_context(tempfile.TemporaryFile("a+b", buffering=0)) for _ in range(2))
        passed = {"request": _file_of(_request(code, settings, what), stack)}
        passed["seccomp"] = _file_of(sandbox_walls.call_filter(), stack)
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
        stack.callback(process.kill)  # when bubblewrap ends, the sandbox ends
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
            # the pidfd is readable when the kernel has killed all processes of the sandbox
            if not _readable(first, START_TIMEOUT_S):
                raise SandboxFailure(f"its processes did not end within {START_TIMEOUT_S:g} s")
        status = process.wait()
        error_lines = _text(errors, max(0, _size(errors) - KEPT_ERROR_BYTES), KEPT_ERROR_BYTES).strip().splitlines()
        if begun is None:
            raise SandboxFailure(error_lines[-1] if error_lines else "it was lost before its code began")
        limits = ((output, settings.output_bytes), (errors, ERROR_BYTES))
        cut = next((most for file, most in limits if _size(file) > most), None)
        text = _text(output, 0, settings.output_bytes)
        if cut is not None:
            return Ran(output=text, why=f"more than {cut} bytes of output", cut=True, seconds=seconds)
        why = f"no answer within {settings.timeout_s:g} s" if late else _fault(status, error_lines)
        return Ran(output=text, why=why, late=late, seconds=seconds)


def _let_in(info: IO[bytes], mapped: IO[bytes], stack: contextlib.ExitStack) -> int | None:
    """Waits until bubblewrap reports the first process of the sandbox, maps the users of the sandbox to users of the
    machine, and lets bubblewrap continue.

    Returns a pidfd of the first process; None if bubblewrap failed. When the first process ends, all other processes of
    the sandbox end. The first process waits until the users are mapped, so its process id cannot have been reused yet.
    Raises SandboxFailure if the users cannot be mapped.
    """
    report = info.read()
    if not report:
        return None
    first = json.loads(report)["child-pid"]
    try:
        pidfd = _pidfd(first, stack)
        sandbox_walls.map_users(first)
        mapped.write(b"1")
    except OSError as error:
        raise SandboxFailure(f"its users cannot be mapped: {error}") from error
    return pidfd


def _fault(status: int, errors: Sequence[str]) -> str:
    """Returns an error message of one line for code that ended with this exit status; "" if there was no error.

    `errors`: the lines that the code printed to standard error. Raises SandboxFailure if a signal ended bubblewrap
    itself.
    """
    if status < 0:
        raise SandboxFailure("it was lost: something else than its code ended it")
    if status - 128 in signal.valid_signals():  # 128 + signal number, as in shells
        return f"it was killed ({signal.strsignal(status - 128)})"
    return "" if status == 0 else errors[-1].strip() if errors else f"it ended with status {status}"


def _readable(file: IO[bytes] | int, timeout_s: float) -> bool:
    """Waits until a pipe or a pidfd is readable. Returns True if it is readable, and False after `timeout_s`
    seconds."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _pidfd(process: int, stack: contextlib.ExitStack) -> int:
    pidfd = os.pidfd_open(process)
    stack.callback(os.close, pidfd)
    return pidfd


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _text(file: IO[bytes], start: int, most: int) -> str:
    """Returns the text of up to `most` bytes of a file from the offset `start` on."""
    file.seek(start)
    return file.read(most).decode("utf-8", "replace")


def _file_of(data: bytes, stack: contextlib.ExitStack) -> IO[bytes]:
    """Returns a read-only temporary file with the content `data`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return stack.enter_context(open(file.name, "rb", buffering=0))


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the read end and the write end of a new pipe."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))
