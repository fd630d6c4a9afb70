"""Starts one sandbox, reads what its code prints, and sees to its end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import marshal
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_rl.rewards.sandbox_kernel import NOBODY

Way = Literal["bubblewrap", "namespaces", "audit"]  # how code is kept apart from the machine

START_TIMEOUT_S = 30.0  # for a sandbox to stand, and once more to go, on a machine with much else to do
ERROR_BYTES = 1 << 20  # of standard error; more of it ends the code
KEPT_ERROR_BYTES = 4096  # of standard error, from its end
CHUNK = 1 << 16
# The whole environment of the code. Hashes of texts are the same in every run, and so is the order of a set of them.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each arena takes 64 MiB of the memory limit, used or not
}  # fmt: skip


class SandboxFailure(RuntimeError):
    """A sandbox that cannot be built, is lost, or does not do what it must: nothing is known of the code in it."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Limits of what code in a sandbox may use."""

    timeout_s: float = 10.0  # from the code's start to its end, by the clock
    memory_mib: int = 512  # of one process; /tmp is counted by itself
    processes: int = 16  # processes and threads at a time, the first among them
    scratch_mib: int = 32  # size of /tmp, which is in memory, and of the largest file
    open_files: int = 64
    output_bytes: int = 1 << 20  # of standard output; more of it ends the code
    packages: Sequence[str] = ()  # directories of modules beside the standard library, shown to the code
    accept_no_wall: bool = False  # run code also where this machine can build no sandbox, see docs/tools.md

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mib", "processes", "scratch_mib", "open_files", "output_bytes"):
            value = vars(self)[name]
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}: give a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The way in which the code in a sandbox ended."""

    how: Literal["exit", "late", "flooded"]  # flooded: it wrote more than it may
    status: int = 0  # of an exit; negative: the number of the signal that killed it
    seconds: float  # from the code's start to its end
    output: bytes  # standard output, up to output_bytes
    errors: bytes  # the end of standard error


def run(command: Sequence[str], order: Mapping[str, Any], stdin: bytes, settings: SandboxSettings) -> Ended:
    """Runs `command` with three more arguments (see sandbox_inside.main) and returns how the code in it ended.

    It may be called from several threads. Raises SandboxFailure when the sandbox could not be built or was lost.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        nobody = NOBODY if order["way"] == "bubblewrap" and os.geteuid() == 0 else None
        try:
            ordered = theirs.enter_context(_file_of(marshal.dumps(dict(order))))
            given = theirs.enter_context(_file_of(stdin))
            lifeline = _pipe(reader=theirs, writer=ours)
            report = _pipe(reader=ours, writer=theirs)
            passed = (ordered.fileno(), lifeline[0].fileno(), report[1].fileno())
            process = subprocess.Popen(
                [*command, *map(str, passed)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=passed,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                # bubblewrap keeps the user who calls it. That must not be root, not even without rights.
                user=nobody,
                group=nobody,
                extra_groups=None if nobody is None else [],
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxFailure(f"no process could be started for it: {error}") from error
        ours.enter_context(process.stdout or contextlib.nullcontext())
        ours.enter_context(process.stderr or contextlib.nullcontext())
        ours.callback(_end, process, lifeline[1])
        theirs.close()
        return _collect(process, report[0], lifeline[1], settings)


def _collect(
    process: subprocess.Popen[bytes], report: io.FileIO, lifeline: io.FileIO, settings: SandboxSettings
) -> Ended:
    """Reads the three pipes to their ends. Closes the lifeline when the code writes too much."""
    assert process.stdout is not None and process.stderr is not None
    limits = {process.stdout.fileno(): settings.output_bytes, process.stderr.fileno(): ERROR_BYTES}
    read: dict[int, bytearray] = {}
    count: dict[int, int] = {}
    flooded = False
    deadline = time.monotonic() + settings.timeout_s + START_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr, report):
            read[pipe.fileno()], count[pipe.fileno()] = bytearray(), 0
            selector.register(pipe.fileno(), selectors.EVENT_READ)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise SandboxFailure(f"it neither answered nor ended within {settings.timeout_s + START_TIMEOUT_S:g} s")
            for key, _ in events:
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(key.fd)
                read[key.fd] += data
                count[key.fd] += len(data)
                if count[key.fd] > limits.get(key.fd, math.inf):
                    flooded = True
                    lifeline.close()
                    del read[key.fd][limits[key.fd] :]
                if key.fd == process.stderr.fileno():
                    del read[key.fd][:-KEPT_ERROR_BYTES]
    output, last, told = (bytes(read[pipe.fileno()]) for pipe in (process.stdout, process.stderr, report))
    ended = _read(told.decode().splitlines(), output, last)
    return replace(ended, how="flooded") if flooded else ended


def _read(told: Sequence[str], output: bytes, errors: bytes) -> Ended:
    if not told:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise SandboxFailure(lines[-1] if lines else "it ended before it stood, without a word")
    if len(told) < 2:
        raise SandboxFailure("it was lost: something else than its code ended it")
    how, *numbers = told[1].split()
    if how == "exit":
        return Ended(how="exit", status=int(numbers[0]), seconds=float(numbers[1]), output=output, errors=errors)
    late = how == "late"
    return Ended(how="late" if late else "flooded", seconds=float(numbers[0]), output=output, errors=errors)


def _file_of(data: bytes) -> io.FileIO:
    """Returns a file in memory that holds `data` and that nobody can change, to be read from its start."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = io.FileIO(descriptor, "r+")
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Returns both ends of a pipe. Each is closed with the stack that is given for it."""
    ends = os.pipe()
    return (
        reader.enter_context(io.FileIO(ends[0], "r")),
        writer.enter_context(io.FileIO(ends[1], "w")),
    )


def _end(process: subprocess.Popen[bytes], lifeline: io.FileIO) -> None:
    """Ends the sandbox and waits until all its processes are gone."""
    lifeline.close()
    try:
        process.wait(START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
