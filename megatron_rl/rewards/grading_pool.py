"""Runs a reward function in worker processes with a memory limit, and kills a worker that exceeds the time limit.

Every failure is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Reward
from megatron_rl.rewards import reaper
from megatron_rl.rewards.grading_worker import APART, TOGETHER
from megatron_rl.types import Outcome

# number of gradings of a call, spread evenly over its items, that must finish before the other gradings start
FIRST = 8
CHUNK = 16  # maximum number of responses that are sent to a worker at once
START_TIMEOUT_S = 120.0  # time limit in seconds for a worker process to import the reward function's module
# maximum number of consecutive failed starts of worker processes, once a worker has started successfully
START_TRIES = 4
START_PAUSE_S = 1.0  # pause in seconds between two attempts to start a process
PIPE_BYTES = 1 << 16  # maximum number of bytes of one read from or write to a worker's pipe
# Value of `_Worker.ended` for a worker that ran out of memory.
# Items that such a worker still holds did not cause it.
EXHAUSTED = "out of memory"
# time limit in seconds for a worker's parent process (reaper.py) to end all processes that the worker started
END_S = 10.0
PACKAGE = Path(reaper.__file__).parents[1]
START = (  # only megatron_rl is imported from PACKAGE; other modules are found along the sys.path that the pool sends
    f"import sys; sys.path.append({str(PACKAGE.parent)!r}); from megatron_rl.rewards.reaper import main; "
    "sys.path.pop(); main()"
)


class RewardFailure(RuntimeError):
    """The reward function cannot be imported, or so many of its gradings fail that the other scores should not be
    trained on."""


@dataclass(frozen=True)
class Graded:
    """The result of grading one response. `score` is only valid if the outcome is SCORE. `detail` is the error message
    of a failed grading.

    `cut_off`: the grading was ended by the time limit, the memory limit or the death of its worker. `excused`: the
    failure is not counted as a failure of the reward function, because the function grades the problem's known answer
    as correct.
    """

    outcome: Outcome
    score: float = 0.0
    detail: str = ""
    seconds: float = 0.0
    cut_off: bool = False
    excused: bool = False
    threshold: float = 0.5  # the middle of reward.range; a higher score means a correct response
    # additional numbers that the reward function returned, by name
    metrics: Mapping[str, float] = field(default_factory=dict)
    trace: str = ""  # the traceback, if the reward function raised an error

    @property
    def correct(self) -> bool:
        """Returns whether the response has a score above the middle of reward.range."""
        return self.outcome is Outcome.SCORE and self.score > self.threshold


@dataclass
class _Worker:
    """A worker process of the pool, the items (responses) that were sent to the worker, and buffers of unsent and
    unparsed bytes."""

    # the worker's parent process (reaper.py), which kills the worker's processes and ends with the worker's exit status
    process: subprocess.Popen[bytes]
    outbox: bytearray  # bytes not yet written to the worker; writes never block, even if the pipe is full
    since: float  # time (time.monotonic) at which the worker began its current item
    inbox: bytearray = field(default_factory=bytearray)  # bytes of an incomplete line that was read from the worker
    held: deque[int] = field(default_factory=deque)  # indices of the items that were sent and not answered, in order
    ready: bool = False  # whether the worker has imported the reward function
    # whether the reward function grades all held items in one call, so that a crash cannot be attributed to one item
    together: bool = False
    apart: bool = False  # whether the reward function raised an error on the batch of held items
    ended: str = ""  # reason why the worker sends no more answers; empty while it works
    refusal: str = ""  # reason why the worker cannot use the reward function; empty if it can
    trace: str = ""  # traceback that belongs to `refusal`

    @property
    def busy(self) -> bool:
        return bool(self.held) or not self.ready


class GradePool:
    """A pool of worker processes that run one reward function. Only one thread may call it at a time.

    Example: `with GradePool(config.reward) as pool: pool.grade(responses, payloads)`. The workers start at the first
    call of `grade` or `start`. They import the function from this process's working directory and sys.path.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._workers: list[_Worker] = []
        # number of items graded in earlier calls; added to an item's index, it gives a unique serial number
        self._items_before = 0
        self._starter: ThreadPoolExecutor | None = None  # the thread that starts workers; see the comment in _start
        self._proven = False  # whether any worker has ever imported the reward function
        self._failed_starts = 0  # number of consecutive failed starts of workers
        # indices of the items that are graded alone, because grading them as a batch failed
        self._alone: set[int] = set()
        # indices of the items that are graded again, because the worker was killed from outside
        self._again: set[int] = set()
        self._least = reward.range[0]  # the lower end of reward.range, or the lowest returned score if it is lower
        self._known: dict[str, bool] = {}  # key of a problem -> whether the problem's known answer is graded as correct

    def __enter__(self) -> GradePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers and all processes that the workers started. The next call of `grade` starts new workers."""
        for worker in self._workers:
            worker.process.send_signal(reaper.LEAVE)
        for worker in self._workers:
            _kill(worker)
        self._workers = []
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None

    def start(self) -> None:
        """Starts the workers without waiting until they have imported the function."""
        self._ensure_workers(self.reward.workers)
        for worker in self._workers:
            _send(worker)

    def grade(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        """Grades B responses and returns B results, in order. `payloads`: the data of each response's problem, such as
        the known answer.

        A model may generate a response that no reward function can grade in time. If a grading is cut off, the reward
        function is tested on the problem's known answer. If the function grades the known answer as correct, the
        response is the cause, and `reward.cut_off` determines the result: "wrong" gives the response the lowest score,
        "drop" leaves it a failure that is not counted.

        Raises RewardFailure if the function cannot be imported. Also raises RewardFailure if all of the first FIRST
        gradings are cut off and not excused, because thousands of time-outs would take hours.
        """
        count = len(responses)
        first = range(0, count, -(-count // FIRST)) if count > FIRST and self.reward.max_failure_share < 1 else range(0)
        tried = self._settled([responses[i] for i in first], [payloads[i] for i in first])
        if tried and all(one.cut_off and not one.excused for one in tried):
            check_failures(tried, 0.0, what="gradings, which were tried before the others,")
        found = dict(zip(first, tried, strict=True))
        rest = [i for i in range(count) if i not in found]
        others = self._settled([responses[i] for i in rest], [payloads[i] for i in rest])
        found |= zip(rest, others, strict=True)
        return [found[i] for i in range(count)]

    def _settled(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        """Grades B responses. Then applies `reward.cut_off` to the gradings that a time or memory limit cut off, where
        the known answer is graded as correct."""
        graded = self._grade(responses, payloads)
        if not any(one.cut_off for one in graded):
            return graded
        doubtful = [payload for payload, one in zip(payloads, graded, strict=True) if one.cut_off]
        fresh = {key: p for p in doubtful if (key := _known_answer(p)) is not None and key not in self._known}
        texts = [self.reward.answer_format.replace("{answer}", str(p["answer"])) for p in fresh.values()]
        for key, one in zip(fresh, self._grade(texts, list(fresh.values())), strict=True):
            self._known[key] = one.outcome is Outcome.SCORE and one.score >= self.reward.threshold
        return [self._judged(one, payload) for one, payload in zip(graded, payloads, strict=True)]

    def _judged(self, one: Graded, payload: Mapping[str, Any]) -> Graded:
        """Returns a grading with `reward.cut_off` applied, if it was cut off by a limit and the problem's known answer
        is graded as correct; otherwise unchanged."""
        if not one.cut_off or not self._known.get(_known_answer(payload) or "", False):
            return one
        if self.reward.cut_off == "drop":
            return replace(one, excused=True)
        return replace(one, outcome=Outcome.SCORE, score=self._least, threshold=self.reward.threshold, excused=True)

    def _grade(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        """Runs the reward function on B responses in the workers. Returns B results, in order."""
        items = [(response, dict(payload)) for response, payload in zip(responses, payloads, strict=True)]
        results: dict[int, Graded] = {}
        waiting = deque(range(len(items)))
        self._alone, self._again = set(), set()
        try:
            self._ensure_workers(min(self.reward.workers, len(items)))
            while len(results) < len(items):
                for worker in self._workers:
                    self._feed(worker, waiting, items)
                self._exchange(results)
                self._replace(results, waiting)
                for worker in (w for w in self._workers if w.apart):  # each item of a failed batch is graded alone
                    self._alone.update(worker.held)
                    waiting.extendleft(reversed(worker.held))
                    worker.held.clear()
                    worker.apart = False
        except BaseException:  # ends the workers, so that the next call does not receive late answers of this call
            self.close()
            raise
        self._items_before += len(items)
        return [results[i] for i in range(len(items))]

    def _ensure_workers(self, wanted: int) -> None:
        """Removes dead workers, and starts new workers until there are at least `wanted`."""
        for worker in [w for w in self._workers if w.process.poll() is not None]:
            _kill(worker)
            self._workers.remove(worker)
        while len(self._workers) < wanted:
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        command = [sys.executable, "-P", "-c", START]  # -P keeps the working directory out of the search path
        # Linux sends a worker's parent process (reaper.py) a signal when the thread that started it ends.
        # The pool therefore starts the process in a thread that lives as long as the pool.
        self._starter = self._starter or ThreadPoolExecutor(1, "reward-workers")
        process = self._starter.submit(_open_process, command).result()
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(_fd(pipe), False)
        here = os.getcwd()
        paths = [here, *(path or here for path in sys.path)]
        task = pickle.dumps((self.reward.target, self.reward.args, self.reward.memory_mib, self.reward.range, paths))
        return _Worker(process, outbox=bytearray(task), since=time.monotonic())

    def _why_not(self, worker: _Worker, status: int) -> str:
        """Returns the error message for a worker that could not be started. `status`: exit status of the worker."""
        if worker.refusal:
            return (
                f"reward.target {self.reward.target!r} cannot be used: {worker.refusal}; it has the form "
                "package.module:name"
            )
        return (
            f"a reward worker did not start within {START_TIMEOUT_S:.0f} s (status {status}): importing "
            f"{self.reward.target!r} ends the process or hangs, or reward.memory_mib = {self.reward.memory_mib} is too "
            "little for it"
        )

    def _feed(self, worker: _Worker, waiting: deque[int], items: Sequence[tuple[str, dict[str, Any]]]) -> None:
        if worker.busy or worker.ended or not waiting:
            return
        for _ in range(min(CHUNK, -(-len(waiting) // len(self._workers)))):
            if worker.held and not self._alone.isdisjoint((worker.held[0], waiting[0])):
                break
            worker.held.append(waiting.popleft())
        worker.outbox += pickle.dumps([(self._items_before + item, *items[item]) for item in worker.held])
        worker.since = time.monotonic()

    def _exchange(self, results: dict[int, Graded]) -> None:
        """Writes pending items to the workers' pipes and reads answers. Waits at most until the earliest deadline of a
        worker."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(_fd(worker.process.stdout), selectors.EVENT_READ, worker)
                if worker.outbox:
                    selector.register(_fd(worker.process.stdin), selectors.EVENT_WRITE, worker)
            deadlines = [w.since + self._limit(w) for w in self._workers if w.busy]
            for key, events in selector.select(max(0.0, min(deadlines, default=0.0) - time.monotonic())):
                if events & selectors.EVENT_WRITE:
                    _send(key.data)
                else:
                    self._receive(key.data, results)

    def _receive(self, worker: _Worker, results: dict[int, Graded]) -> bool:
        """Reads answers from a worker. Returns False if there was nothing to read or the worker has ended, otherwise
        True."""
        try:
            data = os.read(_fd(worker.process.stdout), PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            worker.ended = "ended"
        worker.inbox += data
        *answers, worker.inbox = worker.inbox.split(b"\n")
        for answer in answers:
            if worker.ended:
                break
            worker.since = time.monotonic()
            try:
                self._answer(worker, json.loads(answer), results)
            except ValueError:
                worker.ended = "wrote something else than answers into the pool's pipe"
        return not worker.ended

    def _answer(self, worker: _Worker, answer: Any, results: dict[int, Graded]) -> None:
        if not worker.ready:
            worker.ready, worker.together = answer in (None, TOGETHER), answer == TOGETHER
            if worker.ready:
                self._proven, self._failed_starts = True, 0
            else:
                worker.refusal, worker.trace = answer
                worker.ended = worker.refusal
            return
        if answer == APART:
            worker.apart = True
            return
        serial, score, detail, seconds, exhausted, metrics, trace = answer
        if not worker.held or serial != self._items_before + worker.held[0]:
            raise ValueError(f"an answer to item {serial}, which the worker does not hold")
        if score is not None:
            self._least = min(self._least, score)
        results[worker.held.popleft()] = Graded(
            Outcome.ERROR if score is None else Outcome.SCORE, score or 0.0, detail, seconds, cut_off=exhausted,
            threshold=self.reward.threshold, metrics=metrics, trace=trace,
        )  # fmt: skip
        if exhausted:
            worker.ended = EXHAUSTED

    def _limit(self, worker: _Worker) -> float:
        """Returns the time limit in seconds of the worker's current task: its start, the grading of one item, or the
        grading of a batch."""
        if not worker.ready:
            return START_TIMEOUT_S
        return self.reward.timeout_s * (len(worker.held) if worker.together else 1)

    def _is_late(self, worker: _Worker) -> bool:
        return worker.busy and time.monotonic() > worker.since + self._limit(worker)

    def _replace(self, results: dict[int, Graded], waiting: deque[int]) -> None:
        """Replaces workers that are dead or past their deadline.

        Raises RewardFailure if a worker could not be started: at once if no worker has ever imported the function,
        otherwise (or if the worker was killed from outside) after START_TRIES consecutive failed starts.

        The first item that a replaced worker holds gets a failed result, and the worker's other items return to the
        front of the queue `waiting`. If the worker graded several items as one batch, all items return to the queue and
        each is graded alone. If the worker was killed from outside, such as by the kernel for lack of memory, the first
        item is graded a second time.
        """
        for i, worker in enumerate(self._workers):
            dead = worker.process.poll() is not None
            while (dead or self._is_late(worker)) and not worker.ended and self._receive(worker, results):
                continue  # reads the answers that the worker sent before its end, which are valid
            ended = worker.ended or ("ended" if dead else "")
            if not ended and not self._is_late(worker):
                continue
            taken = time.monotonic() - worker.since
            _kill(worker)
            status = worker.process.returncode
            # killed from outside, not because of the item that it graded
            killed = ended == "ended" and status == -signal.SIGKILL
            if not worker.ready:
                self._failed_starts += 1
                if not (self._proven or killed) or self._failed_starts >= START_TRIES:
                    raise _failure(self._why_not(worker, status), worker.trace)
            if worker.together and len(worker.held) > 1:
                self._alone.update(worker.held)
            elif worker.held and killed and worker.held[0] not in self._again:
                self._again.add(worker.held[0])
            elif worker.held and ended != EXHAUSTED:
                results[worker.held.popleft()] = (
                    Graded(Outcome.ERROR, detail=f"its worker {ended} (status {status})", seconds=taken, cut_off=True)
                    if ended
                    else Graded(
                        Outcome.TIMEOUT,
                        detail=f"no answer within reward.timeout_s = {self.reward.timeout_s}",
                        seconds=taken,
                        cut_off=True,
                    )
                )
            waiting.extendleft(reversed(worker.held))
            self._workers[i] = self._start()


def _open_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts the parent process of a worker (reaper.py) in a new session.

    Retries if the machine has no memory or process ids left. Raises RewardFailure after START_TRIES attempts.
    """
    for left in reversed(range(START_TRIES)):
        try:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except OSError as error:
            if not left:
                raise RewardFailure(f"no reward worker can be started here: {error}; lower reward.workers") from error
            time.sleep(START_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _known_answer(payload: Mapping[str, Any]) -> str | None:
    """Returns a key that identifies a problem and its known answer; None for a problem without a known answer."""
    return repr(sorted((key, repr(value)) for key, value in payload.items())) if "answer" in payload else None


def check_failures(
    graded: Sequence[Graded], max_share: float, *, what: str = "gradings",
    cure: str = "Mend the reward, or raise reward.timeout_s or reward.max_failure_share",
) -> None:  # fmt: skip
    """Raises RewardFailure if more than the share `max_share` of the gradings failed. Failures that the response caused
    (`Graded.excused`) are not counted.

    Without this check, a run could learn from rewards of 0 that no answer deserved. A single failure among several
    gradings is always allowed, unless `max_share` is 0. `what` and `cure` are parts of the error message: a name for
    the gradings, and advice how to correct the failures.
    """
    failed = [g for g in graded if g.outcome is not Outcome.SCORE and not g.excused]
    forgiven = 1 if max_share > 0 and len(graded) > 1 else 0
    if len(failed) <= max(forgiven, max_share * len(graded)):
        return
    late = sum(g.outcome is Outcome.TIMEOUT for g in failed)
    raise _failure(
        f"{len(failed)} of {len(graded)} {what} failed ({late} time-outs, {len(failed) - late} errors), more than "
        f"reward.max_failure_share = {max_share}; the first: {failed[0].detail}. {cure}",
        failed[0].trace,
    )


def _failure(message: str, trace: str) -> RewardFailure:
    """Returns a RewardFailure whose text is `message`, followed by `trace`, the traceback of the user's code."""
    error = RewardFailure(message)
    if trace:
        error.add_note(trace)
    return error


def _send(worker: _Worker) -> None:
    try:
        written = os.write(_fd(worker.process.stdin), worker.outbox[:PIPE_BYTES])
    except BlockingIOError:
        return
    except BrokenPipeError:  # the worker died; `_receive` detects that when it reads from the pipe
        worker.outbox.clear()
        return
    del worker.outbox[:written]


def _fd(pipe: Any) -> int:
    return pipe.fileno()


def _kill(worker: _Worker) -> None:
    """Ends a worker and all processes that it started, and waits for them.

    The exit status of a worker that has just ended by itself is kept.
    """
    worker.process.send_signal(reaper.LEAVE)
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(END_S)
    # kills the remaining processes, in case the parent process (reaper.py) was killed
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            pipe.close()
