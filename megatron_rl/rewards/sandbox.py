"""Calls a Python function of a data set in a process of its own: no network, no children, no files, little memory and time.

The arguments are literals, never code. The process runs this file as a script.

How the network is taken away: by a network namespace where the kernel lets one be made (as root, or with unprivileged user namespaces),
and always by an audit hook that refuses sockets, programs, foreign code and writing files. Without a namespace the hook alone stands:
it keeps honest code from the network, not an attacker who breaks the interpreter. `Ran.isolated` says which it was.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 3.0
MEMORY_MIB = 512
MAX_BYTES = 1 << 18  # of an answer
NOBODY = 65534
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_NO_NEW_PRIVS = 0x10000000, 0x40000000, 38
FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "ctypes.",
             "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.putenv",
             "shutil.", "webbrowser.", "urllib.", "http.", "ftplib.", "smtplib.", "pty.", "signal.pthread_kill", "fcntl.")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a call: `value` is the repr of what it returned, or None, and `why` what went wrong."""

    value: str | None
    why: str = ""
    isolated: bool = False  # in a network namespace of its own


def call(
    code: str, arguments: Sequence[str], keywords: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S,
    memory_mib: int = MEMORY_MIB, name: str = "f",
) -> Ran:  # fmt: skip
    """`name(*arguments)` of `code`; arguments are the reprs of literals. Never raises for what the code does."""
    order = {"code": code, "arguments": list(arguments), "keywords": dict(keywords or {}), "name": name}
    order |= {"cpu_s": max(1, round(timeout_s)), "memory_mib": memory_mib}
    with tempfile.TemporaryDirectory(prefix="sandbox_") as place:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=place,
            env={}, start_new_session=True, close_fds=True,
        )  # fmt: skip
        late = threading.Timer(timeout_s, _kill, [process])
        late.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode())
                process.stdin.close()
            said = process.stdout.read(MAX_BYTES + 1)
        finally:
            timed_out = not late.is_alive()
            late.cancel()
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
    if timed_out:
        return Ran(None, f"no answer within {timeout_s:g} s")
    return _read(said, process.returncode)


def _read(said: bytes, status: int) -> Ran:
    if len(said) > MAX_BYTES:
        return Ran(None, f"more than {MAX_BYTES} bytes")
    try:
        answer = json.loads(said)
        return Ran(answer["value"], str(answer["why"]), bool(answer["isolated"]))
    except (ValueError, KeyError, TypeError):
        return Ran(None, f"it ended with status {status}, without an answer")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def main() -> None:
    """In the new process: reads the order, gives up every right, runs the code, answers."""
    import ast

    order = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(1), "wb")
    _silence()
    _load_usual_modules()
    isolated = _cut_off(order["memory_mib"], order["cpu_s"])
    sys.addaudithook(_refuse)
    value, why = None, ""
    try:
        space: dict[str, Any] = {"__name__": "__sandbox__"}
        exec(compile(order["code"], "<data set>", "exec"), space)
        given = [ast.literal_eval(text) for text in order["arguments"]]
        named = {name: ast.literal_eval(text) for name, text in order["keywords"].items()}
        value = repr(space[order["name"]](*given, **named))
    except BaseException as error:  # whatever a data set's code raises, an exit among it, is its answer
        why = f"{type(error).__name__}: {str(error)[:200]}"
    answers.write(json.dumps({"value": value, "why": why, "isolated": isolated}).encode())
    answers.flush()
    os._exit(0)


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)


def _load_usual_modules() -> None:
    """Before the rights are gone: an installation may be readable by its owner alone."""
    for name in (
        "bisect",
        "collections",
        "copy",
        "datetime",
        "functools",
        "heapq",
        "itertools",
        "math",
        "operator",
        "random",
        "re",
        "string",
    ):
        importlib.import_module(name)


def _cut_off(memory_mib: int, cpu_s: int) -> bool:
    """-> whether the process now has a network namespace of its own."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    isolated = False
    if sys.platform == "linux":
        isolated = libc.unshare(CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET) == 0
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
    for kind, limit in (
        (resource.RLIMIT_AS, memory_mib << 20), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 16),
    ):  # fmt: skip
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))
    return isolated


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook; once there, it stays."""
    writes = event == "open" and (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
    creates = (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    )
    if writes or creates or event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} is not for code in the sandbox")


if __name__ == "__main__":
    main()
