"""Several servers used as one engine. A request goes to the least loaded server. If the server fails the request, the
request is sent to another server. Servers without the current weights get no requests.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from megatron_rl.config.schema import Servers
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.pool.dispatch import Dispatcher, Outstanding, Request
from megatron_rl.engines.pool.membership import LOOK_S, Limits, ListedMembers, Member, Members, Waiting
from megatron_rl.engines.pool.pool_session import PoolSession
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.pool.states import (
    Action,
    Address,
    Asleep,
    Awake,
    Failed,
    Joined,
    Loaded,
    Paused,
    Phase,
    Refit,
)
from megatron_rl.engines.protocol import SampleLog, Tokens, TopScores
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_registry import Listing, ServerRegistry

SCORED_SEQUENCES, SCORED_TOKENS = 32, 1 << 15  # maximum number of sequences and of tokens in one scoring request
LISTED_S = 10.0  # maximum seconds that `sleep` waits until servers that have just registered are known to the pool
# seconds after a failed weight sync (refit) of a server before the weights are sent to this server again
AGAIN_S = 30.0
SWAP_S = 10.0  # maximum seconds in `swap` until a server learns that the trainer has committed the staged refit
_log = logging.getLogger(__name__)


class ServerEngine:
    """Implements engines.protocol.Engine with a set of servers whose weights never change. `members`: the servers.

    Requests may come from any thread, and wait until a server is available.
    """

    def __init__(self, members: Members, *, look_s: float = LOOK_S, shared: SharedGpus | None = None) -> None:
        self.members, self._look_s = members, look_s
        self._dispatcher = Dispatcher(members, look_s, tend=self.tend, shared=shared or SharedGpus())

    @property
    def version(self) -> int:
        """The version of the servers' current weights; -1 before the first refit."""
        return self.members.version

    @property
    def failures(self) -> int:
        """Number of times that a request failed at a server and was sent again."""
        return self._dispatcher.failures

    def session(self, priority: int = 0, log: SampleLog | None = None) -> PoolSession:
        """Returns a new session. For the exceptions see PoolSession.answers."""
        return PoolSession(self._dispatcher, priority, log)

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Implements `engines.protocol.Engine.score`. The sequences are distributed over the servers. Raises the same
        errors as PoolSession.answers.
        """
        return [scores.logprobs for scores in self.score_top(sequences, 0)]

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """Implements `engines.protocol.Engine.score_top`. Raises the same errors as `score`, and EngineError if a
        server cannot return the k most likely tokens.
        """
        arrays = [np.array(tokens, np.int32) for tokens in sequences]
        work, waiting, found = Outstanding(), Waiting(self.members), dict[int, TopScores]()
        try:
            for places in _shares([len(tokens) for tokens in arrays], self.members.limits.servers):
                self._dispatcher.submit(work, self._score, work, places, [arrays[place] for place in places], k)
            while len(found) < len(arrays):
                found |= self._dispatcher.wait(work, waiting) or {}
        finally:
            work.over = True
            self._dispatcher.look()
        return [found[place] for place in range(len(arrays))]

    def tend(self) -> None:
        """No-op, because the servers' weights never change. The subclass Pool overrides this method."""

    def close(self) -> None:
        """Aborts the requests in progress. Their callers get EngineError."""
        self.members.close()
        self._dispatcher.close()

    async def _score(
        self, work: Outstanding, places: Sequence[int], sequences: list[np.ndarray], k: int
    ) -> dict[int, TopScores]:
        """Scores sequences on one server. `places`: index of each sequence among all sequences that the caller scores.
        Returns {this index: scores}. `work`: the tasks of the caller.
        """

        async def ask(member: Member, version: int) -> list[TopScores]:
            scores = await member.server.score(sequences, k, timeout_s=self.members.limits.request_timeout_s)
            if not self.members.serves(member, version):
                raise ServerLost(f"{member.server.url} did not keep version {version} of the weights while it scored")
            return scores

        what = f"{len(sequences)} sequences to score, the longest of {max(map(len, sequences))} tokens"
        scores, _ = await self._dispatcher.send(work, Request(ask, what, len(sequences)))
        return dict(zip(places, scores, strict=True))


class Pool(ServerEngine):
    """The servers of one role that a server registry lists, used as one engine on the driver (rank 0).

    One thread at a time owns the pool: weight syncs (refits) and `close` must be called from this thread.

    `connect`: creates the client of a listed server.
    `listed`: role under which the servers are listed, if several roles share them.
    `fixed`: the servers keep their initial weights.
    `refresh`: if set, callback that sends the current weights to the given replicas while the other servers answer
    requests. All ranks must take part in this, so the pool calls `refresh` only inside calls of the owner thread, when
    a server lacks the current weights.
    `owned`: callback that returns whether the present thread owns the pool; by default the thread that created it.
    `shared`: the GPUs that servers of other roles also use.
    """

    def __init__(
        self, role: str, settings: Servers, registry: ServerRegistry, connect: Callable[[Listing], Server], *,
        fixed: bool = False, look_s: float = LOOK_S, listed: str | None = None, shared: SharedGpus | None = None,
    ) -> None:  # fmt: skip
        self.refresh: Callable[[list[int]], None] | None = None
        # Callback that is set only if the servers use the trainer's GPUs.
        # It puts all servers to sleep, sends the current weights to servers that lack them, and wakes all servers.
        self.sleep_all: Callable[[], None] | None = None
        self._colocated = settings.colocate
        creator = threading.get_ident()
        self.owned: Callable[[], bool] = lambda: threading.get_ident() == creator
        members = ListedMembers(role, settings, registry, connect, fixed=fixed, look_s=look_s, listed=listed)
        self._threads = concurrent.futures.ThreadPoolExecutor(members.limits.servers, f"refits-{role}")
        self._loads: dict[Member, concurrent.futures.Future[list[Action]]] = {}  # servers that load weights
        self._staging: list[Member] = []  # servers that take part in a refit while they generate
        # `_paused`: perf_counter() when the current refit paused the servers; `pause_s`: seconds of the last pause
        self._paused, self.pause_s = 0.0, 0.0
        super().__init__(members, look_s=look_s, shared=shared)

    def begin_refit(
        self, version: int, address: Address, only: Sequence[int] | None = None, *, wait_s: float, staged: bool = False
    ) -> list[int]:
        """Prepares the live servers (only the replicas `only`, if given) for a weight sync (refit) that the trainer at
        `address` begins now.

        Returns the replicas that take part. These servers are paused as `engine.pause` specifies, and get no requests
        until they have the new weights. With `staged`, the servers are not paused before `swap`, and go on with their
        present weights until then. Without `only`, waits for a first server, and raises EngineError if no server is
        available within `engine.wait_s`. Does not wait for servers on the trainer's GPUs, because such servers cannot
        be started now.
        """
        waiting = None if self._colocated else Waiting(self.members)
        if waiting is None and only is None:
            # Servers that join later need this weight version, even if no server is alive now.
            self.members.post(Refit(version, (), everyone=True))
        while True:
            members = [m for m in self.members.living() if only is None or m.listing.replica in only]
            new = [m for m in members if m.state.joined != address]
            for member in self._each(
                new, "cannot join the trainer", lambda m: m.server.join(*address, m.listing.replica)
            ):
                self.members.post(Joined(member.listing.replica, member.listing.incarnation, address))
            joined = [m for m in members if m.state.joined == address]
            begun = joined
            if staged:
                self._staging = joined
            elif joined:
                begun = self._pause(version, joined, everyone=only is None, wait_s=wait_s)
            if begun or only is not None or waiting is None:
                break
            waiting.on()
            self.members.closing.wait(self._look_s)
        return sorted(m.listing.replica for m in begun)

    def swap(self, version: int) -> None:
        """Pauses the servers that take part in a staged refit, and makes them replace their weights by the weights of
        `version`, all of which the trainer has sent. `end_refit` waits for them.
        """
        self._pause(version, self._staging, everyone=True, wait_s=SWAP_S)

    def _pause(self, version: int, members: Sequence[Member], *, everyone: bool, wait_s: float) -> list[Member]:
        """Pauses the servers `members` and starts their updates to `version`. Returns the servers that could be paused.

        `everyone`: see states.Refit. `wait_s`: maximum seconds until the weights begin to arrive.
        """
        self._paused, by_replica = time.perf_counter(), {m.listing.replica: m for m in members}
        pauses = self.members.post(Refit(version, [*by_replica], everyone))
        self._loads = {}
        for loads in self._threads.map(lambda pause: self._do(by_replica[pause.replica], pause, wait_s), pauses):
            for load in loads:
                member = by_replica[load.replica]
                self._loads[member] = self._threads.submit(self._do, member, load, wait_s)
        return [*self._loads]

    def _do(self, member: Member, action: Action, wait_s: float) -> list[Action]:
        """Does an action of a weight sync at a server. Returns the actions that follow."""
        replica, ticket, version = action.replica, action.ticket, action.version

        def load(_: Member) -> None:
            member.server.update(version, wait_s)
            member.server.resume()

        if action.verb == "pause":
            well = self._step(
                member, "could not be paused for a refit", lambda m: m.server.pause(), ticket=ticket, hang_up=True
            )
            return self.members.post(Paused(replica, ticket)) if well else []
        if self._step(member, f"is out until it takes version {version}", load, ticket=ticket, hang_up=True):
            self.members.post(Loaded(replica, ticket, version))
        return []

    def end_refit(self) -> int:
        """Waits until the servers have finished the weight sync (refit) that the trainer has finished. Servers with the
        new weights get requests again. Other servers get no requests until they receive the weights. Returns the number
        of servers that get requests.
        """
        for load in self._loads.values():
            load.result()
        loaded, self._loads = self._loads, {}
        self.pause_s = time.perf_counter() - self._paused
        return sum(member in loaded for member in self.members.serving())

    def tend(self) -> None:
        """Sends the current weights to servers that do not have them. A no-op in threads other than the owner thread,
        and during a weight sync (refit).
        """
        if self.refresh is None or self.version < 0 or self._loads or not self.owned():
            return
        # A server whose last weight sync failed recently is left alone for a while.
        latest = time.monotonic() - min(AGAIN_S, self.members.limits.wait_s / 4)
        states = self.members.state.servers.items()
        stale = [replica for replica, s in states if s.phase is Phase.STALE and s.failed_s < latest]
        if not stale:
            return
        # The GPUs have no memory for the trainer's weights while the servers' KV caches are allocated.
        if self._colocated and not self.members.state.asleep:
            if self.sleep_all is not None and not self.members.serving():
                self.sleep_all()
            return
        self.refresh(stale)

    def sleep(self, expected: Collection[str], *, discard: bool) -> list[str]:
        """Puts the live servers to sleep, so that they release GPU memory. Returns the incarnations (ids of server
        starts) of the sleeping servers.

        `expected`: incarnations to wait for, up to LISTED_S seconds, because they may have registered just now.
        `discard`: if True, the servers drop their weights, and get no requests before the next weight sync (refit).
        """
        end = time.monotonic() + LISTED_S
        while not {*expected} <= {m.listing.incarnation for m in self.members.living()} and time.monotonic() < end:
            self.members.closing.wait(self._look_s)
        self.members.post(Asleep(discard))
        living = self.members.living()
        asleep = self._each(living, "could not be put to sleep", lambda m: m.server.sleep(discard=discard))
        return [member.listing.incarnation for member in asleep]

    def wake(self) -> None:
        """Wakes the servers that were put to sleep. A server that fails to wake gets no requests until it has received
        the weights again.
        """
        self._each(self.members.living(), "could not be woken", lambda m: m.server.wake())
        self.members.post(Awake())

    def close(self) -> None:
        """Aborts the requests in progress, also those of weight syncs. Their callers get EngineError."""
        super().close()
        self._threads.shutdown(cancel_futures=True)

    def _each(self, members: Sequence[Member], failing: str, verb: Callable[[Member], None]) -> list[Member]:
        """Runs `_step` on several servers at once. Returns the servers for which `_step` succeeded."""
        done = self._threads.map(lambda member: self._step(member, failing, verb), members)
        return [member for member, well in zip(members, done, strict=True) if well]

    def _step(
        self, member: Member, failing: str, verb: Callable[[Member], None], *, ticket: int | None = None,
        hang_up: bool = False,
    ) -> bool:  # fmt: skip
        """Runs one request of a weight sync, sleep or wake-up on a server. Returns whether the request succeeded. A
        server that fails this request gets no further requests until it has received the weights again.

        `failing`: what the server failed to do, for the log. `ticket`, `hang_up`: see states.Failed.
        """
        with self.members.change:
            member.requests += 1
        try:
            verb(member)
        except (ServerLost, RequestRefused) as error:
            why, listing = f"it {failing}: {error}", member.listing
            # A repeated failure is logged only once, because a waiting caller may retry twice a second.
            if why != member.state.why and not self.members.closing.is_set():
                _log.warning("%s %s: %s", listing.name, failing, error)
            failed = Failed(listing.replica, listing.incarnation, ticket, why, time.monotonic(), hang_up)
            hang_ups = self.members.post(failed)
            self.members.look_after(member, str(error))
            for _ in hang_ups:
                member.server.hang_up()
            return False
        finally:
            with self.members.change:
                member.requests -= 1
        return True


def given(role: str, servers: Sequence[Server], limits: Limits) -> ServerEngine:
    """Returns an engine with the given servers, whose weights never change. A server stays in use even if it fails
    requests.
    """
    return ServerEngine(Members(role, limits, servers=servers))


def _shares(lengths: Sequence[int], servers: int) -> list[list[int]]:
    """Divides sequences of the given lengths into scoring requests, so that there is work for every server. Returns the
    sequence indices of each request.
    """
    most = min(SCORED_SEQUENCES, -(-len(lengths) // servers))
    shares: list[list[int]] = []
    tokens = 0
    for place, length in enumerate(lengths):
        if not shares or len(shares[-1]) == most or tokens + length > SCORED_TOKENS:
            shares.append([])
            tokens = 0
        shares[-1].append(place)
        tokens += length
    return shares
