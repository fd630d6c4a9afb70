"""Several servers as one engine. A request goes to the least loaded server, and to another one when a server fails it.
No server answers with weights that are not current.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from megatron_rl.config.schema import Servers
from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.pool.dispatch import Dispatcher, Outstanding, Request
from megatron_rl.engines.pool.membership import LOOK_S, Address, Limits, ListedMembers, Member, Members
from megatron_rl.engines.pool.pool_session import PoolSession
from megatron_rl.engines.pool.server_refits import PoolRefits
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import Tokens, TopScores
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_registry import Listing, ServerRegistry

SCORED_SEQUENCES, SCORED_TOKENS = 32, 1 << 15  # most sequences and tokens of one request for scores
LISTED_S = 10.0  # from a server's first answer until a pool has it among its living members


class ServerEngine:
    """Implements engines.protocol.Engine over servers with weights of their own that nobody changes: `members` is what
    they are.

    Requests may come from any thread; they wait while there is no server for them. `hopeless`, when set, tells why no
    server will come any more, or None: waiting ends then.
    """

    def __init__(self, members: Members, *, look_s: float = LOOK_S, shared: SharedGpus | None = None) -> None:
        self.members = members
        self.hopeless: Callable[[], str | None] | None = None
        self._look_s = look_s
        self._dispatcher = Dispatcher(
            members, look_s, tend=self.tend, refitting=self._refitting, hopeless=self._hopeless,
            shared=shared or SharedGpus(),
        )  # fmt: skip

    @property
    def version(self) -> int:
        """The version of the weights that servers answer with; -1 before the first refit."""
        return self.members.version

    @property
    def failures(self) -> int:
        """Number of requests that were sent again."""
        return self._dispatcher.failures

    def session(self) -> PoolSession:
        """Returns a new session; see PoolSession.answers for what it raises."""
        return PoolSession(self._dispatcher)

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """See engines.protocol.Engine. The sequences are spread over the servers. Raises as PoolSession.answers
        does."""
        return [scores.logprobs for scores in self.score_top(sequences, 0)]

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """See engines.protocol.Engine. Raises as `score` does, and EngineError when a server does not return them."""
        arrays = [np.array(tokens, np.int32) for tokens in sequences]
        work, waiting, found = Outstanding(), self._dispatcher.waiting(), dict[int, TopScores]()
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
        """See engines.protocol.Engine."""

    def close(self) -> None:
        """Ends the requests under way: their callers get EngineError."""
        self.members.close()
        self._dispatcher.close()

    def _refitting(self) -> bool:
        return False

    def _hopeless(self) -> str | None:
        return None if self.hopeless is None else self.hopeless()

    async def _score(
        self, work: Outstanding, places: Sequence[int], sequences: list[np.ndarray], k: int
    ) -> dict[int, TopScores]:
        """Returns the scores of some sequences, by index."""

        async def ask(member: Member, version: int) -> list[TopScores]:
            scores = await member.server.score(sequences, k, timeout_s=self.members.limits.request_timeout_s)
            if not self.members.serves(member, version):
                raise ServerLost(f"{member.server.url} did not keep version {version} of the weights while it scored")
            return scores

        what = f"{len(sequences)} sequences to score, the longest of {max(map(len, sequences))} tokens"
        scores, _ = await self._dispatcher.send(work, Request(ask, what, len(sequences)))
        return dict(zip(places, scores, strict=True))


class Pool(ServerEngine):
    """The servers of one role that a server registry lists, as one engine on the driver.

    The thread that made the pool owns it: refits and `close` are called there. `connect` makes a client. `listed`: the
    role under whose name the servers are listed, when roles share them. `fixed`: the servers keep the weights that they
    are started with. `refresh`, when set, brings the given replicas to the current weights while the others serve. It
    is called for a server without current weights, within the owner's own calls alone, because it is collective.
    `shared`: the GPUs that servers of other roles use, too.
    """

    def __init__(
        self, role: str, settings: Servers, registry: ServerRegistry, connect: Callable[[Listing], Server], *,
        fixed: bool = False, look_s: float = LOOK_S, listed: str | None = None, shared: SharedGpus | None = None,
    ) -> None:  # fmt: skip
        self.refresh: Callable[[list[int]], None] | None = None
        # Set when the servers use the trainer's GPUs: puts all servers to sleep, brings the current weights to those
        # without them, and wakes all.
        self.sleep_all: Callable[[], None] | None = None
        self._colocated = settings.colocate
        self._owner = threading.get_ident()
        members = ListedMembers(role, settings, registry, connect, fixed=fixed, look_s=look_s, listed=listed)
        self._refits = PoolRefits(members)
        super().__init__(members, look_s=look_s, shared=shared)

    def begin_refit(
        self, version: int, address: Address, only: Sequence[int] | None = None, *, wait_s: float
    ) -> list[int]:
        """Prepares the living servers (of the replicas `only`) for a refit that the trainer, at `address`, begins now.

        Returns the replicas that take part. They are paused as `engine.pause` says, and do not serve until they have
        the weights. Without `only` it waits for a first server, and raises EngineError when none comes within
        `engine.wait_s`. It does not wait for servers in the trainer's GPUs, which cannot be started now.
        """
        waiting = None if self._colocated else self._dispatcher.waiting()
        return self._refits.begin(version, address, only, wait_s=wait_s, waiting=waiting, look_s=self._look_s)

    def end_refit(self) -> int:
        """Waits for the servers after the trainer is done. Servers that have the weights serve, the others are out
        until they take them. Returns the number of servers that serve.
        """
        return self._refits.end()

    def tend(self) -> None:
        """Brings servers without current weights to the current weights. A no-op in other threads than the owner's, and
        during a refit.
        """
        if self.refresh is None or self.version < 0 or self._refits.under_way or threading.get_ident() != self._owner:
            return
        if not (stale := self._refits.stale()):
            return
        if self._colocated and not self._refits.away:  # beside their caches there is no room for the trainer's weights
            if self.sleep_all is not None and not self.members.serving():
                self.sleep_all()
            return
        self.refresh(stale)

    def sleep(self, expected: Collection[str], *, discard: bool) -> list[str]:
        """Puts the living servers to sleep. Returns the incarnations of the servers that sleep now. It waits a moment
        for the incarnations `expected`, which may have been listed just now. `discard`: the weights are dropped, and no
        server serves before a refit.
        """
        end = time.monotonic() + LISTED_S
        while not {*expected} <= {m.listing.incarnation for m in self.members.living()} and time.monotonic() < end:
            self.members.closing.wait(self._look_s)
        return self._refits.sleep(discard=discard)

    def wake(self) -> None:
        """Wakes the living servers. A server that does not wake does not serve until it has taken the weights again."""
        self._refits.wake()

    def close(self) -> None:
        super().close()
        self._refits.close()

    def _refitting(self) -> bool:
        return self._refits.under_way


def given(role: str, servers: Sequence[Server], limits: Limits) -> ServerEngine:
    """Returns an engine over servers that keep the weights they have. A server stays in use whatever requests it
    failed.
    """
    return ServerEngine(Members(role, limits, servers=servers))


def _shares(lengths: Sequence[int], servers: int) -> list[list[int]]:
    """Splits sequences of these lengths into requests, so that every server gets some. Returns the indices of each
    request.
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
