"""Sends requests to servers: to the least loaded one, or to the one with the request's prefix in its cache; and to
another server when a server fails the request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
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

LONGEST_PAUSE_S = 60.0  # between two attempts, when all servers ask to be left alone for a while
LOST_UNDER = 10  # servers lost under one request, after which it is taken for what kills them
LOOKERS = 8  # servers that are asked at a time whether they live, after they failed a request
DEADLY = (
    "{} servers were lost while they worked on one request ({}), so that it may be what kills them; look for the reason"
    " in their logs, lower engine.max_sequences or engine.max_model_len where memory ran out, and start the run again:"
    " {}"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[T]):
    """A request that any server may answer. `ask` gets the server and the version of its weights; it raises ServerLost
    when another server should answer. `what`: its content, for messages. `sequences`: how many sequences of the request
    a server works on at once. `prefer`: the server with its prefix in the cache.
    """

    ask: Callable[[Member, int], Awaitable[T]]
    what: str
    sequences: int
    prefer: Member | None = None


class Outstanding:
    """The tasks that one caller waits for, in the order in which the tasks end."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[concurrent.futures.Future[Any] | None] = queue.SimpleQueue()
        self.over = False  # nobody waits for it any more

    def add(self, task: concurrent.futures.Future[Any]) -> None:
        task.add_done_callback(self._done.put)

    def wake(self) -> None:
        """Wakes the caller, which looks whether it still has to wait."""
        self._done.put(None)

    def next(self, timeout_s: float) -> concurrent.futures.Future[Any] | None:
        """Returns a task that has ended, or None when no task ends in time."""
        try:
            return self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Dispatcher:
    """Sends requests to the members. All requests wait on one event loop, in one thread.

    `tend` is called whenever a caller waits. `refitting` returns whether servers are taking weights, and will serve
    soon. `hopeless` returns why no server will come any more, or None. `shared`: the GPUs that the members share with
    servers of other roles.
    """

    def __init__(
        self, members: Members, look_s: float, *, tend: Callable[[], None], refitting: Callable[[], bool],
        hopeless: Callable[[], str | None], shared: SharedGpus,
    ) -> None:  # fmt: skip
        self.members, self.failures = members, 0  # failures: requests that were sent again
        self.full = FullPrompts(members.role)
        self._look_s, self._tend, self._refitting, self._hopeless = look_s, tend, refitting, hopeless
        descriptors()  # a connection for every request under way
        self._queue = RequestQueue(members, shared)
        self._lookers = concurrent.futures.ThreadPoolExecutor(LOOKERS, f"looks-{members.role}")
        self._looks: dict[Member, asyncio.Future[None]] = {}  # under way
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"requests-{members.role}", daemon=True)
        self._thread.start()
        members.changed = self.look
        shared.add(members.role, self.look)

    def close(self) -> None:
        """Ends the requests under way, which have failed: the members were closed before."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._lookers.shutdown(cancel_futures=True)

    def submit(self, work: Outstanding, task: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        """Begins a task, for `work`. Raises EngineError when the members are closed."""
        self.members.check_open()
        work.add(asyncio.run_coroutine_threadsafe(task(*arguments), self._loop))

    def look(self) -> None:
        """Lets the waiting requests look for a server. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits
            self._loop.call_soon_threadsafe(self._queue.look)

    def waiting(self) -> Waiting:
        """Returns a new wait of one caller."""
        return Waiting(self.members, self._hopeless)

    def wait(self, work: Outstanding, waiting: Waiting | None) -> Any:
        """Tends the servers and waits a moment. Returns the result of a task that ended, or None.

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

    async def send(self, work: Outstanding, request: Request[T]) -> tuple[T, Member]:
        """Sends a request until some server answers. Returns the answer and the server. Part of a task.

        Raises EngineError when too many living ones fail, when LOST_UNDER are lost, and when nobody waits for `work`
        any more; RequestRefused for a request that no server would take.
        """
        failures: list[str] = []
        lost = 0  # servers under this request
        failed: set[Member] = set()
        while True:
            place = Waiter(request.sequences, failed, request.prefer, over=lambda: work.over)
            member, version = await self._queue.wait(place)
            try:
                return await request.ask(member, version), member
            except ServerLost as error:
                await self._look_after(member, str(error))
                served = self.members.serves(member, version)  # else it was not the request's fault
                with self.members.change:
                    self.failures += 1
                    member.failed = time.monotonic() if served else member.failed
                if served and not self.members.closing.is_set():
                    failures.append(str(error))
                    failed.add(member)
                lost += member.lost is not None
                if len(failures) >= self.members.limits.attempts:
                    said = f"a request failed {len(failures)} times: {'; '.join(failures)}"
                    raise EngineError(_with_log(said, member)) from error
                if lost >= LOST_UNDER:
                    raise EngineError(_with_log(DEADLY.format(lost, request.what, error), member)) from error
                pause_s = error.retry_after_s * 2.0 ** (len(failures) - 1)
            finally:
                self._queue.leave(member, request.sequences)
            if pause_s and all(m in failed for m in self.members.serving()):
                await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))  # as long as servers ask for: all have failed

    async def _look_after(self, member: Member, why: str) -> None:
        """Marks a server that failed as lost unless it answers now. Requests that it failed together share one look."""
        look = self._looks.get(member)
        if look is None:
            look = self._loop.run_in_executor(self._lookers, self.members.look_after, member, why)
            self._looks[member] = look
            look.add_done_callback(lambda _: self._looks.pop(member, None))
        await asyncio.shield(look)

    def _run(self) -> None:
        """Runs on a thread of its own until `close`."""
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._tick)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _tick(self) -> None:
        """Looks at the queue now and then: a wait may be over without a notification."""
        self._queue.look()
        self._loop.call_later(self._look_s, self._tick)


async def _end_all() -> None:
    """Cancels all other tasks of the running loop, and waits until they and the loop's threads have ended."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()  # which hold connections
    await asyncio.get_running_loop().shutdown_default_executor()  # which looks names of hosts up


def _with_log(said: str, member: Member) -> str:
    """Returns a message with the end of the server's log, if there is one."""
    return f"{said}; {end_of(Path(member.listing.log))}" if member.listing.log else said
