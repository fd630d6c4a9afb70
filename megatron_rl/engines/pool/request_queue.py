"""The requests that wait for room at a server, the longest first."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl.engines.pool.membership import Member, Members
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import EngineError

PREFIX_SHARE = 0.25  # of a server's places: a prefix is worth no more of them in use there than elsewhere
FAILED_S = (
    5.0  # how long others are preferred to a server that failed a request: it may seem idle because it fails at once
)
Place = tuple[Member, int]  # the server that was taken, and the version of its weights


@dataclass(eq=False)
class Waiter:
    """A request that waits. `sequences`: how many sequences of the request a server works on at once. `failed`: servers
    that failed the request, which are used only when there is no other. `prefer`: the server with its prefix in the
    cache. `over` returns whether the caller has stopped waiting.
    """

    sequences: int
    failed: set[Member]
    prefer: Member | None
    over: Callable[[], bool]
    place: asyncio.Future[Place] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    number: int = 0  # in the order of coming


class RequestQueue:
    """The requests that wait for a place at a server. It is used in one thread, that of the loop in which they wait.

    Whoever got a place gives it back by `leave`.
    """

    def __init__(self, members: Members, shared: SharedGpus) -> None:
        self._members, self._shared = members, shared
        self._came = 0
        self._again: list[Waiter] = []  # those that a server has failed
        self._first: dict[int, deque[Waiter]] = {}  # the others, by the number of sequences

    async def wait(self, waiter: Waiter) -> Place:
        """Waits for a server with room and takes it. Raises EngineError when nobody waits for it any more, or the
        members are closed.
        """
        self._check(waiter)
        self._came += 1
        waiter.number = self._came
        if waiter.failed:
            self._again.append(waiter)
        else:
            self._first.setdefault(waiter.sequences, deque()).append(waiter)
        self.admit()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if not waiter.place.cancelled() and waiter.place.exception() is None:  # it was cancelled with a place
                self.leave(waiter.place.result()[0], waiter.sequences)
            raise

    def leave(self, member: Member, sequences: int) -> None:
        """Gives a place back, and gives free places to waiting requests."""
        with self._members.change:
            member.load, member.requests = member.load - sequences, member.requests - 1
        self._shared.leave()
        self.admit()

    def look(self) -> None:
        """Cancels requests that no caller waits for any more, and gives places to the others. Call it after any change
        of the members.
        """
        for waiter in (*self._again, *(each for line in self._first.values() for each in line)):
            if waiter.place.done():
                continue
            try:
                self._check(waiter)
            except EngineError as error:
                waiter.place.set_exception(error)
        self._again = [each for each in self._again if not each.place.done()]
        left = {n: deque(each for each in line if not each.place.done()) for n, line in self._first.items()}
        self._first = {n: line for n, line in left.items() if line}
        self.admit()

    def admit(self) -> None:
        """Gives places to waiting requests, as long as there is room."""
        with self._members.change:
            serving = self._members.serving()
            for waiter in [*self._again]:
                if self._join_member(waiter, serving):
                    self._again.remove(waiter)
            open_lines = {n: line for n, line in self._first.items() if line}
            while open_lines:
                n, line = min(open_lines.items(), key=lambda item: item[1][0].number)
                if not self._join_member(line[0], serving):  # nor has anybody behind it, who wants as many places
                    del open_lines[n]
                    continue
                line.popleft()
                if not line:
                    del open_lines[n], self._first[n]

    def _check(self, waiter: Waiter) -> None:
        self._members.check_open()
        if waiter.over():
            raise EngineError("nobody waits for this request any more")

    def _join_member(self, waiter: Waiter, serving: list[Member]) -> bool:
        """Gives a request a place, if there is one. Returns whether the request leaves the queue."""
        if waiter.place.done():
            return True
        at_once = self._members.limits.at_once
        better = [m for m in serving if m not in waiter.failed] or serving
        free = [m for m in better if not m.load or m.load + waiter.sequences <= at_once]
        if not free or not self._shared.enter(self._members.role):
            return False
        member = _best(free, waiter.prefer, at_once)
        member.load, member.requests = member.load + waiter.sequences, member.requests + 1
        waiter.place.set_result((member, self._members.version))
        return True


def _best(free: list[Member], prefer: Member | None, at_once: int) -> Member:
    """Returns the least loaded server that has not failed lately; or the preferred server, unless it is much more
    loaded.
    """
    now = time.monotonic()
    least = min(free, key=lambda m: (now - m.failed < FAILED_S, m.load, m.listing.replica))
    if prefer is not None and prefer in free and prefer.load - least.load <= PREFIX_SHARE * at_once:
        return prefer
    return least
