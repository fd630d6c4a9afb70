"""Calls a Python function of a data set in a process without network, children or files, with little memory and time.

The arguments are literals, never code. The process runs this file as a script.

The network is taken away by a network namespace where the kernel allows one (as root, or with unprivileged user
namespaces), and always by an audit hook that refuses sockets, programs, foreign code and writing files. Without a
namespace there is only the hook: it keeps honest code from the network, but not an attacker who breaks the interpreter.
`SandboxResult.isolated` says whether there was a namespace.
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
MAX_BYTES = 1 << 18  # largest answer
NOBODY = 65534
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_NO_NEW_PRIVS = 0x10000000, 0x40000000, 38
# Audit events that are refused, by the beginning of their names.
FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.kill",
    "ctypes.",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.putenv",
    "shutil.",
    "webbrowser.",
    "urllib.",
    "http.",
    "ftplib.",
    "smtplib.",
    "pty.",
    "signal.pthread_kill",
    "fcntl.",
)

_USUAL_MODULES = ("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math", "operator",
                  "random", "re", "string")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a call: `value` is the repr of the returned value, or None; then `why` says what went wrong."""

    value: str | None
    why: str = ""
    isolated: bool = False  # the process had a network namespace of its own


def call(
    code: str,
    arguments: Sequence[str],
    keywords: Mapping[str, str] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    memory_mib: int = MEMORY_MIB,
    name: str = "f",
) -> SandboxResult:
    """Runs `code` and calls its function `name` with arguments, which are the reprs of literals.

    Never raises for what the code does.
    """
    order = {"code": code, "arguments": list(arguments), "keywords": dict(keywords or {}), "name": name}
    order |= {"cpu_s": max(1, round(timeout_s)), "memory_mib": memory_mib}
    with tempfile.TemporaryDirectory(prefix="sandbox_") as place:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=place,
            env={},
            start_new_session=True,
            close_fds=True,
        )
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
        return SandboxResult(None, f"no answer within {timeout_s:g} s")
    return _read(said, process.returncode)


def _read(said: bytes, status: int) -> SandboxResult:
    if len(said) > MAX_BYTES:
        return SandboxResult(None, f"more than {MAX_BYTES} bytes")
    try:
        answer = json.loads(said)
        return SandboxResult(answer["value"], str(answer["why"]), bool(answer["isolated"]))
    except (ValueError, KeyError, TypeError):
        return SandboxResult(None, f"it ended with status {status}, without an answer")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def main() -> None:
    """Runs in the new process: reads the order, gives up every right, runs the code, and answers."""
    import ast

    order = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(1), "wb")
    _close_standard_streams()
    _load_usual_modules()
    isolated = _give_up_rights(order["memory_mib"], order["cpu_s"])
    sys.addaudithook(_refuse_forbidden)
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


def _close_standard_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)


def _load_usual_modules() -> None:
    """Imports common modules while the process may still read them.

    An installation may be readable by its owner alone.
    """
    for name in _USUAL_MODULES:
        importlib.import_module(name)


def _give_up_rights(memory_mib: int, cpu_s: int) -> bool:
    """Gives up network, user and resources. Returns whether the process now has a network namespace of its own."""
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
    limits = {
        resource.RLIMIT_AS: memory_mib << 20,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 16,
    }
    for kind, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))
    return isolated


def _refuse_forbidden(event: str, arguments: tuple[Any, ...]) -> None:
    """Raises PermissionError for forbidden events. It is an audit hook, which cannot be removed again."""
    writes = event == "open" and (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
    creates = (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    )
    if writes or creates or event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} is not for code in the sandbox")


if __name__ == "__main__":
    main()
