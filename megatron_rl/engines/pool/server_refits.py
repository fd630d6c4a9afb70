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

AGAIN_S = 30.0  # seconds between a failed refit of a server and the next refit for this server alone
_log = logging.getLogger(__name__)


class PoolRefits:
    """Runs the servers' side of refits, one refit at a time. `under_way` is True between `begin` and `end`; `away` is
    True between `sleep` and `wake`.
    """

    def __init__(self, members: Members) -> None:
        self.under_way, self.away = False, False
        self._members = members
        self._threads = concurrent.futures.ThreadPoolExecutor(members.limits.servers, f"refits-{members.role}")
        self._updates: dict[Member, concurrent.futures.Future[bool]] = {}

    def close(self) -> None:
        """Waits for the threads. Close the members first, which makes the threads' requests fail."""
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
        """Begins a refit; see Pool.begin_refit. If `waiting` is None, does not wait for a first server."""
        if waiting is None and only is None:
            with self._members.change:
                # Servers that join later need this version, even if no server is alive now.
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
        """Ends a refit; see Pool.end_refit."""
        for future in self._updates.values():
            future.result()
        updated, self._updates, self.under_way = self._updates, {}, False
        return sum(m in updated for m in self._members.serving())

    def stale(self) -> list[int]:
        """Returns the live replicas without current weights, except replicas that failed a refit recently."""
        latest = time.monotonic() - min(AGAIN_S, self._members.limits.wait_s / 4)
        return [m.listing.replica for m in self._members.living() if m.version is None and m.troubled < latest]

    def sleep(self, *, discard: bool) -> list[str]:
        """Puts the live servers to sleep; see Pool.sleep."""
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
        """Wakes the live servers; see Pool.wake."""
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
            member.server.hang_up()  # the server's requests are sent to other servers
        return paused

    def _update(self, member: Member, version: int, wait_s: float) -> bool:
        def update() -> None:
            member.server.update(version, wait_s)
            member.server.resume()

        if not self._step(member, f"is out until it takes version {version}", update):
            member.server.hang_up()  # the server is still paused, and may hold requests
            return False
        with self._members.change:
            member.version, member.trouble = version, None
            self._members.changed()
        return True

    def _step(self, member: Member, failing: str, verb: Callable[[], None]) -> bool:
        """Runs one step of a refit, on a thread. Returns whether it succeeded. A server that fails the step stops
        serving.
        """
        with self._members.change:
            member.requests += 1
        try:
            verb()
        except (ServerLost, RequestRefused) as error:
            trouble = f"it {failing}: {error}"
            # Avoids repeated log lines: a wait may retry twice a second.
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
