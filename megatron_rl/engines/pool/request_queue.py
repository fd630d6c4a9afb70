"""The queue of requests that wait for capacity at a server, ordered by priority and then by time of arrival."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl.engines.pool.membership import Member, Members
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import EngineError

# A request is sent to the server that has its prefix in the cache, and not to the least loaded server, if the loads of
# the two servers differ by at most this share of a server's capacity.
PREFIX_SHARE = 0.25
# Seconds for which a server that failed a request gets no requests if other servers are free.
# Such a server may have a low load only because it fails requests immediately.
FAILED_S = 5.0
Place = tuple[Member, int]  # the assigned server, and the version of the server's weights


@dataclass(eq=False)
class Waiter:
    """A request that waits in the queue for a server.

    `sequences`: number of sequences of the request that a server works on concurrently.
    `failed`: servers that failed the request, which are used only if there is no other server.
    `prefer`: the server that has the request's prefix in its cache.
    `over`: returns whether the caller has stopped waiting.
    `priority`: requests with a lower number are served first.
    """

    sequences: int
    failed: set[Member]
    prefer: Member | None
    over: Callable[[], bool]
    priority: int = 0
    place: asyncio.Future[Place] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    number: int = 0  # position of the request in the order of arrival

    def __lt__(self, other: Waiter) -> bool:
        """Returns whether this request is served before `other`."""
        return (self.priority, self.number) < (other.priority, other.number)


class RequestQueue:
    """The requests that wait for a server. All coroutines must run on one event loop. The queue is not thread-safe.

    The caller must call `leave` when a request that was assigned to a server is done.
    """

    def __init__(self, members: Members, shared: SharedGpus) -> None:
        self._members, self._shared = members, shared
        self._came = 0
        self._again: list[Waiter] = []  # requests that a server has failed
        # requests that have not failed at any server: {number of sequences of a request: heap of these requests}
        self._first: dict[int, list[Waiter]] = {}

    async def wait(self, waiter: Waiter) -> Place:
        """Waits until a server has free capacity for the request, and reserves this capacity. Raises EngineError if no
        caller waits for the request any more, or if the pool is closed.
        """
        self._check(waiter)
        self._came += 1
        waiter.number = self._came
        if waiter.failed:
            self._again.append(waiter)
        else:
            heapq.heappush(self._first.setdefault(waiter.sequences, []), waiter)
        self.admit()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            # Cancelled after a server was assigned.
            if not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result()[0], waiter.sequences)
            raise

    def leave(self, member: Member, sequences: int) -> None:
        """Releases the capacity that a request reserved at a server, and assigns this capacity to waiting requests."""
        self._members.count_load(member, -sequences, -1)
        self._shared.leave()
        self.admit()

    def look(self) -> None:
        """Cancels requests that no caller waits for any more, and assigns servers to the other requests. Call this
        method when a server has become available or unavailable.
        """
        for waiter in (*self._again, *(each for line in self._first.values() for each in line)):
            if waiter.place.done():
                continue
            try:
                self._check(waiter)
            except EngineError as error:
                waiter.place.set_exception(error)
        self.admit()

    def admit(self) -> None:
        """Assigns waiting requests to servers as long as a server has free capacity."""
        serving, version = self._members.serving_version()
        for waiter in [*self._again]:
            if self._join_member(waiter, serving, version):
                self._again.remove(waiter)
        open_lines = {n: line for n, line in self._first.items() if line}
        while open_lines:
            n, line = min(open_lines.items(), key=lambda item: item[1][0])
            if not self._join_member(line[0], serving, version):
                # No server has the capacity that all requests of this heap need, so leave the whole heap waiting.
                # Less urgent requests in other heaps wait too, or they would take the capacity that becomes free.
                open_lines = {k: own for k, own in open_lines.items() if k != n and own[0].priority <= line[0].priority}
                continue
            heapq.heappop(line)
            if not line:
                del open_lines[n], self._first[n]

    def _check(self, waiter: Waiter) -> None:
        self._members.check_open()
        if waiter.over():
            raise EngineError("nobody waits for this request any more")

    def _join_member(self, waiter: Waiter, serving: list[Member], version: int) -> bool:
        """Assigns a request to a server if a server has free capacity. Returns whether the request can be removed from
        the queue (assigned or cancelled).
        """
        if waiter.place.done():
            return True
        at_once = self._members.limits.at_once
        better = [m for m in serving if m not in waiter.failed] or serving
        free = [m for m in better if not m.load or m.load + waiter.sequences <= at_once]
        if not free or not self._shared.enter(self._members.role):
            return False
        member = _best(free, waiter.prefer, at_once)
        self._members.count_load(member, waiter.sequences, 1)
        waiter.place.set_result((member, version))
        return True


def _best(free: list[Member], prefer: Member | None, at_once: int) -> Member:
    """Chooses one of the `free` servers for a request: the preferred server, unless it has a much higher load than the
    least loaded server; otherwise the least loaded server that has not failed a request recently.
    """
    now = time.monotonic()
    least = min(free, key=lambda m: (now - m.failed < FAILED_S, m.load, m.listing.replica))
    if prefer is not None and prefer in free and prefer.load - least.load <= PREFIX_SHARE * at_once:
        return prefer
    return least
