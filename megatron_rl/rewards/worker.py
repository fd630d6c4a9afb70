"""The process that runs a reward function: reads (response, payload) frames from stdin, answers each on stdout. Started by pool.py."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import pickle
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER = struct.Struct("<I")
PR_SET_PDEATHSIG = 1


def write_frame(stream: BinaryIO, value: Any) -> None:
    """One length-prefixed pickle."""
    data = pickle.dumps(value)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """The next value; EOFError at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reward prints must not get between the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers itself
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests = sys.stdin.buffer
    target, args, memory_mib = read_frame(requests)
    sys.path.insert(0, os.getcwd())
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    function, failure = _find(target, args)
    limit = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    write_frame(answers, failure)
    while failure is None and function is not None:
        try:
            response, payload = read_frame(requests)
        except EOFError:
            return
        write_frame(answers, _grade(function, response, payload))


def _find(target: str, args: dict[str, Any]) -> tuple[Callable[..., Any] | None, str | None]:
    module, _, name = target.partition(":")
    try:
        found = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        return None, f"{type(error).__name__}: {error}"
    return (functools.partial(found, **args) if args else found), None


def _grade(function: Callable[..., Any], response: str, payload: Any) -> tuple[float | None, str, float]:
    """-> (score or None, what went wrong, seconds). The named border to user rewards: whatever one raises is reported."""
    start = time.perf_counter()
    try:
        score = function(response, payload)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error)[:500]}", time.perf_counter() - start
    seconds = time.perf_counter() - start
    if isinstance(score, bool):
        score = float(score)
    if not isinstance(score, (int, float)) or not 0.0 <= score <= 1.0:
        return None, f"returned {str(score)[:100]!r}: a reward returns a number in [0, 1]", seconds
    return float(score), "", seconds


if __name__ == "__main__":
    main()
