"""Where a request goes: to the least loaded server that serves, rather to one that holds its prefix; elsewhere when a
server fails it.
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_rl.engines.base import EngineError
from megatron_rl.engines.launch import tail
from megatron_rl.engines.pool.membership import Member, Members, Waiting
from megatron_rl.engines.server import ServerLost

PREFIX_SHARE = 0.25  # of a server's places: a prefix is worth no more of them in use there than elsewhere
FAILED_S = (
    5.0  # how long others are preferred to a server that failed a request: it may seem idle because it fails at once
)
LONGEST_PAUSE_S = 60.0  # between two attempts, when all servers ask to be left alone for a while

T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[T]):
    """A request that any server may answer. `ask` gets the server and the version of its weights; it raises ServerLost
    when another one should answer. `sequences`: how many the server works on at once for it. `prefer`: the server that
    holds its prefix.
    """

    ask: Callable[[Member, int], T]
    sequences: int
    prefer: Member | None = None


class Outstanding:
    """Tasks that one caller waits for, in the order in which they end."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[concurrent.futures.Future[Any] | None] = queue.SimpleQueue()
        self.over = False  # nobody waits for it any more

    def add(self, task: concurrent.futures.Future[Any]) -> None:
        task.add_done_callback(self._done.put)

    def wake(self) -> None:
        """Lets whoever waits look around."""
        self._done.put(None)

    def next(self, timeout_s: float) -> concurrent.futures.Future[Any] | None:
        """Returns a task that has ended, or None when none does in time."""
        try:
            return self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Dispatcher:
    """Sends requests to the members, each from a thread of its own.

    `tend` is called whenever a caller waits. `refitting` tells whether servers are taking weights, so that some will
    serve soon. `hopeless` tells why no server will come any more, or None.
    """

    def __init__(
        self, members: Members, look_s: float, *, tend: Callable[[], None], refitting: Callable[[], bool],
        hopeless: Callable[[], str | None],
    ) -> None:  # fmt: skip
        self.members, self.failures = members, 0  # failures: requests that were sent again
        self._look_s, self._tend, self._refitting, self._hopeless = look_s, tend, refitting, hopeless
        limits = members.limits
        self._threads = concurrent.futures.ThreadPoolExecutor(
            limits.servers * limits.at_once, f"requests-{members.role}"
        )

    def close(self) -> None:
        """Waits for the threads, whose requests have failed: the members were closed before."""
        self._threads.shutdown(cancel_futures=True)

    def submit(self, work: Outstanding, task: Callable[..., Any], *arguments: Any) -> None:
        """Runs a task on a thread, for `work`. Raises EngineError when the members are closed."""
        self.members.check_open()
        work.add(self._threads.submit(task, *arguments))

    def waiting(self) -> Waiting:
        """Returns the patience of one caller."""
        return Waiting(self.members, self._hopeless)

    def wait(self, work: Outstanding, waiting: Waiting | None) -> Any:
        """Looks after the servers and waits a moment -> what a task found, or None when none ended.

        Raises what the task raised; EngineError when there is no point in waiting. `waiting` is None when nothing is
        under way.
        """
        self._tend()
        if waiting is not None:
            if self.members.serving() or self._refitting():  # servers that take weights are there
                waiting.over()
            else:
                waiting.on()
        task = work.next(self._look_s)
        self.members.check_open()
        return None if task is None else task.result()

    def send(self, work: Outstanding, request: Request[T]) -> tuple[T, Member]:
        """Asks until some server answers -> its answer, and which it was. Runs on a thread.

        Raises EngineError when too many living ones fail, and when nobody waits for `work` any more; RequestRefused for
        a request that no server would take.
        """
        failures: list[str] = []
        failed: set[Member] = set()
        while True:
            member, version = self._take(work, request, failed)
            try:
                return request.ask(member, version), member
            except ServerLost as error:
                self.members.look_after(member, str(error))
                served = self.members.serves(member, version)  # else it was not the request's fault
                with self.members.change:
                    self.failures += 1
                    member.failed = time.monotonic() if served else member.failed
                if served and not self.members.closing.is_set():
                    failures.append(str(error))
                    failed.add(member)
                if len(failures) >= self.members.limits.attempts:
                    raise EngineError(_too_often(failures, member)) from error
                pause_s = error.retry_after_s * 2.0 ** (len(failures) - 1)
            finally:
                with self.members.change:
                    member.load, member.requests = member.load - request.sequences, member.requests - 1
                    self.members.change.notify(request.sequences)  # of hundreds that wait: no more can begin now
            self._pause(pause_s, failed)

    def _take(self, work: Outstanding, request: Request[T], failed: set[Member]) -> tuple[Member, int]:
        """Waits for a server with room and takes it -> the server, and the version of its weights. Takes one that has
        `failed` only when there is no other.
        """
        members, at_once = self.members, self.members.limits.at_once
        with members.change:
            while True:
                members.check_open()
                if work.over:
                    raise EngineError("nobody waits for this request any more")
                serving = members.serving()
                better = [m for m in serving if m not in failed] or serving
                free = [m for m in better if not m.load or m.load + request.sequences <= at_once]
                if free:
                    member = _best(free, request.prefer, at_once)
                    member.load, member.requests = member.load + request.sequences, member.requests + 1
                    return member, members.version
                members.change.wait(self._look_s)  # who was woken may not be who can begin

    def _pause(self, pause_s: float, failed: set[Member]) -> None:
        """Waits before the next attempt, as long as servers ask for, when all of them have failed."""
        if pause_s and all(m in failed for m in self.members.serving()):
            self.members.closing.wait(min(pause_s, LONGEST_PAUSE_S))


def _best(free: list[Member], prefer: Member | None, at_once: int) -> Member:
    """Returns the least loaded server that has not failed lately; rather the preferred one, unless it is much more
    loaded.
    """
    now = time.monotonic()
    least = min(free, key=lambda m: (now - m.failed < FAILED_S, m.load, m.listing.replica))
    if prefer is not None and prefer in free and prefer.load - least.load <= PREFIX_SHARE * at_once:
        return prefer
    return least


def _too_often(failures: list[str], member: Member) -> str:
    said = f"a request failed {len(failures)} times: {'; '.join(failures)}"
    log = member.listing.log
    return f"{said}; the end of {log}:\n{tail(Path(log))}" if log else said
