"""Runs a reward function in worker processes with a memory limit, and kills a worker that exceeds the time limit.

Failed gradings are counted, and too many of them stop the run (`check_failures`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron_rl.config.schema import Reward
from megatron_rl.rewards import reaper
from megatron_rl.rewards.grading_worker import APART, TOGETHER
from megatron_rl.types import CUT_OFF, Outcome, is_correct

# A call of `GradePool.grade` grades at most this many items first. They are spread evenly over all items of the call.
FIRST = 8
CHUNK = 16  # maximum number of responses that are sent to a worker at once
START_TIMEOUT_S = 120.0  # time limit in seconds for a worker process to import the reward function's module
# The pool gives up after this many consecutive failed starts of workers, if any worker has ever started successfully.
START_TRIES = 4
START_PAUSE_S = 1.0  # pause in seconds between two attempts to start a process
RECEIVED_BYTES = 1 << 16  # maximum number of bytes of one read from the socket to a worker process
# time limit in seconds for a worker's parent process (reaper.py) to end all processes that the worker started
END_S = 10.0
PACKAGE = Path(reaper.__file__).parents[1]
START = (  # this search path is only used to import megatron_rl; the pool sends the sys.path for all other imports
    f"import sys; sys.path.append({str(PACKAGE.parent)!r}); from megatron_rl.rewards.reaper import main; "
    "sys.path.pop(); main()"
)


class RewardFailure(RuntimeError):
    """Raised when the reward function cannot be imported, or when so many gradings fail that the remaining scores
    should not be trained on."""


@dataclass(frozen=True)
class Graded:
    """The result of grading one response. `score` is only valid if the outcome is SCORE. `detail` is the error message
    of a failed grading.

    `cut_off`: whether the grading was ended by the time limit, the memory limit or the death of the worker process.
    `by_response`: whether the response is taken for the cause of the cut-off, because right after it the function
    graded the problem's known answer as correct. `reward.cut_off` then decides whether the result has the lowest score
    or no score. `repeated`: whether the first grading of the response failed, and this object is the result of a second
    grading.
    """

    outcome: Outcome
    score: float = 0.0
    detail: str = ""
    seconds: float = 0.0
    cut_off: bool = False
    by_response: bool = False
    threshold: float | None = 0.5  # the middle of the scale, see types.is_correct; None if no scale is declared
    # additional numbers that the reward function returned, by name
    metrics: Mapping[str, float] = field(default_factory=dict)
    trace: str = ""  # the traceback, if the reward function raised an error
    repeated: bool = False

    @property
    def failed(self) -> bool:
        """Returns whether the grading has no score, and the response is not taken for the cause (`by_response`)."""
        return self.outcome is not Outcome.SCORE and not self.by_response

    @property
    def label(self) -> str:
        """Returns `cut_off` if the response is taken for the cause of a cut-off, otherwise the name of the outcome."""
        return CUT_OFF if self.by_response else self.outcome.value

    @classmethod
    def of_label(cls, label: str, score: float, detail: str) -> Graded:
        """Returns the result of a grading that was stored with its label."""
        by_response = label == CUT_OFF
        outcome = Outcome.SCORE if by_response else Outcome(label)
        return cls(outcome, score, detail, cut_off=by_response, by_response=by_response)

    @property
    def correct(self) -> bool | None:
        """Returns whether the response has a score that means a correct answer; None if the scale of the scores is
        unknown (see types.is_correct)."""
        return is_correct(self.score, self.threshold) if self.outcome is Outcome.SCORE else False


class _Worker:
    """A worker of the pool: a process, which is replaced when it ends, and a thread that communicates with the process.

    The thread must live as long as the process, because on Linux the parent of the process (reaper.py) gets a signal to
    end when the thread that started the parent ends.
    """

    def __init__(self, task: bytes) -> None:
        """`task`: the pickled first message to the process, which names the reward function (see grading_worker.py)."""
        self.thread = ThreadPoolExecutor(1, "reward-worker")
        # the worker's parent process (reaper.py): kills the worker's processes and ends with the worker's exit status
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False  # whether the process has imported the reward function
        # whether the function grades a whole chunk of items in one call; a crash then has no known item as its cause
        self.together = False
        self.closed = False
        self._task = task
        self._files = contextlib.ExitStack()  # the open socket to the process
        self._heard = b""  # bytes that were received from the process and not yet returned by `hear`
        self._lock = threading.Lock()  # held while a process is started

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts a process, unless one is running. Must be called in the worker's thread.

        Raises RewardFailure if no process can be started, or if the worker is closed.
        """
        with self._lock:
            if self.closed:
                raise RewardFailure("the pool of reward workers was closed")
            if self.alive:  # nothing to do: the process was started again at the end of the pool's previous call
                return
            self._files.close()
            self._socket, worker_socket = map(self._files.enter_context, socket.socketpair())
            self.process, self.ready, self._heard = _open_process(worker_socket), False, b""
            worker_socket.close()
        with contextlib.suppress(OSError):  # `hear` later reports a process that has ended or does not read
            self.say(self._task, START_TIMEOUT_S)

    def say(self, message: bytes, timeout_s: float) -> None:
        """Sends a message to the process. Raises TimeoutError after `timeout_s` seconds, and ConnectionError if the
        process has ended."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(message)

    def hear(self, timeout_s: float) -> Any:
        """Returns the next message of the process, a parsed JSON line. Raises TimeoutError after `timeout_s` seconds,
        ConnectionError if the process has ended, and ValueError if the line is not JSON."""
        ends_at = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            if (wait_s := ends_at - time.monotonic()) <= 0:  # the time limit also applies while the process sends bytes
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            self._socket.settimeout(wait_s)
            if not (data := self._socket.recv(RECEIVED_BYTES)):
                raise ConnectionError("the process has ended")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def kill(self) -> int | None:
        """Ends the process and all processes that it started, and waits for their end. Returns the exit status of the
        process, or None if no process was ever started. If the process had already ended, the returned status is the
        one with which it ended."""
        if self.process is None:
            return None
        self.process.send_signal(reaper.LEAVE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        # kills the remaining processes, in case the parent process (reaper.py) was killed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def leave(self) -> None:
        """Asks the process to end, and returns without waiting. After this call, `start` raises RewardFailure."""
        with self._lock:
            self.closed = True
        if self.process is not None:
            self.process.send_signal(reaper.LEAVE)

    def close(self) -> None:
        """Ends the process and the thread. `leave` must be called before."""
        self.kill()
        self.thread.shutdown()
        self._files.close()


@dataclass
class _Call:
    """The state of one call of the pool: the items (responses) to grade, their results, and a queue of the items that
    are still to be graded. The threads of all workers use the same object."""

    items: Sequence[tuple[str, dict[str, Any]]]
    results: Sequence[Future[Graded]]
    # Queue of chunks. A chunk has the indices of the items that are sent to a worker together.
    # At the end of the call, one None for each worker is put into the queue, which ends the worker's loop.
    chunks: SimpleQueue[deque[int] | None] = field(default_factory=SimpleQueue)
    # indices of the items that are graded a second time because their worker was killed from outside
    again: set[int] = field(default_factory=set)

    def end(self, workers: int) -> None:
        for _ in range(workers):
            self.chunks.put(None)


class GradePool:
    """A pool of worker processes that run one reward function. Its methods must not be called concurrently.

    Example: `with GradePool(config.reward) as pool: pool.grade(responses, payloads)`. The workers start at the first
    call of `grade` or `start`. They import the function from this process's working directory and sys.path.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._workers: list[_Worker] = []
        # number of items graded in earlier calls; added to an item's index, it gives a unique serial number
        self._items_before = 0
        self._proven = False  # whether any worker has ever imported the reward function
        self._failed_starts = 0  # number of consecutive failed starts of workers
        self._least = reward.bounds[0]  # minimum of reward.range, or the lowest returned score if that is lower

    def __enter__(self) -> GradePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers and all processes that the workers started. The next call of `grade` starts new workers."""
        for worker in self._workers:
            worker.leave()
        for worker in self._workers:
            worker.close()
        self._workers = []

    def start(self) -> None:
        """Starts the workers without waiting until they have imported the function."""
        self._ensure_workers(self.reward.workers)

    def grade(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        """Grades B responses and returns B results, in order. `payloads`: the data of each response's problem, such as
        the known answer.

        A failed grading is repeated once, because its cause may be temporary, such as a server that was down. If all of
        more than FIRST gradings failed, no grading is repeated.

        A model may generate a response that no reward function can grade in time. Therefore, if a grading was cut off
        (by the time limit, the memory limit or a crash), the problem's known answer is graded at once. If the function
        grades the known answer as correct, the response is taken for the cause, and `reward.cut_off` determines the
        result: "wrong" gives the response the lowest score, "drop" gives it no score. A server that hangs for some
        responses looks the same, so `check_failures` counts these gradings too.

        Raises RewardFailure if the function cannot be imported. Also raises RewardFailure if the gradings that are
        tried first (at most FIRST) are all cut off and no response is taken for the cause, because thousands of
        time-outs would take hours.
        """
        count = len(responses)
        first = range(0, count, -(-count // FIRST)) if count > FIRST and self.reward.max_failure_share < 1 else range(0)
        gradings = dict(zip(first, self._grade(*_chosen(first, responses, payloads)), strict=True))
        if gradings and all(grading.cut_off for grading in gradings.values()):
            self._blame(gradings, payloads)
            if not any(grading.by_response for grading in gradings.values()):
                tried = [*gradings.values()]
                check_failures(tried, 0.0, what="gradings, which were tried before the others,")
        rest = [i for i in range(count) if i not in gradings]
        gradings |= zip(rest, self._grade(*_chosen(rest, responses, payloads)), strict=True)
        failed = [i for i in range(count) if gradings[i].failed or gradings[i].by_response]
        if failed and (len(failed) < count or count <= FIRST):
            again = self._grade(*_chosen(failed, responses, payloads))
            gradings |= {i: replace(grading, repeated=True) for i, grading in zip(failed, again, strict=True)}
        self._blame(gradings, payloads)
        return [gradings[i] for i in range(count)]

    def _blame(self, gradings: dict[int, Graded], payloads: Sequence[Mapping[str, Any]]) -> None:
        """Grades the known answers of the problems with gradings that were cut off. If a known answer is graded as
        correct, applies `reward.cut_off` to these gradings. `gradings`: {index: grading}, changed in place. `payloads`:
        the data of the problems, by index.
        """
        places = [i for i, g in gradings.items() if g.cut_off and not g.by_response and "answer" in payloads[i]]
        if not places:
            return
        keys = {i: repr(sorted((name, repr(value)) for name, value in payloads[i].items())) for i in places}
        probes = {key: payloads[i] for i, key in keys.items()}
        texts = [self.reward.answer_format.replace("{answer}", str(payload["answer"])) for payload in probes.values()]
        probed = dict(zip(probes, self._grade(texts, [*probes.values()]), strict=True))
        middle = sum(self.reward.bounds) / 2
        for i, key in keys.items():
            if probed[key].outcome is not Outcome.SCORE or probed[key].score < middle:
                continue
            grading = replace(gradings[i], by_response=True)
            if self.reward.cut_off == "wrong":
                grading = replace(grading, outcome=Outcome.SCORE, score=self._least, threshold=self.reward.threshold)
            gradings[i] = grading

    def _grade(self, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        """Runs the reward function on B responses in the workers. Returns B results, in order."""
        items = [(response, dict(payload)) for response, payload in zip(responses, payloads, strict=True)]
        call = _Call(items, [Future() for _ in items])
        workers = min(self.reward.workers, len(items))
        start = 0
        while start < len(items):  # chunks become smaller, so that all workers end at about the same time
            end = start + min(CHUNK, -(-(len(items) - start) // workers))
            call.chunks.put(deque(range(start, end)))
            start = end
        try:
            self._ensure_workers(workers)
            for worker in self._workers:
                worker.thread.submit(self._work, worker, call)
            graded = [result.result() for result in call.results]
        except BaseException:  # ends the workers, so that the next call does not receive results of this call
            call.end(len(self._workers))
            self.close()
            raise
        call.end(len(self._workers))
        self._items_before += len(items)
        self._least = min([self._least, *(grading.score for grading in graded if grading.outcome is Outcome.SCORE)])
        return graded

    def _ensure_workers(self, count: int) -> None:
        """Adds workers until there are at least `count`, and replaces the processes that have ended."""
        working_directory = os.getcwd()
        # Without an entry for the working directory, the directory comes last, behind the installed packages.
        paths = [*dict.fromkeys([*(path or working_directory for path in sys.path), working_directory])]
        bounds = None if self.reward.threshold is None else self.reward.bounds
        task = pickle.dumps((self.reward.target, self.reward.args, self.reward.memory_mib, bounds, paths))
        self._workers += [_Worker(task) for _ in range(len(self._workers), count)]
        for started in [worker.thread.submit(worker.start) for worker in self._workers if not worker.alive]:
            started.result()

    def _work(self, worker: _Worker, call: _Call) -> None:
        """Grades items of a call with one worker until the call is over. Runs in the worker's thread."""
        try:
            self._make_ready(worker)
            while held := call.chunks.get():
                if not self._grade_held(worker, held, call):
                    worker.start()
                    self._make_ready(worker)
        except BaseException as error:  # the error is raised again in the thread that waits for the results
            for result in call.results:
                with contextlib.suppress(InvalidStateError):
                    result.set_exception(error)

    def _make_ready(self, worker: _Worker) -> None:
        """Waits until a worker's process has imported the reward function, and starts it again if it has ended.

        Raises RewardFailure after START_TRIES consecutive failed starts. If no worker has ever imported the function,
        raises RewardFailure after the first failed start, unless the process was killed from outside.
        """
        while not worker.ready:
            refusal, trace = "", ""
            try:
                answer = worker.hear(START_TIMEOUT_S)
                worker.ready, worker.together = answer in (None, TOGETHER), answer == TOGETHER
                if worker.ready:
                    self._proven, self._failed_starts = True, 0
                    return
                refusal, trace = answer
            except (OSError, ValueError):
                pass
            status = worker.kill()
            self._failed_starts += 1
            killed = status == -signal.SIGKILL and not refusal
            if not (self._proven or killed) or self._failed_starts >= START_TRIES:
                raise _failure(self._why_not(refusal, status), trace)
            worker.start()

    def _grade_held(self, worker: _Worker, held: deque[int], call: _Call) -> bool:
        """Grades a chunk of items, `held`, with a worker. Returns whether the worker's process is still alive.

        If the process ends or exceeds the time limit, it is killed. The first item without a result gets a failed
        result, and the other items without a result return to the queue. There are two exceptions. If the process
        graded several items as one batch, all items return to the queue and each is graded alone. If the process was
        killed from outside, for example by the kernel for lack of memory, the first item is graded a second time.
        """
        limit_s, since = self.reward.timeout_s, time.monotonic()
        exhausted, ended = False, ""
        try:
            items = [(self._items_before + item, *call.items[item]) for item in held]
            worker.say(pickle.dumps(items), limit_s * (len(held) if worker.together else 1))
            while held and not exhausted:
                since = time.monotonic()
                answer = worker.hear(limit_s * (len(held) if worker.together else 1))
                if answer == APART:
                    break
                exhausted = self._store_answer(held, answer, call)
            if not exhausted:
                for item in held:
                    call.chunks.put(deque([item]))
                return True
        except TimeoutError:
            pass
        except OSError:
            ended = "ended"
        except ValueError:
            ended = "sent something else than answers to the pool"
        seconds, status = time.monotonic() - since, worker.kill()
        killed = ended == "ended" and status == -signal.SIGKILL  # something outside the pool killed the worker
        if worker.together and len(held) > 1:
            for item in held:
                call.chunks.put(deque([item]))
            return False
        if held and killed and held[0] not in call.again:
            call.again.add(held[0])
        elif held and not exhausted:
            outcome, detail = Outcome.TIMEOUT, f"no answer within reward.timeout_s = {limit_s}"
            if ended:
                outcome, detail = Outcome.ERROR, f"its worker {ended} (status {status})"
            call.results[held.popleft()].set_result(Graded(outcome, detail=detail, seconds=seconds, cut_off=True))
        if held:
            call.chunks.put(held)
        return False

    def _store_answer(self, held: deque[int], answer: Any, call: _Call) -> bool:
        """Stores a worker's answer as the result of the first item in `held`, and removes this item from `held`.
        Returns whether the worker ran out of memory while it graded this item."""
        serial, score, detail, seconds, exhausted, metrics, trace = answer
        if serial != self._items_before + held[0]:
            raise ValueError(f"an answer to item {serial}, which the worker does not hold")
        outcome = Outcome.ERROR if score is None else Outcome.SCORE
        threshold = self.reward.threshold
        graded = Graded(outcome, score or 0.0, detail, seconds, exhausted, False, threshold, metrics, trace)
        call.results[held.popleft()].set_result(graded)
        return exhausted

    def _why_not(self, refusal: str, status: int | None) -> str:
        """Returns the error message for a process that could not be started.

        `refusal`: reason why the process cannot use the reward function, or "". `status`: exit status of the process.
        """
        if refusal:
            return (
                f"reward.target {self.reward.target!r} cannot be used: {refusal}; it has the form package.module:name"
            )
        return (
            f"a reward worker did not start within {START_TIMEOUT_S:.0f} s (status {status}): importing "
            f"{self.reward.target!r} ends the process or hangs, or reward.memory_mib = {self.reward.memory_mib} is too "
            "little for it"
        )


def _open_process(end: socket.socket) -> subprocess.Popen[bytes]:
    """Starts the parent process of a worker (reaper.py) in a new session. `end`: the socket that the worker will use.

    Retries if the machine has no memory or process ids left. Raises RewardFailure after START_TRIES attempts.
    """
    command = [sys.executable, "-P", "-c", START]  # -P keeps the working directory out of the search path
    tries = 0
    while True:
        try:
            return subprocess.Popen(command, stdin=end.fileno(), stdout=end.fileno(), start_new_session=True)
        except OSError as error:
            tries += 1
            if tries == START_TRIES:
                raise RewardFailure(f"no reward worker can be started here: {error}; lower reward.workers") from error
            time.sleep(START_PAUSE_S)


def _chosen(places: Iterable[int], *columns: Sequence[Any]) -> list[list[Any]]:
    return [[column[i] for i in places] for column in columns]


def check_failures(
    graded: Sequence[Graded], max_share: float, *, what: str = "gradings",
    cure: str = "Mend the reward, or raise reward.timeout_s or reward.max_failure_share",
) -> None:  # fmt: skip
    """Raises RewardFailure if more than the share `max_share` of the gradings failed or were cut off.

    Gradings that a response is taken to have cut off (`Graded.by_response`) are counted, because a server that hangs
    for some responses cannot be told from such responses. A single failure among several gradings is always allowed,
    unless `max_share` is 0. `what` and `cure` are parts of the error message: a name for the gradings, and advice how
    to correct the failures.
    """
    failed = [g for g in graded if g.failed or g.by_response]
    forgiven = 1 if max_share > 0 and len(graded) > 1 else 0
    if len(failed) <= max(forgiven, max_share * len(graded)):
        return
    late = sum(g.failed and g.outcome is Outcome.TIMEOUT for g in failed)
    counts, hint = f"{late} time-outs, {sum(g.failed for g in failed) - late} errors", ""
    if cut_off := sum(g.by_response for g in failed):
        counts += f", {cut_off} cut off although their problems' known answers are graded in time"
        hint = (
            ". A service that hangs for some responses looks like this; only if the responses themselves are the "
            "cause, raise reward.max_failure_share"
        )
    raise _failure(
        f"{len(failed)} of {len(graded)} {what} failed ({counts}), more than reward.max_failure_share = {max_share}; "
        f"the first: {failed[0].detail}. {cure}{hint}",
        failed[0].trace,
    )


def _failure(message: str, trace: str) -> RewardFailure:
    """Returns a RewardFailure whose text is `message`, followed by `trace`, the traceback of the user's code."""
    error = RewardFailure(message)
    if trace:
        error.add_note(trace)
    return error
