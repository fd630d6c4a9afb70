"""Runs a reward function in a process of its own, on batches of (serial, response, payload). reaper.py starts it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import logging
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # else `_find` imports it, once `main` knows where to look
    from megatron_rl.rewards.reward_functions import Grader

from megatron_rl import processes
from megatron_rl.user_code import told, traceback_of

TOGETHER = "together"  # instead of null: a function grades batches, which can fail as a whole only
APART = "apart"  # instead of a batch's answers: a function raised on the batch, and each item is to be graded alone
PR_SET_PDEATHSIG = 1  # number of a prctl option of Linux


def main(reaper: int | None) -> None:
    """Reads pickled values from standard input and writes lines of JSON to standard output.

    In: (target, args, memory_mib, (least score, greatest score), sys.path), then batches, lists of items. Out: null,
    TOGETHER or [why the target cannot be used, traceback], then [serial, score or null, detail, seconds, exhausted,
    metrics, traceback] for each item, or APART for a batch.

    `reaper` is the process that started this one. With one, what a grading started and what then left this process, by
    a session of its own or by its parent's end, is gone before the answer is given.
    """
    own = os.getpid()
    # The pool's pipes move away from standard input and output, which a reward function may use.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if sys.platform == "linux":  # elsewhere the end of the pipe ends a worker that is not stuck
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Signals that ask the run to leave are for the run itself, which ends its workers. Programs that a reward starts
    # would inherit SIG_IGN, but they do not inherit a handler.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda number, frame: None)
    target, args, memory_mib, bounds, sys.path[:] = pickle.load(requests)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found = _find(target, args, bounds)
    limit, (_, hard) = memory_mib * 2**20, resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write(answers, found if isinstance(found, list) else TOGETHER if found.together else None)
    while not isinstance(found, list) and (batch := _read(requests)):
        for serial, answer in _grade(found, batch, memory_mib):
            if os.getpid() != own:
                os._exit(1)  # the function forked and came back twice
            exhausted = (
                answer is not None and answer[3]
            )  # the pool ends a worker without memory, and all of its children
            if reaper is not None and not exhausted:
                processes.end_strays(reaper, own)
            _write(answers, APART if answer is None else [serial, *answer])


def _read(stream: BinaryIO) -> list[Any]:
    """Returns the next batch; [] at the end of the stream."""
    try:
        return pickle.load(stream)
    except EOFError:
        return []


def _write(stream: BinaryIO, value: Any) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def _find(target: str, args: dict[str, Any], bounds: tuple[float, float]) -> Grader | list[str]:
    """Returns the grader for a target, or [why the target cannot be used, traceback].

    This is a border to user code: any error that the import raises is reported.
    """
    from megatron_rl.rewards.reward_functions import GIVEN_UP, CalledFunction, Grader, RewardFunctions

    module, _, name = target.partition(":")
    try:
        found = vars(importlib.import_module(module))[name]
        if isinstance(found, type):
            found, args = found(**args), {}
        if isinstance(found, RewardFunctions):
            found.grader.limits = None if bounds == (0.0, 1.0) else bounds  # what is set by default is nobody's wish
            return found.grader
        if not callable(found):
            return [f"it is a {type(found).__name__}, not a function", ""]
        return Grader([CalledFunction.of(functools.partial(found, **args) if args else found)], bounds=bounds)
    except GIVEN_UP as error:
        return [told(error), traceback_of(error)]


def _grade(
    grader: Grader, items: Sequence[tuple[int, str, Any]], memory_mib: int
) -> Iterator[tuple[int, list[Any] | None]]:  # fmt: skip
    """Grades items (serial, response, payload). Yields (serial, answer) for each item.

    An answer is [score or None, detail, seconds, exhausted, metrics, traceback]; after `exhausted`, which means that
    the process ran out of memory, there is no further answer. Yields (serial, None) once where each item of the batch
    is to be graded by itself.
    """
    from megatron_rl.rewards.reward_functions import BatchFailed

    found = grader.grade([(response, payload) for _, response, payload in items])
    for serial, _, _ in items:
        start = time.perf_counter()
        try:
            result = next(found)
        except BatchFailed:
            yield serial, None
            return
        except MemoryError as error:
            if grader.together and len(items) > 1:
                sys.exit(1)  # the pool finds out which item it was by grading each alone
            detail = f"MemoryError: more than reward.memory_mib = {memory_mib} {str(error)[:200]}".rstrip()
            yield serial, [None, detail, time.perf_counter() - start, True, {}, ""]
            return
        seconds = time.perf_counter() - start
        yield serial, [result.score, result.why, seconds, False, dict(result.metrics), result.trace]
