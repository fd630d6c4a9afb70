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
import selectors
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
CHUNK = 1 << 16
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
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        try:
            given = _file_of(stdin.encode("utf-8", "replace"), theirs)
            passed = {
                "request": _file_of(_request(code, settings, what), theirs),
                "seccomp": _file_of(sandbox_walls.call_filter(), theirs),
            }
            info, passed["info"] = _pipe(ours, theirs)
            status, passed["status"] = _pipe(ours, theirs)
            ready, passed["ready"] = _pipe(ours, theirs)
            passed["mapped"], mapped = _pipe(theirs, ours)
            fds = {name: file.fileno() for name, file in passed.items()}
            process = subprocess.Popen(
                sandbox_walls.command(settings.scratch_mib << 20, settings.packages, fds),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=list(fds.values()),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxFailure(f"no process could be started for it: {error}") from error
        theirs.close()
        ours.enter_context(process)
        ours.callback(process.kill)  # the end of bubblewrap is the end of the sandbox
        with _Watch(process, status, ready, settings) as watch:
            watch.let_in(info, mapped)
            return watch.to_the_end()


class _Watch:
    """Reads what a sandbox prints and reports, and ends the sandbox at a limit."""

    def __init__(
        self, process: subprocess.Popen[bytes], status: IO[bytes], ready: IO[bytes], settings: SandboxSettings
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._settings = settings
        self._out, self._err, self._status, self._ready = process.stdout, process.stderr, status, ready
        self._limits = {self._out: settings.output_bytes, self._err: ERROR_BYTES}
        self._read = {pipe: bytearray() for pipe in (self._out, self._err, status, ready)}
        self._counts = dict.fromkeys(self._limits, 0)
        self._first: int | None = None  # pidfd of the sandbox's first process, whose end is the end of all
        self._begun = 0.0  # time (time.monotonic) at which the code began
        self._why = ""  # the limit at which the code was ended
        self._cut = self._late = False

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._first is not None:
            os.close(self._first)

    def let_in(self, info: IO[bytes], mapped: IO[bytes]) -> None:
        """Waits for bubblewrap's report of the sandbox's first process, maps its users, and lets bubblewrap go on.

        The first process waits for this, so that its process id cannot belong to another process yet.
        """
        report = info.read()
        if not report:
            return  # bubblewrap has written the reason to standard error
        first = json.loads(report)["child-pid"]
        self._first = os.pidfd_open(first)
        try:
            sandbox_walls.map_users(first)
            mapped.write(b"1")
        except OSError as error:
            raise SandboxFailure(f"its users cannot be mapped: {error}") from error

    def to_the_end(self) -> Ran:
        """Returns how the code ended, when all of its processes are gone. Raises SandboxFailure."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for pipe in self._read:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    if not self._begun or self._why:
                        raise SandboxFailure(f"it neither answered nor ended within {START_TIMEOUT_S:g} s")
                    self._late = True
                    self._stop(f"no answer within {self._settings.timeout_s:g} s")
                    deadline = time.monotonic() + START_TIMEOUT_S
                for key, _ in events:
                    if not self._receive(key.fileobj):
                        selector.unregister(key.fileobj)
                    elif key.fileobj is self._ready:
                        self._begun = time.monotonic()
                        deadline = self._begun + self._settings.timeout_s
        if self._first is not None:
            select.select([self._first], [], [], START_TIMEOUT_S)  # readable when the kernel has killed all
        return self._ran()

    def _receive(self, pipe: Any) -> bool:
        """Reads from a pipe. Returns whether there may be more."""
        data = os.read(pipe.fileno(), CHUNK)
        self._read[pipe] += data
        if pipe in self._limits:
            self._counts[pipe] += len(data)
            if self._counts[pipe] > (limit := self._limits[pipe]):
                del self._read[pipe][limit:]
                self._cut = True
                self._stop(f"more than {limit} bytes of output")
            if pipe is self._err:
                del self._read[pipe][:-KEPT_ERROR_BYTES]
        return bool(data)

    def _stop(self, why: str) -> None:
        """Ends the sandbox. The first reason counts."""
        self._why = self._why or why
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def _ran(self) -> Ran:
        """Returns how the code ended, from all that was read."""
        seconds = time.monotonic() - self._begun
        lines = self._read[self._err].decode("utf-8", "replace").strip().splitlines()
        if not self._begun:
            raise SandboxFailure(lines[-1] if lines else "it was lost before its code began")
        reports = [json.loads(line) for line in self._read[self._status].splitlines()]
        status = next((report["exit-code"] for report in reports if "exit-code" in report), -1)
        why = self._why
        if not why and status < 0:
            raise SandboxFailure("it was lost: something else than its code ended it")
        if not why and status > 128 and (name := signal.strsignal(status - 128)):  # as shells count it
            why = f"it was killed ({name})"
        elif not why and status:
            why = lines[-1].strip() if lines else f"it ended with status {status}"
        output = self._read[self._out].decode("utf-8", "replace")
        return Ran(output=output, why=why, late=self._late, cut=self._cut, seconds=seconds)


def _file_of(data: bytes, owner: contextlib.ExitStack) -> IO[bytes]:
    """Returns a read-only file that holds `data` and is closed with `owner`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return owner.enter_context(open(file.name, "rb", buffering=0))


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns both ends of a pipe. Each end is closed with the stack that is given for it."""
    read, write = os.pipe()
    return reader.enter_context(open(read, "rb", 0)), writer.enter_context(open(write, "wb", 0))
