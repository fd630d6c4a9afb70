"""Sends each request to the least loaded server, or to the server that has the request's prefix in its cache. If a
server fails a request, sends the request to another server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.pool.membership import Member, Members, Waiting
from megatron_rl.engines.pool.request_queue import RequestQueue, Waiter
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import EngineError
from megatron_rl.engines.server_log import end_of
from megatron_rl.key_value_store.store_server import descriptors
from megatron_rl.lib.loop_thread import LoopThread
from megatron_rl.network.retries import pause_s

# If this many servers are lost while they work on the same request, this request is considered the cause.
LOST_UNDER = 10
LOOKERS = 8  # maximum number of servers that are checked concurrently, each after it failed a request
DEADLY = (
    "{} servers were lost while they worked on one request ({}), so that it may be what kills them; look for the reason"
    " in their logs, lower engine.max_sequences or engine.max_model_len where memory ran out, and start the run again:"
    " {}"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[T]):
    """A request that any server may answer.

    `ask`: coroutine function that sends the request, given the server and its weight version. It raises ServerLost if
    the request should be sent to another server.
    `what`: description of the request, for error messages.
    `sequences`: number of sequences that a server works on concurrently for this request.
    `prefer`: the server that has the request's prefix in its cache.
    `priority`: requests with a lower number are served first.
    """

    ask: Callable[[Member, int], Awaitable[T]]
    what: str
    sequences: int
    prefer: Member | None = None
    priority: int = 0


class Outstanding:
    """The unfinished and finished tasks of one caller. `next` returns finished tasks in the order in which they end."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[concurrent.futures.Future[Any] | None] = queue.SimpleQueue()
        self.over = False  # True if no caller waits for the tasks any more

    def add(self, task: concurrent.futures.Future[Any]) -> None:
        task.add_done_callback(self._done.put)

    def wake(self) -> None:
        """Wakes the caller that waits in `next`, so that the caller checks whether it still has to wait."""
        self._done.put(None)

    def next(self, timeout_s: float) -> concurrent.futures.Future[Any] | None:
        """Returns a finished task. Returns None if no task finishes within `timeout_s` or `wake` is called."""
        with contextlib.suppress(queue.Empty):
            return self._done.get(timeout=timeout_s)


class Dispatcher:
    """Sends requests to the servers of a pool (its members). All requests run on one event loop, in a separate thread.

    `tend`: called repeatedly in the thread of a caller that waits; updates the servers.
    `shared`: the GPUs that the members share with servers of other roles.
    """

    def __init__(self, members: Members, look_s: float, *, tend: Callable[[], None], shared: SharedGpus) -> None:
        self.members, self.failures = members, 0  # failures: number of times that a request failed and was sent again
        self.full = FullPrompts(members.role)
        self._look_s, self._tend = look_s, tend
        descriptors()  # increases the limit of open file descriptors: each request in progress has a connection
        self._queue = RequestQueue(members, shared)
        self._lookers = concurrent.futures.ThreadPoolExecutor(LOOKERS, f"looks-{members.role}")
        self._looks: dict[Member, asyncio.Future[None]] = {}  # checks in progress
        self._thread = LoopThread(f"requests-{members.role}")
        self._loop = self._thread.loop
        self._loop.call_soon_threadsafe(self._tick)
        members.changed = self.look
        shared.add(members.role, self.look)

    def close(self) -> None:
        """Cancels the requests in progress and stops the thread. Close the pool's members first, which makes the
        requests fail.
        """
        self._thread.close()
        self._lookers.shutdown(cancel_futures=True)

    def submit(self, work: Outstanding, task: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        """Starts a task on the event loop and adds it to the caller's tasks. `task`: a coroutine function, which gets
        the `arguments`. `work`: the tasks of the caller. Raises EngineError if the pool is closed.
        """
        self.members.check_open()
        work.add(self._thread.start(task(*arguments)))

    def look(self) -> None:
        """Makes the requests in the queue look for a free server again. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed, so that no request is waiting
            self._loop.call_soon_threadsafe(self._queue.look)

    def wait(self, work: Outstanding, waiting: Waiting | None) -> Any:
        """Updates the servers (`tend`) and waits briefly for a task of the caller. Returns the result of a finished
        task, or None if no task has finished.

        `work`: the tasks of the caller. `waiting`: limits how long the caller waits for a server; None if no request is
        in progress. Raises the exception of the task, or EngineError if waiting for a server is pointless (see
        `Waiting.on`) or the pool is closed.
        """
        self._tend()
        if waiting is not None:
            if self.members.serving() or self.members.refitting:  # servers that receive weights are alive
                waiting.over()
            else:
                waiting.on()
        task = work.next(self._look_s)
        self.members.check_open()
        return None if task is None else task.result()

    async def send(self, work: Outstanding, request: Request[T]) -> tuple[T, Member]:
        """Sends a request to one server after another until a server answers it. Returns the response and the server.
        Must run on the dispatcher's event loop.

        Raises EngineError if live servers fail the request `limits.attempts` times, if LOST_UNDER servers are lost
        while they work on the request, or if the caller has stopped waiting. `work`: the tasks of the caller. Raises
        RequestRefused if the request is invalid for every server.
        """
        failures: list[str] = []
        lost = 0  # number of servers that were lost while they worked on this request
        failed: set[Member] = set()
        while True:
            over, priority = lambda: work.over, request.priority
            place = Waiter(request.sequences, failed, request.prefer, over=over, priority=priority)
            member, version = await self._queue.wait(place)
            try:
                return await request.ask(member, version), member
            except ServerLost as error:
                await self._look_after(member, str(error))
                # False if the server was lost or got new weights. Such a failure is not an attempt of the request.
                served = self.members.serves(member, version)
                with self.members.change:
                    self.failures += 1
                    member.failed = time.monotonic() if served else member.failed
                if served and not self.members.closing.is_set():
                    failures.append(str(error))
                    failed.add(member)
                lost += member.lost is not None
                said = None
                if len(failures) >= self.members.limits.attempts:
                    said = f"a request failed {len(failures)} times: {'; '.join(failures)}"
                elif lost >= LOST_UNDER:
                    said = DEADLY.format(lost, request.what, error)
                if said is not None:
                    log = member.listing.log
                    raise EngineError(f"{said}; {end_of(Path(log))}" if log else said) from error
                wait_s = pause_s(error.retry_after_s, member.server.retry_after_s, len(failures))
            finally:
                self._queue.leave(member, request.sequences)
            if wait_s and all(m in failed for m in self.members.serving()):
                # All servers have failed the request: wait for as long as the servers ask.
                await asyncio.sleep(wait_s)

    async def _look_after(self, member: Member, why: str) -> None:
        """Checks a server that failed a request, and marks it as lost if it does not answer the check. Requests that
        failed at the same time share one check.
        """
        look = self._looks.get(member)
        if look is None:
            look = self._loop.run_in_executor(self._lookers, self.members.look_after, member, why)
            self._looks[member] = look
            look.add_done_callback(lambda _: self._looks.pop(member, None))
        await asyncio.shield(look)

    def _tick(self) -> None:
        """Lets the queue check its requests periodically, because a request may become pointless without a
        notification.
        """
        self._queue.look()
        self._loop.call_later(self._look_s, self._tick)
