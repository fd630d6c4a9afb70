"""Runs Python code that nobody has read: a whole program, or one function of it, in a process that reaches nothing.

The code has no network, sees of the machine's files only Python and shared libraries, writes only to a small /tmp of
its own, sees no other process, and has limits on memory, time, processes, files and output. When its main process
ends, or its time, all processes that it started are killed by the kernel. docs/tools.md says how this is done, what a
machine must allow, and what is not kept out.

A run ends in one of three ways: the code's own end (`Ran` without `why`), the code's own fault (`Ran.why`, a text that
a model can be told), or the sandbox's (SandboxFailure, which must never become a reward of 0). Calls may come from
many threads and processes at a time.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards import sandbox_process, sandbox_ways
from megatron_rl.rewards.sandbox_process import ERROR_BYTES, Ended, SandboxFailure, SandboxSettings, Way

__all__ = ["Ran", "SandboxFailure", "SandboxSettings", "call", "run_program"]

DEFAULTS = SandboxSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of code that ran in a sandbox."""

    output: str  # what a program printed, up to the limit; of a call: the repr of the returned value
    why: str = ""  # one line that says what went wrong: the last of the traceback, a limit; empty: nothing did
    late: bool = False  # it did not end in time
    cut: bool = False  # it was ended because it printed more than the limit
    seconds: float  # from the code's start to its end
    isolation: Way


def run_program(
    code: str,
    stdin: str = "",
    *,
    arguments: Sequence[str] = (),
    show_value: bool = False,
    settings: SandboxSettings = DEFAULTS,
) -> Ran:
    """Runs `code` as Python runs a file, with `stdin` as its standard input and `arguments` in sys.argv.

    With `show_value`, the value of a last expression counts as printed where nothing else was. Raises SandboxFailure.
    """
    return _run(code, stdin, settings, {"arguments": list(arguments), "show_value": show_value})


def call(
    code: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    name: str = "f",
    settings: SandboxSettings = DEFAULTS,
) -> Ran:
    """Runs `code` and calls its function `name`, or that method of its class Solution, with plain values.

    A plain value is what a Python literal can be. What the code prints is thrown away. Raises SandboxFailure.
    """
    what = {"function": name, "values": list(arguments), "keywords": dict(keywords or {})}
    ran = _run(code, "", settings, what)
    if ran.why:
        return ran
    if not ran.output.startswith(("=", "!")):
        why = f"it ended without a value of {name}"
        return Ran(output="", why=why, seconds=ran.seconds, isolation=ran.isolation)
    raised = ran.output[1:] if ran.output.startswith("!") else ""
    value = "" if raised else ran.output[1:]
    return Ran(output=value, why=raised, seconds=ran.seconds, isolation=ran.isolation)


def _run(code: str, stdin: str, settings: SandboxSettings, what: dict[str, Any]) -> Ran:
    way = sandbox_ways.choose(settings.accept_no_wall)
    order = sandbox_ways.order_of(way, code, settings, **what)
    given = stdin.encode("utf-8", "replace")
    ended = sandbox_process.run(sandbox_ways.command(way, settings), order, given, settings)
    return Ran(
        output=ended.output.decode("utf-8", "replace"),
        why=_why(ended, settings),
        late=ended.how == "late",
        cut=ended.how == "flooded",
        seconds=ended.seconds,
        isolation=way,
    )


def _why(ended: Ended, settings: SandboxSettings) -> str:
    if ended.how == "late":
        return f"no answer within {settings.timeout_s:g} s"
    if ended.how == "flooded":
        most = settings.output_bytes if len(ended.output) == settings.output_bytes else ERROR_BYTES
        return f"more than {most} bytes of output"
    if ended.status == 0:
        return ""
    if ended.status < 0:
        return f"it was killed ({signal.strsignal(-ended.status)})"
    lines = ended.errors.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else f"it ended with status {ended.status}"
