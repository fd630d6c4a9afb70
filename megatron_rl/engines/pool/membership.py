"""The servers of one role: which servers are alive, which servers get requests, and the load of each server. Also
monitors the servers that a server registry lists.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import Servers
from megatron_rl.engines.pool.states import Action, Alive, Event, Gone, Listed, Phase, PoolState, ServerState, step
from megatron_rl.engines.protocol import EngineError
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_log import newest_error
from megatron_rl.engines.server_registry import Listing, ServerRegistry

# Seconds between checks of the server registry, and between checks of the condition that a caller waits for.
LOOK_S = 0.5
# seconds until the first log line about waiting for servers, and between later log lines
FIRST_SAY_S, SAY_S = 5.0, 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a pool: how many requests a server gets at once, how often a request is sent, and how long the run
    waits.
    """

    servers: int  # maximum number of servers
    at_once: int  # maximum number of concurrent sequences per server
    max_batch: int | None = None  # maximum number of sequences that one server decodes together; None uses `at_once`
    attempts: int = 3  # maximum number of attempts of a request if live servers fail it
    request_timeout_s: float = 600.0
    wait_s: float = 1800.0  # maximum seconds to wait until a server is available
    # "continue" or "restart": how a completion that a weight sync (refit) interrupts is completed
    partial: str = "continue"

    @property
    def places(self) -> int:
        """Returns the number of sequences that all servers can decode at once."""
        return self.servers * (self.max_batch or self.at_once)

    @staticmethod
    def of(settings: Servers) -> Limits:
        """Returns the limits given by the engine settings of a config."""
        return Limits(
            servers=settings.replicas, at_once=settings.at_once, max_batch=min(settings.max_batch, settings.at_once),
            attempts=settings.attempts, request_timeout_s=settings.request_timeout_s, wait_s=settings.wait_s,
            partial=settings.partial,
        )  # fmt: skip


@dataclass(eq=False)
class Member:
    """One start of a server of a pool. Only the monitoring thread changes `listing` and `seen`; the other fields are
    changed under the members' lock, and `state` by `Members.post` alone.
    """

    listing: Listing
    server: Server
    seen: float  # value of time.monotonic() when the server's heartbeat last changed
    state: ServerState
    load: int = 0  # number of sequences in progress on the server
    requests: int = 0  # number of requests in progress on the server, including requests of a weight sync (refit)
    failed: float = -math.inf  # value of time.monotonic() when the server last failed a request

    @property
    def lost(self) -> str | None:
        """Returns the reason why the server is considered dead, or None if it is alive."""
        return self.state.why if self.state.phase is Phase.LOST else None


class Members:
    """The servers of one role, by replica. In this base class the set of servers never changes and all servers are
    considered alive: if a server fails a request, the request is sent to another server.

    `state`: the states of all servers, which `post` replaces; a snapshot is never changed.
    `change`: lock that guards every member.
    `changed`: called, from any thread, when a server becomes available or unavailable.
    `waits`: called repeatedly while a caller waits because no server is available, so that the run's watchdog knows
    that the run is not hung.
    `hopeless`: callback that returns the reason why no server will ever be available, or None. If the callback returns
    a reason, requests stop waiting and raise EngineError.
    `fixed`: the servers keep their initial weights, which are version 0.
    """

    def __init__(self, role: str, limits: Limits, *, fixed: bool = True, servers: Sequence[Server] = ()) -> None:
        self.role, self.limits, self.fixed = role, limits, fixed
        self.state = PoolState(version=0 if fixed else -1)
        self.change = threading.Lock()
        # Callback set by the dispatcher: makes the requests in the queue look for a free server.
        self.changed: Callable[[], None] = lambda: None
        self.waits: Callable[[], None] = lambda: None
        self.hopeless: Callable[[], str | None] = lambda: None
        self.closing = threading.Event()
        # `_occupied_s`: the result of `occupied_s` at its last update; `_counted`: time.monotonic() of this update
        self._occupied_s, self._counted = 0.0, time.monotonic()
        self.by_replica: dict[int, Member] = {}
        for replica, server in enumerate(servers):
            listing = Listing(role=role, replica=replica, url=server.url, incarnation="", log="")
            self.by_replica[replica] = Member(listing, server, 0.0, ServerState(incarnation=""))
            self.post(Listed(replica, ""))
            self.post(Alive(replica, "", self.version))

    @property
    def version(self) -> int:
        """The version of the weights with which requests are answered; -1 before the first weight sync (refit)."""
        return self.state.version

    @property
    def refitting(self) -> bool:
        """Returns whether servers receive new weights (a refit) and will serve soon."""
        return any(server.ticket for server in self.state.servers.values())

    def post(self, event: Event) -> list[Action]:
        """Handles an event. Returns the actions that it causes. Thread-safe: events are handled one at a time."""
        with self.change:
            before = self.state
            self.state, actions = step(before, event)
            for replica, member in self.by_replica.items():
                server = self.state.servers.get(replica)
                if server is not None and server.incarnation == member.listing.incarnation:
                    member.state = server
        if self.state is not before:
            self.changed()
        return actions

    def living(self) -> list[Member]:
        with self.change:
            return [m for m in self.by_replica.values() if m.lost is None]

    def serving(self) -> list[Member]:
        return self.serving_version()[0]

    def serving_version(self) -> tuple[list[Member], int]:
        """Returns the servers that get requests, and the version of their weights."""
        with self.change:
            return [m for m in self.by_replica.values() if m.state.phase is Phase.READY], self.version

    def loads(self) -> dict[str, dict[str, float]]:
        """Returns {name of a server: state of the server}. The name is ROLE@NAME if the server is listed under another
        role. The state has "lives" and "serves" (1 or 0), "version" of the weights (-1 if unknown), and the numbers of
        "sequences" and "requests" in progress.
        """
        with self.change:
            return {
                (m.listing.name if m.listing.role == self.role else f"{self.role}@{m.listing.name}"): {
                    "lives": float(m.lost is None),
                    "serves": float(m.state.phase is Phase.READY),
                    "version": float(-1 if m.state.version is None else m.state.version),
                    "sequences": float(m.load),
                    "requests": float(m.requests),
                }
                for m in self.by_replica.values()
            }

    def count_load(self, member: Member, sequences: int, requests: int) -> None:
        """Adds to the numbers of sequences and requests in progress on a server."""
        with self.change:
            self._add_occupied()
            member.load, member.requests = member.load + sequences, member.requests + requests

    def occupied_s(self) -> float:
        """Returns the total time in seconds for which sequences have occupied decoding slots of the servers, summed
        over all slots. A server has one slot for each sequence that it can decode at once.
        """
        with self.change:
            self._add_occupied()
            return self._occupied_s

    def _add_occupied(self) -> None:
        now, most = time.monotonic(), self.limits.max_batch or self.limits.at_once
        self._occupied_s += (now - self._counted) * sum(min(m.load, most) for m in self.by_replica.values())
        self._counted = now

    def serves(self, member: Member, version: int) -> bool:
        """Returns whether the server is alive and its weights have this version."""
        return member.state.version == version

    def check_open(self) -> None:
        """Raises EngineError if the pool is closed."""
        if self.closing.is_set():
            raise EngineError(f"the pool of {self.role} engines was closed")

    def look_after(self, member: Member, why: str) -> None:
        """Checks a server that failed a request for the reason `why`, and marks it as lost if it does not answer. A
        no-op in this base class.
        """

    def known(self) -> str:
        """Returns a description of the state of all servers, for the messages of a caller that waits."""
        with self.change:
            known = [
                f"{m.listing.name}: {m.state.why or 'it has no current weights yet'}" for m in self.by_replica.values()
            ]
        return "; ".join(known) or f"no {self.role} engine is known"

    def close(self) -> None:
        """Aborts the requests in progress. Callers that wait for them get EngineError."""
        self.closing.set()
        self.changed()
        for member in list(self.by_replica.values()):
            member.server.close()


class ListedMembers(Members):
    """The servers that a server registry lists under the role `listed`. A thread monitors them: new servers,
    heartbeats, servers without heartbeats, and servers that leave. Unless `fixed` is set, a server gets no requests
    until it has received weights in a weight sync (refit). The same holds for a server that returns after it was lost.
    """

    def __init__(
        self, role: str, settings: Servers, registry: ServerRegistry, connect: Callable[[Listing], Server], *,
        fixed: bool = False, look_s: float = LOOK_S, listed: str | None = None,
    ) -> None:  # fmt: skip
        """`listed`: role under which the registry lists the servers; None means `role`."""
        super().__init__(role, Limits.of(settings), fixed=fixed)
        self._listed = listed or role
        self._roster, self._connect, self._look_s, self._lost_after_s = registry, connect, look_s, settings.lost_after_s
        self._watcher = threading.Thread(target=self._watch, name=f"registry-{role}", daemon=True)
        self._watcher.start()

    def check_open(self) -> None:
        super().check_open()
        if not self._watcher.is_alive():
            raise EngineError(
                f"nobody looks at {self._roster.directory} any more: the thread that did failed, see its traceback"
            )

    def look_after(self, member: Member, why: str) -> None:
        if member.lost is None and not self.closing.is_set() and not member.server.ready():
            self._lose(member, why)

    def known(self) -> str:
        said = super().known() if self.by_replica else f"no {self.role} engine is in {self._roster.directory}"
        return said + newest_error((self._roster.directory.parent / "logs").glob(f"engine_{self._listed}_*.log"))

    def close(self) -> None:
        super().close()
        self._watcher.join()
        super().close()  # closes a server that joined meanwhile

    def look(self, listings: Sequence[Listing], now: float) -> None:
        """Updates the pool's servers from registry entries. `now`: value of time.monotonic() when the entries were
        read. The current time would be too late, because checking whether servers are ready may take seconds.
        """
        for listing in listings:
            if 0 <= listing.replica < self.limits.servers:
                self._look_at(listing, now)
        for member in list(self.by_replica.values()):
            if member.lost is not None:
                if member.requests and not member.server.ready():
                    # The server is not just slow: abort its requests, which would otherwise wait for their timeouts.
                    member.server.hang_up()
            elif now - member.seen > self._lost_after_s:
                self._lose(member, f"no sign of life for {self._lost_after_s:g} s")
            elif not self._roster.has(member.listing):
                self._lose(member, "it left the server registry")

    def _watch(self) -> None:
        """Reads the server registry periodically, in a separate thread, until the pool is closed."""
        while not self.closing.is_set():
            try:
                self.look(self._roster.read(self._listed), time.monotonic())
            # For example, the file server is unavailable. Missing heartbeats do not make a server lost in this case.
            except OSError as error:
                _log.warning("cannot read the server registry %s: %s", self._roster.directory, error)
            self.closing.wait(self._look_s)

    def _look_at(self, listing: Listing, now: float) -> None:
        member = self.by_replica.get(listing.replica)
        if member is None or member.listing.incarnation != listing.incarnation:
            if member is not None:
                self._lose(member, "it was started anew")
            # The server may have died with its host: send it no request before its first heartbeat.
            new = ServerState(incarnation=listing.incarnation)
            started = Member(listing, self._connect(listing), now, new)
            with self.change:
                self.by_replica[listing.replica] = started
            self.post(Listed(listing.replica, listing.incarnation))
            if member is not None:
                member.server.close()
        elif listing.beat != member.listing.beat:
            member.listing, member.seen = listing, now
            if member.lost is not None and member.server.ready():
                # unless they never change, the server's weights are unknown: it must receive weights again
                self.post(Alive(listing.replica, listing.incarnation, self.version if self.fixed else None))

    def _lose(self, member: Member, why: str) -> None:
        if member.lost is None:
            self.post(Gone(member.listing.replica, member.listing.incarnation, why))
            _log.warning("%s is lost: %s", member.listing.name, why)


class Waiting:
    """Limits how long one caller waits for a server. Logs periodically that the run waits, and raises EngineError after
    `wait_s` seconds.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._since: float | None = None
        self._next = 0.0  # when the next log line is due

    def on(self) -> None:
        """Records that no server is available now. Raises EngineError if no server has been available for
        `limits.wait_s` seconds, if `members.hopeless` returns a reason, or if the pool is closed.
        """
        self._members.check_open()
        limit_s, role, now = self._members.limits.wait_s, self._members.role, time.monotonic()
        if self._since is None:
            self._since, self._next = now, now + min(FIRST_SAY_S, limit_s / 4)
        why = self._members.hopeless()
        if why is None and now - self._since > limit_s:
            why = f"no {role} engine for {limit_s:g} s (engine.wait_s): {self._members.known()}"
        if why is not None:
            raise EngineError(why)
        self._members.waits()
        if now > self._next:
            self._next = now + SAY_S
            _log.warning("waiting for a %s engine for %.0f s: %s", role, now - self._since, self._members.known())

    def over(self) -> None:
        """Records that a server is available, which ends the wait."""
        self._since = None
