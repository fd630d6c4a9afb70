"""Many servers as one engine: requests go to the least loaded, failures elsewhere; none answers with weights that are not current."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl.config import Servers
from megatron_rl.engines import sampler
from megatron_rl.engines.base import Completion, EngineError, Sampling
from megatron_rl.engines.launch import tail
from megatron_rl.engines.roster import Listing, Roster
from megatron_rl.engines.server import RequestRefused, Server, ServerLost
from megatron_rl.types import Stop

LOOK_S = 0.5  # between looks at the roster, and at what a wait is for
SAY_S = 30.0  # between lines that say that the run waits
_log = logging.getLogger(__name__)
Address = tuple[str, int]


@dataclass
class _Member:
    """A server of the pool. It serves while `version` is the pool's."""

    listing: Listing
    server: Server
    version: int | None = None  # None: none that counts
    joined: Address | None = None  # the refit board that it has a seat at
    load: int = 0  # sequences under way
    seen: float = field(default_factory=time.monotonic)  # when its beat last changed
    lost: str | None = None  # why


class Pool:
    """Implements engines.base.Engine and Streaming over the servers of one role. Lives on the driver; its verbs are called from one thread.

    `connect` makes a client. `refresh`, when set, brings the given replicas to the current weights while others serve: called when a
    server that has none is there and requests wait for it.
    """

    def __init__(self, role: str, settings: Servers, roster: Roster, connect: Callable[[Listing], Server]) -> None:
        self.version = -1
        self.refresh: Callable[[list[int]], None] | None = None
        self._role, self._settings, self._roster, self._connect = role, settings, roster, connect
        self._members: dict[int, _Member] = {}
        self._change = threading.Condition()
        self._closed = False
        self._owner = threading.get_ident()  # the thread that may call `refresh`, which is collective
        self._requests = concurrent.futures.ThreadPoolExecutor(settings.replicas * settings.max_requests, f"requests-{role}")
        self._refits = concurrent.futures.ThreadPoolExecutor(settings.replicas, f"refits-{role}")
        self._updates: dict[int, Future[None]] = {}
        self.failures = 0  # requests that were sent again
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._requests.shutdown(cancel_futures=True)
        self._refits.shutdown(cancel_futures=True)
        self._watcher.join()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts -> [P][n] completions, in order. See `as_done` for what it raises."""
        asked = [self.submit(prompt, sampling, i) for i, prompt in enumerate(prompts)]
        for _ in self.as_done(asked):
            pass
        return [future.result() for future in asked]

    def submit(self, prompt: Sequence[int], sampling: Sampling, index: int) -> Future[list[Completion]]:
        """Asks for one prompt's n completions."""
        return self._requests.submit(self._ask, list(prompt), sampling, index)

    def as_done(self, asked: Sequence[Future[list[Completion]]]) -> Iterator[Future[list[Completion]]]:
        """Each of them when it is done; the others are called off when this ends early.

        While no server has the current weights it waits, and says so. Raises EngineError when none comes within `engine.wait_s`, or
        `engine.attempts` living servers failed a request; RequestRefused for a request that no server would take.
        """
        left, waiting = set(asked), _Waiting(self._settings.wait_s, self._role)
        try:
            while left:
                done, left = concurrent.futures.wait(left, LOOK_S, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    future.result()
                    yield future
                self.tend()
                if not self._ready():
                    waiting.on(self._why_none())
                else:
                    waiting.over()
        finally:
            for future in left:
                future.cancel()

    def begin_refit(self, version: int, address: Address, only: Sequence[int] | None = None, *, wait_s: float) -> list[int]:
        """Gets the servers that live (of the replicas `only`) to take part in a refit that the trainer, at `address`, begins now.

        -> their replicas, at least one: it waits for a first. Their requests are paused, none of them serves until `end_refit`.
        Raises EngineError when none comes.
        """
        waiting = _Waiting(self._settings.wait_s, self._role)
        while True:
            members = [m for m in self._living() if only is None or m.listing.replica in only]
            seated = [m for m in members if self._seat(m, address)]
            if seated or (only is not None and not members):
                break
            waiting.on(self._why_none())
            time.sleep(LOOK_S)
        with self._change:
            self.version = version
            for member in self._members.values():
                if only is None or member in seated:
                    member.version = None
        self._updates = {m.listing.replica: self._refits.submit(self._update, m, version, wait_s) for m in seated}
        return sorted(self._updates)

    def end_refit(self) -> int:
        """After the trainer is done: the servers that have the weights serve, the others are out until they take them. -> how many have."""
        for replica, future in self._updates.items():
            if error := future.exception():
                _log.warning("%s-%d is out until it takes version %d: %s", self._role, replica, self.version, error)
        return sum(future.exception() is None for future in self._updates.values())

    def _update(self, member: _Member, version: int, wait_s: float) -> None:
        """On a thread: one server through a refit."""
        try:
            member.server.pause()
            member.server.update(version, wait_s)
            member.server.resume()
        except (ServerLost, RequestRefused) as error:
            with self._change:
                member.joined = None
            self._suspect(member, str(error))
            raise
        with self._change:
            member.version = version
            self._change.notify_all()

    def _seat(self, member: _Member, address: Address) -> bool:
        if member.joined == address:
            return True
        try:
            member.server.join(*address, member.listing.replica)
        except (ServerLost, RequestRefused) as error:
            self._suspect(member, f"it cannot join the trainer: {error}")
            return False
        member.joined = address
        return True

    def tend(self) -> None:
        """Brings servers that are there and have no current weights to them, when called by the thread that owns the pool."""
        stale = [m.listing.replica for m in self._living() if m.version is None]
        if stale and self.refresh is not None and self.version >= 0 and threading.get_ident() == self._owner:
            self.refresh(stale)

    def _ask(self, prompt: list[int], sampling: Sampling, index: int) -> list[Completion]:
        """On a thread: one prompt's completions, whatever it takes; those that a refit cut short are written to their end."""
        seed = sampler.stream_key(sampling.seed, index, 0) & (1 << 62) - 1
        first = self._send(prompt, sampling, seed)
        return [self._completed(prompt, c, sampling, seed + j) for j, c in enumerate(first)]

    def _completed(self, prompt: list[int], begun: Completion, sampling: Sampling, seed: int) -> Completion:
        while begun.stop is Stop.ABORTED:
            kept = begun if self._settings.partial == "continue" else replace(begun, tokens=[], logprobs=[], model_logprobs=[], versions=[])
            left = sampling.max_tokens - len(kept.tokens)
            if left <= 0:
                return replace(kept, stop=Stop.LENGTH)
            [more] = self._send([*prompt, *kept.tokens], replace(sampling, n=1, max_tokens=left), seed + len(kept.tokens))
            begun = _joined(kept, more)
        return begun

    def _send(self, prompt: list[int], sampling: Sampling, seed: int) -> list[Completion]:
        """Until some server answers. Raises EngineError when too many living ones fail."""
        failures: list[str] = []
        while True:
            member = self._take(sampling.n)
            try:
                return self._dated(member, member.server.generate(prompt, sampling, seed=seed, timeout_s=self._settings.request_timeout_s))
            except ServerLost as error:
                self.failures += 1
                failures.append(str(error))
                if not self._suspect(member, str(error)):
                    if len(failures) >= self._settings.attempts:
                        end = tail(Path(member.listing.log))
                        raise EngineError(
                            f"a request failed {len(failures)} times: {'; '.join(failures)}; the end of {member.listing.log}:\n{end}"
                        ) from error
                else:
                    failures.pop()  # that server is gone: it is not the request's fault
            finally:
                self._give_back(member, sampling.n)

    def _dated(self, member: _Member, completions: list[Completion]) -> list[Completion]:
        """Every completion with the versions that wrote it."""
        return [c if c.versions else replace(c, versions=[(0, self.version)]) for c in completions]

    def _take(self, sequences: int) -> _Member:
        """The least loaded server with the current weights; waits for one."""
        with self._change:
            while True:
                if self._closed:
                    raise EngineError(f"the pool of {self._role} engines was closed")
                ready = [m for m in self._members.values() if m.lost is None and m.version == self.version >= 0]
                if ready:
                    member = min(ready, key=lambda m: (m.load, m.listing.replica))
                    member.load += sequences
                    return member
                self._change.wait(LOOK_S)

    def _give_back(self, member: _Member, sequences: int) -> None:
        with self._change:
            member.load -= sequences

    def _suspect(self, member: _Member, why: str) -> bool:
        """Whether it is lost, now that it failed a request."""
        if member.lost is None and member.server.ready():
            return False
        self._lose(member, why)
        return True

    def _lose(self, member: _Member, why: str) -> None:
        with self._change:
            if member.lost is None:
                member.lost, member.version = why, None
                _log.warning("%s is lost: %s", member.listing.name, why)

    def _watch(self) -> None:
        """On a thread: servers come, beat, fall silent, and go."""
        while not self._closed:
            found = {listing.replica: listing for listing in self._roster.read(self._role)}
            for replica, listing in found.items():
                self._look_at(replica, listing)
            for member in self._living():
                if member.listing.replica not in found:
                    self._lose(member, "it left the roster")
                elif time.monotonic() - member.seen > self._settings.lost_after_s:
                    self._lose(member, f"no sign of life for {self._settings.lost_after_s:.0f} s")
            with self._change:
                self._change.wait(LOOK_S)

    def _look_at(self, replica: int, listing: Listing) -> None:
        member = self._members.get(replica)
        if replica >= self._settings.replicas:
            return
        if member is None or member.listing.incarnation != listing.incarnation:
            if member is not None:
                self._lose(member, "it was started anew")
            with self._change:
                self._members[replica] = _Member(listing, self._connect(listing))
        elif listing.beat != member.listing.beat:
            member.listing, member.seen = listing, time.monotonic()
            if (
                member.lost is not None and member.load == 0 and member.server.ready()
            ):  # it was slow, not dead: it must take the weights anew
                with self._change:
                    member.lost, member.version, member.joined = None, None, None

    def _living(self) -> list[_Member]:
        with self._change:
            return [m for m in self._members.values() if m.lost is None]

    def _ready(self) -> bool:
        return any(m.version == self.version for m in self._living())

    def _why_none(self) -> str:
        with self._change:
            known = [f"{m.listing.name}: {m.lost or 'it has no current weights yet'}" for m in self._members.values()]
        return "; ".join(known) or f"no {self._role} engine is in {self._roster.directory}"


class _Waiting:
    """Says now and then that the run waits for a server, and ends the wait at some point."""

    def __init__(self, limit_s: float, role: str) -> None:
        self._limit_s, self._role = limit_s, role
        self._since: float | None = None
        self._said = 0.0

    def on(self, why: str) -> None:
        """Raises EngineError after `limit_s` without `over`."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._said = now
        if now - self._since > self._limit_s:
            raise EngineError(f"no {self._role} engine for {self._limit_s:.0f} s (engine.wait_s): {why}")
        if now - self._said > SAY_S:
            self._said = now
            _log.warning("waiting for a %s engine for %.0f s: %s", self._role, now - self._since, why)

    def over(self) -> None:
        self._since = None


def _joined(begun: Completion, more: Completion) -> Completion:
    """A completion and what was written after it."""
    both = [(begun.model_logprobs, more.model_logprobs)]
    [model] = [None if a is None or b is None else a + b for a, b in both]
    offset = len(begun.tokens)
    return Completion(
        tokens=begun.tokens + more.tokens,
        logprobs=begun.logprobs + more.logprobs,
        stop=more.stop,
        model_logprobs=model,
        versions=begun.versions + [(start + offset, version) for start, version in more.versions],
    )
