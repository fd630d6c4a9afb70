"""Servers as one engine. Requests go to the least loaded, failures elsewhere; none answers with weights that are not
current.
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

SCORED_SEQUENCES, SCORED_TOKENS = 32, 1 << 15  # of one request
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
        """See engines.protocol.Engine. Raises as `score` does, and EngineError where a server does not tell them."""
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
        """Ends what is under way: its callers get EngineError."""
        self.members.close()
        self._dispatcher.close()

    def _refitting(self) -> bool:
        return False

    def _hopeless(self) -> str | None:
        return None if self.hopeless is None else self.hopeless()

    async def _score(
        self, work: Outstanding, places: Sequence[int], sequences: list[np.ndarray], k: int
    ) -> dict[int, TopScores]:
        """Gets the scores of some sequences, by place."""

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

    The thread that made it owns it: refits and `close` are called there. `connect` makes a client. `listed`: the role
    under whose name the servers are listed, where roles share them. `fixed`: the servers keep the weights that they are
    started with. `refresh`, when set, brings the given replicas to the current weights
    while others serve. It is called when a server that has none is there, from within the owner's own calls alone,
    because it is collective. `shared`: the GPUs in which servers of other roles stand too.
    """

    def __init__(
        self, role: str, settings: Servers, registry: ServerRegistry, connect: Callable[[Listing], Server], *,
        fixed: bool = False, look_s: float = LOOK_S, listed: str | None = None, shared: SharedGpus | None = None,
    ) -> None:  # fmt: skip
        self.refresh: Callable[[list[int]], None] | None = None
        # Where the servers stand in the trainer's GPUs: sends all of them to sleep, brings those without current
        # weights to these, and wakes them. None until somebody sets it.
        self.sleep_all: Callable[[], None] | None = None
        self._colocated = settings.colocate
        self._owner = threading.get_ident()
        members = ListedMembers(role, settings, registry, connect, fixed=fixed, look_s=look_s, listed=listed)
        self._refits = PoolRefits(members)
        super().__init__(members, look_s=look_s, shared=shared)

    def begin_refit(
        self, version: int, address: Address, only: Sequence[int] | None = None, *, wait_s: float
    ) -> list[int]:
        """Gets the servers that live (of the replicas `only`) to take part in a refit that the trainer, at `address`,
        begins now.

        -> their replicas. Without `only` it waits for a first; with it there may be none. They are paused as
        `engine.pause` says, and none of them serves until it has the weights. Raises EngineError when none comes within
        `engine.wait_s`. Servers in the trainer's GPUs are not waited for, since none is started while these are not
        free: there may be none of them either.
        """
        waiting = None if self._colocated else self._dispatcher.waiting()
        return self._refits.begin(version, address, only, wait_s=wait_s, waiting=waiting, look_s=self._look_s)

    def end_refit(self) -> int:
        """Waits for the servers after the trainer is done: those that have the weights serve, the others are out until
        they take them. -> how many serve.
        """
        return self._refits.end()

    def tend(self) -> None:
        """Brings servers that are there without current weights to them, when the owner calls; not in the middle of a
        refit, which other servers may be the object of.
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
        """Puts the servers to sleep that live -> the incarnations of those that sleep now. It waits a moment for the
        incarnations `expected`, which may have been listed just now. `discard`: their weights are dropped; none serves
        before a refit.
        """
        end = time.monotonic() + LISTED_S
        while not {*expected} <= {m.listing.incarnation for m in self.members.living()} and time.monotonic() < end:
            self.members.closing.wait(self._look_s)
        return self._refits.sleep(discard=discard)

    def wake(self) -> None:
        """Wakes the servers that live; one that does not wake serves no more until it has taken the weights anew."""
        self._refits.wake()

    def close(self) -> None:
        super().close()
        self._refits.close()

    def _refitting(self) -> bool:
        return self._refits.under_way


def given(role: str, servers: Sequence[Server], limits: Limits) -> ServerEngine:
    """Returns an engine over servers that keep the weights they have. Each takes part from now on, and is asked
    whatever it failed.
    """
    return ServerEngine(Members(role, limits, servers=servers))


def _shares(lengths: Sequence[int], servers: int) -> list[list[int]]:
    """Splits sequences of these lengths into requests -> the places of each one's sequences. Every server gets some."""
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
