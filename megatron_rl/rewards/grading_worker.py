"""The main function of a worker process, which runs a reward function on batches of responses.

reaper.py starts the process, and grading_pool.py sends the batches to the process.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import pkgutil
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # imported later, in `_find`, because `main` must receive sys.path before
    from megatron_rl.rewards.reward_functions import Grader

from megatron_rl.lib import processes
from megatron_rl.lib.user_code import told, traceback_of
from megatron_rl.run.parent_death import end_with_parent

# first line that a worker sends if the reward function grades batches; an error then has no single item as its cause
TOGETHER = "together"
APART = "apart"  # sent instead of results if the function failed on a batch; each item must then be graded alone


def main(reaper: int | None) -> None:
    """Runs a worker process that grades responses: reads pickled values from standard input, writes JSON lines to
    standard output.

    Input: first the tuple (target, args, memory_mib, (lowest score, highest score), sys.path). Then batches: lists of
    items (serial number, response, payload of the problem).

    Output: first one line: null, or TOGETHER if the function grades batches, or [reason why the target cannot be used,
    traceback]. Then one line for each item, [serial, score or null, detail, seconds, exhausted, metrics, traceback], or
    a single line APART if the function raised an error on the batch.

    `reaper`: id of the parent process (reaper.py), or None. If there is a reaper, the processes that a grading started
    and that left this process's tree (by setsid, or because their parent ended) are killed before the result is sent.
    """
    pid = os.getpid()
    # The socket to the pool gets new file descriptors, because a reward function may use standard input and output.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # With a reaper, Linux kills this process when the reaper ends, even if this process hangs. Without a reaper, this
    # process ends when its socket is closed, unless it hangs.
    if reaper is not None:
        end_with_parent(signal.SIGKILL, reaper)
    # The worker ignores the signals that stop a run: the run itself handles them and then ends its workers.
    # A handler is used and not SIG_IGN, because programs that a reward function starts would inherit SIG_IGN.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda number, frame: None)
    target, args, memory_mib, bounds, sys.path[:] = pickle.load(requests)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    loaded = _find(target, args, bounds)
    limit, (_, hard) = memory_mib * 2**20, resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write(answers, loaded if isinstance(loaded, list) else TOGETHER if loaded.together else None)
    while not isinstance(loaded, list) and requests.peek(1):
        for answer in _grade(loaded, pickle.load(requests), memory_mib):
            if os.getpid() != pid:
                os._exit(1)  # this is a child process: the reward function forked and also returned in the child
            exhausted = answer != APART and answer[4]  # if out of memory, the pool kills this process and its children
            if reaper is not None and not exhausted:
                processes.end_strays(reaper, pid)
            _write(answers, answer)


def _write(stream: BinaryIO, value: Any) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def _find(target: str, args: dict[str, Any], bounds: tuple[float, float] | None) -> Grader | list[str]:
    """Returns the grader for a target, or [reason why the target cannot be used, traceback].

    The target is user code: any error that its import raises is returned as the reason.
    """
    from megatron_rl.rewards.reward_functions import GIVEN_UP, CalledFunction, Grader, RewardFunctions

    try:
        function = pkgutil.resolve_name(target)
        if isinstance(function, type):
            function, args = function(**args), {}
        if isinstance(function, RewardFunctions):
            function.grader.limits = bounds
            return function.grader
        if not callable(function):
            return [f"it is a {type(function).__name__}, not a function", ""]
        return Grader([CalledFunction.of(functools.partial(function, **args) if args else function)], bounds=bounds)
    except GIVEN_UP as error:
        return [told(error), traceback_of(error)]


def _grade(grader: Grader, items: Sequence[tuple[int, str, Any]], memory_mib: int) -> Iterator[Any]:
    """Grades items (serial number, response, payload). Yields one result for each item.

    A result is [serial, score or None, detail, seconds, exhausted, metrics, traceback]. `exhausted` means that the
    process ran out of memory; such a result is the last one. If a function raised an error on a batch of several items,
    yields APART once and stops; the caller must then grade each item alone.
    """
    from megatron_rl.rewards.reward_functions import BatchFailed

    results = grader.grade([(response, payload) for _, response, payload in items])
    for serial, _, _ in items:
        start = time.perf_counter()
        try:
            result = next(results)
        except BatchFailed:
            yield APART
            return
        except MemoryError as error:
            if grader.together and len(items) > 1:
                # the pool then grades each item of the batch alone, to find the item that uses too much memory
                sys.exit(1)
            detail = f"MemoryError: more than reward.memory_mib = {memory_mib} {str(error)[:200]}".rstrip()
            yield [serial, None, detail, time.perf_counter() - start, True, {}, ""]
            return
        seconds = time.perf_counter() - start
        yield [serial, result.score, result.why, seconds, False, dict(result.metrics), result.trace]
