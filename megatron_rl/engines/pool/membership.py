"""The servers of one role: which live, which serve, how loaded each is; and a watch over those that a server registry
lists."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.schema import Servers
from megatron_rl.engines.protocol import EngineError
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_log import newest_error
from megatron_rl.engines.server_registry import Listing, ServerRegistry

LOOK_S = 0.5  # between looks at the server registry, and at what a wait is for
FIRST_SAY_S, SAY_S = 5.0, 30.0  # until the first line that says that the run waits, and between the others
_log = logging.getLogger(__name__)
Address = tuple[str, int, str]  # of a refit store: host, port, and the secret that signs there


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many requests servers get at once, and how long the run waits for servers."""

    servers: int  # at most
    at_once: int  # sequences asked of one server at once
    attempts: int = 3  # of a request that living servers fail
    request_timeout_s: float = 600.0
    wait_s: float = 1800.0  # for a server that serves
    partial: str = "continue"  # what becomes of completions that a refit interrupts: continue or restart

    @staticmethod
    def of(settings: Servers) -> Limits:
        """Returns the limits in the engine settings of a config."""
        return Limits(
            servers=settings.replicas, at_once=settings.at_once, attempts=settings.attempts,
            request_timeout_s=settings.request_timeout_s, wait_s=settings.wait_s, partial=settings.partial,
        )  # fmt: skip


@dataclass(eq=False)
class Member:
    """One server. It serves while it is not lost and its `version` is the version of the pool. The watch changes
    `listing` and `seen`; the other fields are changed under the members' lock.
    """

    listing: Listing
    server: Server
    seen: float  # when its beat last changed
    lost: str | None = None  # why it is taken for dead
    version: int | None = None  # of its weights; None: they do not count
    joined: Address | None = field(default=None, repr=False)  # the refit store that it has joined
    load: int = 0  # sequences under way
    requests: int = 0  # requests that it has not answered, steps of a refit among them
    failed: float = -math.inf  # when it last failed a request
    trouble: str | None = None  # why its last refit failed
    troubled: float = -math.inf  # when its last refit failed


class Members:
    """The servers of one role, by replica. In this class the servers never change and always count as living: a request
    that one server fails goes to another.

    `change` guards every member. `changed` is called, by any thread, when a server begins or ends to serve. `waits` is
    called repeatedly while a caller waits because no server serves: the watchdog of a run learns from it that the run
    is not hung. `fixed`: the servers keep the weights that they are started with, which are version 0.
    """

    def __init__(self, role: str, limits: Limits, *, fixed: bool = True, servers: Sequence[Server] = ()) -> None:
        self.role, self.limits, self.fixed, self.version = role, limits, fixed, 0 if fixed else -1
        self.change = threading.RLock()
        self.changed: Callable[[], None] = lambda: None  # the dispatcher's look around
        self.waits: Callable[[], None] = lambda: None
        self.closing = threading.Event()
        self.sleep_count = 0  # times that all servers were put to sleep, which ends their requests early
        self.by_replica: dict[int, Member] = {}
        for replica, server in enumerate(servers):
            listing = Listing(role=role, replica=replica, url=server.url, incarnation="", log="")
            self.by_replica[replica] = Member(listing, server, seen=0.0, version=self.version)

    def living(self) -> list[Member]:
        with self.change:
            return [m for m in self.by_replica.values() if m.lost is None]

    def serving(self) -> list[Member]:
        return [m for m in self.living() if m.version == self.version >= 0]

    def loads(self) -> dict[str, dict[str, float]]:
        """Returns the state of each server by its name (ROLE@NAME for a server that is listed under another role):
        whether it lives and serves (1 or 0), the version of its weights (-1: unknown), and its sequences and requests
        under way."""
        with self.change:
            return {
                (m.listing.name if m.listing.role == self.role else f"{self.role}@{m.listing.name}"): {
                    "lives": float(m.lost is None),
                    "serves": float(m.lost is None and m.version == self.version >= 0),
                    "version": float(-1 if m.version is None else m.version),
                    "sequences": float(m.load),
                    "requests": float(m.requests),
                }
                for m in self.by_replica.values()
            }

    def serves(self, member: Member, version: int) -> bool:
        """Returns whether the member lives and its weights have this version."""
        with self.change:
            return member.lost is None and member.version == version

    def check_open(self) -> None:
        """Raises EngineError when nothing can be asked any more."""
        if self.closing.is_set():
            raise EngineError(f"the pool of {self.role} engines was closed")

    def look_after(self, member: Member, why: str) -> None:
        """Takes a server that failed, as `why` says, for lost unless it answers."""

    def known(self) -> str:
        """Returns what is known of the members that do not serve, for who waits."""
        with self.change:
            known = [
                f"{m.listing.name}: {m.lost or m.trouble or 'it has no current weights yet'}"
                for m in self.by_replica.values()
            ]
        return "; ".join(known) or f"no {self.role} engine is known"

    def close(self) -> None:
        """Ends what is under way: whoever waits for it gets EngineError."""
        self.closing.set()
        self.changed()
        self._hang_up_for_good()

    def _hang_up_for_good(self) -> None:
        for member in list(self.by_replica.values()):
            member.server.close()


class ListedMembers(Members):
    """The servers that a server registry lists as those of the role `listed`. A thread watches them come, beat, fall
    silent and go. Unless they are `fixed`, a server has no weights that count until a refit gives it some, also one
    that comes back.
    """

    def __init__(
        self, role: str, settings: Servers, registry: ServerRegistry, connect: Callable[[Listing], Server], *,
        fixed: bool = False, look_s: float = LOOK_S, listed: str | None = None,
    ) -> None:  # fmt: skip
        """`listed`: None means `role` itself."""
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
        self._hang_up_for_good()  # a server that came meanwhile

    def look(self, listings: Sequence[Listing], now: float) -> None:
        """Updates the members from the listings that were read at `now`. It may take seconds to ask a server whether it
        is ready, in which beats of other servers are not seen.
        """
        for listing in listings:
            if 0 <= listing.replica < self.limits.servers:
                self._look_at(listing, now)
        for member in list(self.by_replica.values()):
            if member.lost is not None:
                if member.requests and not member.server.ready():
                    member.server.hang_up()  # it was not only slow: they would wait for their deadline
            elif now - member.seen > self._lost_after_s:
                self._lose(member, f"no sign of life for {self._lost_after_s:g} s")
            elif not self._roster.has(member.listing):
                self._lose(member, "it left the server registry")

    def _watch(self) -> None:
        """Reads the registry again and again, on a thread, until the members are closed."""
        while not self.closing.is_set():
            try:
                self.look(self._roster.read(self._listed), time.monotonic())
            except OSError as error:  # a file server that is away, say: the next look tells beats unseen from silence
                _log.warning("cannot read the server registry %s: %s", self._roster.directory, error)
            self.closing.wait(self._look_s)

    def _look_at(self, listing: Listing, now: float) -> None:
        member = self.by_replica.get(listing.replica)
        if member is None or member.listing.incarnation != listing.incarnation:
            # A listing may be of a server that died with its host: it is asked nothing before it beats.
            new = Member(listing, self._connect(listing), seen=now, lost="it has given no sign of life yet")
            with self.change:
                self.by_replica[listing.replica] = new
            if member is not None:
                self._lose(member, "it was started anew")
                member.server.close()
        elif listing.beat != member.listing.beat:
            member.listing, member.seen = listing, now
            if member.lost is not None and member.server.ready():
                with self.change:  # what it holds may be anything: it must take the weights anew
                    member.lost, member.version, member.joined = None, 0 if self.fixed else None, None
                    self.changed()

    def _lose(self, member: Member, why: str) -> None:
        with self.change:
            if member.lost is None:
                member.lost, member.version = why, None
                self.changed()
                _log.warning("%s is lost: %s", member.listing.name, why)


class Waiting:
    """The wait of one caller for a server: logs now and then that the run waits, and ends the wait after `wait_s`.

    `hopeless` returns why no server will come any more, or None.
    """

    def __init__(self, members: Members, hopeless: Callable[[], str | None]) -> None:
        self._members, self._hopeless = members, hopeless
        self._since: float | None = None
        self._next = 0.0  # when the next line is due

    def on(self) -> None:
        """Notes that no server serves. Raises EngineError when waiting is pointless: after `limits.wait_s` without a
        call of `over`, when it is hopeless, and when the members are closed.
        """
        self._members.check_open()
        if why := self._hopeless():
            raise EngineError(why)
        limit_s, role, now = self._members.limits.wait_s, self._members.role, time.monotonic()
        if self._since is None:
            self._since, self._next = now, now + min(FIRST_SAY_S, limit_s / 4)
        if now - self._since > limit_s:
            raise EngineError(f"no {role} engine for {limit_s:g} s (engine.wait_s): {self._members.known()}")
        self._members.waits()
        if now > self._next:
            self._next = now + SAY_S
            _log.warning("waiting for a %s engine for %.0f s: %s", role, now - self._since, self._members.known())

    def over(self) -> None:
        """Notes that a server serves."""
        self._since = None
