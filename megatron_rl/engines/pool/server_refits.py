"""Coordinates refits of servers, and their sleep while the trainer uses their GPUs. Tracks which servers take part and
which serve afterwards.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.pool.membership import Address, Member, Members, Waiting

# seconds after a failed weight sync (refit) of a server before the weights are sent to this server again
AGAIN_S = 30.0
_log = logging.getLogger(__name__)


class PoolRefits:
    """Makes the servers of a pool take part in weight syncs (refits), one at a time, and puts them to sleep.

    `under_way`: True between `begin` and `end`.
    `away`: True between `sleep` and `wake`.
    """

    def __init__(self, members: Members) -> None:
        self.under_way, self.away = False, False
        self._members = members
        self._threads = concurrent.futures.ThreadPoolExecutor(members.limits.servers, f"refits-{members.role}")
        self._updates: dict[Member, concurrent.futures.Future[bool]] = {}

    def close(self) -> None:
        """Waits for the threads that run requests to servers. Close the pool's members first, which makes these
        requests fail.
        """
        self._threads.shutdown(cancel_futures=True)

    def begin(
        self,
        version: int,
        address: Address,
        only: Sequence[int] | None,
        *,
        wait_s: float,
        waiting: Waiting | None,
        look_s: float,
    ) -> list[int]:
        """Begins a weight sync (refit), see Pool.begin_refit. If `waiting` is None, does not wait for a first
        server.
        """
        if waiting is None and only is None:
            with self._members.change:
                # Servers that join later need this weight version, even if no server is alive now.
                self._members.version = version
        while True:
            members = [m for m in self._members.living() if only is None or m.listing.replica in only]
            joined = _those(members, self._threads.map(functools.partial(self._join_member, address=address), members))
            if joined:
                with self._members.change:
                    self.under_way, self._members.version = True, version
                    for member in self._members.by_replica.values() if only is None else joined:
                        member.version = None
            paused = _those(joined, self._threads.map(self._pause, joined))
            if paused or only is not None or waiting is None:
                break
            self.under_way = False
            waiting.on()
            self._members.closing.wait(look_s)
        self.under_way = bool(paused)
        self._updates = {m: self._threads.submit(self._update, m, version, wait_s) for m in paused}
        return sorted(m.listing.replica for m in paused)

    def end(self) -> int:
        """Ends a weight sync (refit), see Pool.end_refit."""
        for future in self._updates.values():
            future.result()
        updated, self._updates, self.under_way = self._updates, {}, False
        return sum(m in updated for m in self._members.serving())

    def stale(self) -> list[int]:
        """Returns the replicas of the live servers without current weights, except servers whose last weight sync
        (refit) failed recently.
        """
        latest = time.monotonic() - min(AGAIN_S, self._members.limits.wait_s / 4)
        return [m.listing.replica for m in self._members.living() if m.version is None and m.troubled < latest]

    def sleep(self, *, discard: bool) -> list[str]:
        """Puts the live servers to sleep, see Pool.sleep."""
        self.away = True
        with self._members.change:
            self._members.sleep_count += 1
        living = self._members.living()
        asleep = _those(living, self._threads.map(functools.partial(self._sleep, discard=discard), living))
        if discard:
            with self._members.change:
                for member in self._members.by_replica.values():
                    member.version = None
                self._members.changed()
        return [member.listing.incarnation for member in asleep]

    def wake(self) -> None:
        """Wakes the servers, see Pool.wake."""
        list(self._threads.map(self._wake, self._members.living()))
        self.away = False
        with self._members.change:
            self._members.changed()

    def _sleep(self, member: Member, *, discard: bool) -> bool:
        verb = functools.partial(member.server.sleep, discard=discard)
        return self._step(member, "could not be put to sleep", verb)

    def _wake(self, member: Member) -> bool:
        return self._step(member, "could not be woken", member.server.wake)

    def _join_member(self, member: Member, address: Address) -> bool:
        if member.joined == address:
            return True
        join = functools.partial(member.server.join, *address, member.listing.replica)
        if not self._step(member, "cannot join the trainer", join):
            return False
        member.joined = address
        return True

    def _pause(self, member: Member) -> bool:
        paused = self._step(member, "could not be paused for a refit", member.server.pause)
        if not paused:
            member.server.hang_up()  # aborts the requests of the server, so that they are sent to other servers
        return paused

    def _update(self, member: Member, version: int, wait_s: float) -> bool:
        def update() -> None:
            member.server.update(version, wait_s)
            member.server.resume()

        if not self._step(member, f"is out until it takes version {version}", update):
            member.server.hang_up()  # the server is still paused: aborts the requests that it may hold
            return False
        with self._members.change:
            member.version, member.trouble = version, None
            self._members.changed()
        return True

    def _step(self, member: Member, failing: str, verb: Callable[[], None]) -> bool:
        """Runs one request of a weight sync, sleep or wake-up on a server. Returns whether the request succeeded. A
        server that fails it gets no requests until it has received the weights again.
        """
        with self._members.change:
            member.requests += 1
        try:
            verb()
        except (ServerLost, RequestRefused) as error:
            trouble = f"it {failing}: {error}"
            # Does not log the same failure again: a wait may retry twice a second.
            if trouble != member.trouble and not self._members.closing.is_set():
                _log.warning("%s %s: %s", member.listing.name, failing, error)
            with self._members.change:
                member.version, member.joined, member.trouble, member.troubled = None, None, trouble, time.monotonic()
                self._members.changed()
            self._members.look_after(member, str(error))
            return False
        finally:
            with self._members.change:
                member.requests -= 1
        return True


def _those(members: Sequence[Member], good: Iterator[bool]) -> list[Member]:
    return [member for member, well in zip(members, good, strict=True) if well]
