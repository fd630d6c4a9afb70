"""The process that runs a reward function: answers (serial, response, payload) frames, one by one. Started by pool.py as a script."""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import logging
import numbers
import os
import pickle
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

HEADER = struct.Struct("<I")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Answer:
    """What went wrong is in `detail` when there is no score."""

    score: float | None
    detail: str
    seconds: float
    exhausted: bool = False  # out of memory: this process is no longer fit for use


def frame(data: bytes) -> bytes:
    """`data` behind its length."""
    return HEADER.pack(len(data)) + data


def main() -> None:
    """Frames in, pickled: (target, args, memory_mib, sys.path), then items. Frames out, JSON: null or why the target cannot be used,
    then [serial, score or null, detail, seconds, exhausted] of each item."""
    requests, answers = _take_pipes()
    _die_with_parent()
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGUSR1",
        "SIGUSR2",
    ):  # what asks the run to leave is for the run, which ends its workers itself
        signal.signal(getattr(signal, name), _stay)
    target, args, memory_mib, sys.path[:] = pickle.loads(_read(requests))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found = _find(target, args)
    _limit_memory(memory_mib)
    _write(answers, found if isinstance(found, str) else None)
    while not isinstance(found, str) and (data := _read(requests)):
        serial, response, payload = pickle.loads(data)
        answer = _grade(found, response, payload, memory_mib)
        _write(answers, [serial, answer.score, answer.detail, answer.seconds, answer.exhausted])


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pool's pipes, moved away from where a reward function reads and prints."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def _die_with_parent() -> None:
    if sys.platform == "linux":  # elsewhere the end of the pipe ends a worker that is not stuck
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stay(signum: int, stack: Any) -> None:
    """A handler, so that programs a reward starts do not inherit a deaf ear."""


def _limit_memory(memory_mib: int) -> None:
    limit = memory_mib * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(stream: BinaryIO) -> bytes:
    """The next frame's data; empty at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    (size,) = HEADER.unpack(header)
    data = stream.read(size)
    return data if len(data) == size else b""


def _write(stream: BinaryIO, value: Any) -> None:
    stream.write(frame(json.dumps(value).encode()))
    stream.flush()


def _find(target: str, args: dict[str, Any]) -> Callable[..., Any] | str:
    """The function, or why there is none. A border to user code: whatever its import raises is reported."""
    module, _, name = target.partition(":")
    try:
        found = vars(importlib.import_module(module))[name]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not callable(found):
        return f"it is a {type(found).__name__}, not a function"
    return functools.partial(found, **args) if args else found


def _grade(function: Callable[..., Any], response: str, payload: Any, memory_mib: int) -> Answer:
    """The named border to user rewards: whatever one raises is reported."""
    start = time.perf_counter()
    try:
        score = function(response, payload)
    except MemoryError as error:
        detail = f"MemoryError: more than reward.memory_mib = {memory_mib} {str(error)[:200]}".rstrip()
        return Answer(None, detail, time.perf_counter() - start, exhausted=True)
    except Exception as error:
        return Answer(None, f"{type(error).__name__}: {str(error)[:500]}", time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if not isinstance(score, numbers.Real) or not 0.0 <= float(score) <= 1.0:
        return Answer(None, f"returned {repr(score)[:100]}: a reward returns a number in [0, 1]", seconds)
    return Answer(float(score), "", seconds)


if __name__ == "__main__":
    main()
