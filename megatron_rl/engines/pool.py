"""Many servers as one engine: requests go to the least loaded, failures elsewhere; none answers with weights that are not current."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Servers
from megatron_rl.engines import sampler
from megatron_rl.engines.base import Completion, EngineError, Sampling
from megatron_rl.engines.launch import tail
from megatron_rl.engines.roster import Listing, Roster
from megatron_rl.engines.server import RequestRefused, Server, ServerLost
from megatron_rl.types import Stop

LOOK_S = 0.5  # between looks at the roster, and at what a wait is for
FIRST_SAY_S, SAY_S = 5.0, 30.0  # until the first line that says that the run waits, and between the others
AGAIN_S = 30.0  # from a refit that a server failed to the next one for it alone
_log = logging.getLogger(__name__)
Address = tuple[str, int, str]  # of a refit board: host, port, and the secret that signs there
Finished = tuple[int, dict[int, Completion]]  # of the prompt with this index, completions by sample index


@dataclass(eq=False)
class _Member:
    """A server of the pool. It serves while it is not lost and `version` is the pool's. The watcher changes `listing` and `seen`;
    the rest is changed under the pool's lock."""

    listing: Listing
    server: Server
    seen: float  # when its beat last changed
    lost: str | None = "it has given no sign of life yet"  # why; a listing may be of a server that died with its host
    version: int | None = None  # None: none that counts
    joined: Address | None = field(default=None, repr=False)  # the refit board that it has a seat at
    load: int = 0  # sequences under way
    requests: int = 0  # that it has not answered, steps of a refit among them
    trouble: str | None = None  # why its last refit failed
    troubled: float = -math.inf  # when


class Asking:
    """Implements engines.base.Asked: prompts of one sampling that a pool works on."""

    def __init__(self, pool: Pool, sampling: Sampling) -> None:
        self._pool, self.sampling = pool, sampling
        self.done: queue.SimpleQueue[concurrent.futures.Future[Finished]] = queue.SimpleQueue()
        self.found: dict[int, dict[int, Completion]] = {}  # of the prompts that are not done: by sample index
        self.over = False  # nobody waits for it any more

    def ask(self, index: int, prompt: Sequence[int]) -> None:
        self.found[index] = {}
        self._pool.ask(self, index, list(prompt))

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """See Pool.answers."""
        return self._pool.answers(self)


class Pool:
    """Implements engines.base.Engine and Streaming over the servers of one role. Lives on the driver.

    The thread that made it owns it: refits and `close` are called there. Requests may come from others too; they wait while there is
    no server for them. `connect` makes a client. Two attributes, when set:
    `refresh` brings the given replicas to the current weights while others serve. Called when a server that has none is there, from
    within the owner's own calls alone, because it is collective.
    `hopeless` tells why no server will come any more, or None: waiting ends then.
    """

    def __init__(
        self, role: str, settings: Servers, roster: Roster, connect: Callable[[Listing], Server], *, look_s: float = LOOK_S
    ) -> None:  # fmt: skip
        self.version = -1
        self.refresh: Callable[[list[int]], None] | None = None
        self.hopeless: Callable[[], str | None] | None = None
        self.failures = 0  # requests that were sent again
        self._role, self._settings, self._roster, self._connect = role, settings, roster, connect
        self._look_s, self._owner = look_s, threading.get_ident()
        self._members: dict[int, _Member] = {}  # by replica; the watcher alone adds to it
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._requests = concurrent.futures.ThreadPoolExecutor(settings.replicas * settings.at_once, f"requests-{role}")
        self._refits = concurrent.futures.ThreadPoolExecutor(settings.replicas, f"refits-{role}")
        self._refitting = False  # between begin_refit and end_refit
        self._updates: dict[_Member, concurrent.futures.Future[bool]] = {}
        self._watcher = threading.Thread(target=self._watch, name=f"roster-{role}", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Ends what is under way: its callers get EngineError."""
        self._closing.set()
        with self._change:
            self._change.notify_all()
        self._hang_up_for_good()
        self._watcher.join()
        self._hang_up_for_good()  # a server that came meanwhile
        self._requests.shutdown(cancel_futures=True)
        self._refits.shutdown(cancel_futures=True)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """[P] prompts -> [P][n] completions, in order. See `answers` for what it raises."""
        found = dict(self.stream(prompts, sampling))
        return [found[i] for i in range(len(prompts))]

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """(prompt index, its n completions), as they are done. See `answers` for what it raises."""
        asked = self.begin(sampling)
        for i, prompt in enumerate(prompts):
            asked.ask(i, prompt)
        return asked.answers()

    def begin(self, sampling: Sampling) -> Asking:
        """For prompts that become known one after the other."""
        return Asking(self, sampling)

    def ask(self, call: Asking, index: int, prompt: list[int]) -> None:
        self._submit(call, self._ask, index, prompt)

    def answers(self, call: Asking) -> Iterator[tuple[int, list[Completion]]]:
        """(index, its n completions) of what was asked, as they are done.

        While no server has the current weights it waits, and says so. Raises EngineError when none comes within `engine.wait_s`, or
        `engine.attempts` living servers failed a request; RequestRefused for a request that no server would take; ConfigError when
        servers are another run's.
        """
        waiting = self._waiting()
        try:
            while call.found:
                self.tend()
                if self._serving() or self._refitting:  # servers that take weights are there
                    waiting.over()
                else:
                    self._wait(waiting)
                try:
                    task = call.done.get(timeout=self._look_s)
                except queue.Empty:
                    continue
                self._check_open()
                i, finished = task.result()
                call.found[i] |= finished
                if len(call.found[i]) == call.sampling.n:
                    whole = call.found.pop(i)
                    yield i, [whole[j] for j in range(call.sampling.n)]
        finally:
            with self._change:
                call.over = True
                self._change.notify_all()

    def begin_refit(
        self, version: int, address: Address, only: Sequence[int] | None = None, *, wait_s: float
    ) -> list[int]:
        """Gets the servers that live (of the replicas `only`) to take part in a refit that the trainer, at `address`, begins now.

        -> their replicas. Without `only` it waits for a first; with it there may be none. They are paused as `engine.pause` says, and
        none of them serves until it has the weights. Raises EngineError when none comes within `engine.wait_s`.
        """
        waiting = self._waiting()
        while True:
            members = [m for m in self._living() if only is None or m.listing.replica in only]
            seated = _those(members, self._refits.map(functools.partial(self._seat, address=address), members))
            if seated:
                with self._change:
                    self._refitting, self.version = True, version
                    for member in self._members.values() if only is None else seated:
                        member.version = None
            paused = _those(seated, self._refits.map(self._pause, seated))
            if paused or only is not None:
                break
            self._refitting = False
            self._wait(waiting)
            self._closing.wait(self._look_s)
        self._refitting = bool(paused)
        self._updates = {m: self._refits.submit(self._update, m, version, wait_s) for m in paused}
        return sorted(m.listing.replica for m in paused)

    def end_refit(self) -> int:
        """After the trainer is done: the servers that have the weights serve, the others are out until they take them. -> how many have."""
        for future in self._updates.values():
            future.result()
        updated, self._updates, self._refitting = self._updates, {}, False
        return sum(m in updated for m in self._serving())

    def _seat(self, member: _Member, address: Address) -> bool:
        if member.joined == address:
            return True
        join = functools.partial(member.server.join, *address, member.listing.replica)
        if not self._step(member, "cannot join the trainer", join):
            return False
        member.joined = address
        return True

    def _pause(self, member: _Member) -> bool:
        paused = self._step(member, "could not be paused for a refit", member.server.pause)
        if not paused:
            member.server.hang_up()  # its requests are answered elsewhere
        return paused

    def _update(self, member: _Member, version: int, wait_s: float) -> bool:
        def update() -> None:
            member.server.update(version, wait_s)
            member.server.resume()

        if not self._step(member, f"is out until it takes version {version}", update):
            member.server.hang_up()  # it is still paused, and may keep requests
            return False
        with self._change:
            member.version, member.trouble = version, None
            self._change.notify_all()
        return True

    def _step(self, member: _Member, failing: str, verb: Callable[[], None]) -> bool:
        """On a thread: a step of a refit. Whether it went well; if not, the server is out."""
        with self._change:
            member.requests += 1
        try:
            verb()
        except (ServerLost, RequestRefused) as error:
            trouble = f"it {failing}: {error}"
            if trouble != member.trouble and not self._closing.is_set():  # a wait may come here twice a second
                _log.warning("%s %s: %s", member.listing.name, failing, error)
            with self._change:
                member.version, member.joined, member.trouble, member.troubled = None, None, trouble, time.monotonic()
                self._change.notify_all()
            self._look_after(member, str(error))
            return False
        finally:
            with self._change:
                member.requests -= 1
        return True

    def tend(self) -> None:
        """Brings servers that are there without current weights to them, when the owner calls. Not in the middle of a refit, which other
        servers may be the object of."""
        if self.refresh is None or self.version < 0 or self._refitting or threading.get_ident() != self._owner:
            return
        latest = time.monotonic() - min(AGAIN_S, self._settings.wait_s / 4)
        stale = [m.listing.replica for m in self._living() if m.version is None and m.troubled < latest]
        if stale:
            self.refresh(stale)

    def _submit(self, call: Asking, task: Callable[..., Finished], *arguments: Any) -> None:
        self._check_open()
        self._requests.submit(task, call, *arguments).add_done_callback(call.done.put)

    def _ask(self, call: Asking, index: int, prompt: list[int]) -> Finished:
        """On a thread: one prompt's completions. Each one that a refit cut short becomes a task of its own."""
        seed = sampler.request_seed(call.sampling.seed, index)
        finished = {}
        for j, completion in enumerate(self._send(call, prompt, call.sampling, seed)):
            if completion.stop is Stop.ABORTED:
                self._submit(call, self._complete, index, j, prompt, completion, seed + j)
            else:
                finished[j] = completion
        return index, finished

    def _complete(
        self, call: Asking, index: int, sample: int, prompt: list[int], begun: Completion, seed: int
    ) -> Finished:
        """On a thread: a completion written to its end, however many refits cut it short."""
        while begun.stop is Stop.ABORTED:
            kept = begun if self._settings.partial == "continue" else _nothing_of(begun)
            left = call.sampling.max_tokens - len(kept.tokens)
            if left <= 0:
                begun = replace(kept, stop=Stop.LENGTH)
                break
            tandem = call.sampling.tandem and replace(call.sampling.tandem, seed=seed, written=len(kept.tokens))
            sampling = replace(call.sampling, n=1, max_tokens=left, tandem=tandem)
            [more] = self._send(call, [*prompt, *kept.tokens], sampling, seed_after(seed, len(kept.tokens)))
            begun = _joined(kept, more)
        return index, {sample: begun}

    def _send(self, call: Asking, prompt: list[int], sampling: Sampling, seed: int) -> list[Completion]:
        """Until some server answers. Raises EngineError when too many living ones fail, and when the call is over."""
        failures: list[str] = []
        failed: set[_Member] = set()
        while True:
            member, version = self._take(call, sampling.n, failed)
            try:
                answers = member.server.generate(
                    prompt, sampling, seed=seed, timeout_s=self._settings.request_timeout_s
                )
                return self._checked(member, version, answers)
            except ServerLost as error:
                self._look_after(member, str(error))
                with self._change:
                    self.failures += 1
                    served = member.lost is None and member.version == version  # else it was not the request's fault
                if served and not self._closing.is_set():
                    failures.append(str(error))
                    failed.add(member)
                if len(failures) >= self._settings.attempts:
                    what, end = (
                        f"a request failed {len(failures)} times: {'; '.join(failures)}",
                        tail(Path(member.listing.log)),
                    )
                    raise EngineError(f"{what}; the end of {member.listing.log}:\n{end}") from error
            finally:
                with self._change:
                    member.load, member.requests = member.load - sampling.n, member.requests - 1
                    self._change.notify(sampling.n)  # of hundreds that wait, perhaps: no more can begin now

    def _checked(self, member: _Member, version: int, answers: list[Completion]) -> list[Completion]:
        """Every completion with the versions that wrote it, none of them older than the server's when it was asked."""
        with self._change:
            serves = member.lost is None and member.version == version
        for answer in answers:
            oldest = min((v for _, v in answer.versions), default=version)
            if oldest < version:
                raise ServerLost(f"{member.server.url} answered with version {oldest} of the weights, not {version}")
            if answer.stop is Stop.ABORTED and serves:
                raise ServerLost(f"{member.server.url} ended a request early, though no refit had begun")
        return [replace(a, versions=_spans(a.versions or [(0, version)], len(a.tokens))) for a in answers]

    def _take(self, call: Asking, sequences: int, failed: set[_Member]) -> tuple[_Member, int]:
        """The least loaded server with the current weights, and their version; rather one that has not `failed`. Waits for one."""
        with self._change:
            while True:
                self._check_open()
                if call.over:
                    raise EngineError("nobody waits for this request any more")
                serving = self._serving()
                better = [m for m in serving if m not in failed] or serving
                free = [m for m in better if not m.load or m.load + sequences <= self._settings.at_once]
                if free:
                    member = min(free, key=lambda m: (m.load, m.listing.replica))
                    member.load, member.requests = member.load + sequences, member.requests + 1
                    return member, self.version
                self._change.wait(self._look_s)  # who was woken may not be who can begin

    def _look_after(self, member: _Member, why: str) -> None:
        """A server that failed, and does not say that it is well, is lost."""
        if member.lost is None and not self._closing.is_set() and not member.server.ready():
            self._lose(member, why)

    def _lose(self, member: _Member, why: str) -> None:
        with self._change:
            if member.lost is None:
                member.lost, member.version = why, None
                self._change.notify_all()
                _log.warning("%s is lost: %s", member.listing.name, why)

    def _watch(self) -> None:
        """On a thread: servers come, beat, fall silent, and go."""
        while not self._closing.is_set():
            try:
                self._look(self._roster.read(self._role), time.monotonic())
            except OSError as error:  # a file server that is away, say: beats that are not seen are told from silence by the next look
                _log.warning("cannot read the roster %s: %s", self._roster.directory, error)
            self._closing.wait(self._look_s)

    def _look(self, listings: Sequence[Listing], now: float) -> None:
        """`now`: when they were read. To ask a server whether it is ready may take seconds, in which others beat unseen."""
        for listing in listings:
            if 0 <= listing.replica < self._settings.replicas:
                self._look_at(listing, now)
        for member in list(self._members.values()):
            if member.lost is not None:
                if member.requests and not member.server.ready():
                    member.server.hang_up()  # it was not only slow: they would wait for their deadline
            elif now - member.seen > self._settings.lost_after_s:
                self._lose(member, f"no sign of life for {self._settings.lost_after_s:g} s")
            elif not self._roster.has(member.listing):
                self._lose(member, "it left the roster")

    def _look_at(self, listing: Listing, now: float) -> None:
        member = self._members.get(listing.replica)
        if member is None or member.listing.incarnation != listing.incarnation:
            new = _Member(listing, self._connect(listing), seen=now)
            with self._change:
                self._members[listing.replica] = new
            if member is not None:
                self._lose(member, "it was started anew")
                member.server.close()
        elif listing.beat != member.listing.beat:
            member.listing, member.seen = listing, now
            if (
                member.lost is not None and member.server.ready()
            ):  # what it holds may be anything: it must take the weights anew
                with self._change:
                    member.lost, member.version, member.joined = None, None, None

    def _hang_up_for_good(self) -> None:
        for member in list(self._members.values()):
            member.server.close()

    def _living(self) -> list[_Member]:
        with self._change:
            return [m for m in self._members.values() if m.lost is None]

    def _serving(self) -> list[_Member]:
        return [m for m in self._living() if m.version == self.version >= 0]

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineError(f"the pool of {self._role} engines was closed")
        if not self._watcher.is_alive():
            raise EngineError(
                f"nobody looks at {self._roster.directory} any more: the thread that did failed, see its traceback"
            )

    def _waiting(self) -> _Waiting:
        return _Waiting(self._settings.wait_s, self._role)

    def _wait(self, waiting: _Waiting) -> None:
        """For a server. Raises EngineError when there is no point in it."""
        self._check_open()
        if self.hopeless is not None and (why := self.hopeless()):
            raise EngineError(why)
        with self._change:
            known = [
                f"{m.listing.name}: {m.lost or m.trouble or 'it has no current weights yet'}"
                for m in self._members.values()
            ]
        waiting.on("; ".join(known) or f"no {self._role} engine is in {self._roster.directory}")


class _Waiting:
    """Says now and then that the run waits for a server, and ends the wait at some point."""

    def __init__(self, limit_s: float, role: str) -> None:
        self._limit_s, self._role = limit_s, role
        self._since: float | None = None
        self._next = 0.0  # line

    def on(self, why: str) -> None:
        """Raises EngineError after `limit_s` without `over`."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._next = now, now + min(FIRST_SAY_S, self._limit_s / 4)
        if now - self._since > self._limit_s:
            raise EngineError(f"no {self._role} engine for {self._limit_s:g} s (engine.wait_s): {why}")
        if now > self._next:
            self._next = now + SAY_S
            _log.warning("waiting for a %s engine for %.0f s: %s", self._role, now - self._since, why)

    def over(self) -> None:
        self._since = None


def seed_after(seed: int, written: int) -> int:
    """Of a completion that goes on after so many tokens: no sibling's, whose seeds are next to each other."""
    return seed if written == 0 else sampler.stream_key(seed, 0, written) & (1 << 62) - 1


def _those(members: Sequence[_Member], good: Iterator[bool]) -> list[_Member]:
    return [member for member, well in zip(members, good, strict=True) if well]


def _nothing_of(begun: Completion) -> Completion:
    authors = None if begun.authors is None else []
    return replace(begun, tokens=[], logprobs=[], model_logprobs=[], versions=[], authors=authors)


def _joined(begun: Completion, more: Completion) -> Completion:
    """A completion and what was written after it."""
    offset = len(begun.tokens)
    model = (
        None
        if begun.model_logprobs is None or more.model_logprobs is None
        else begun.model_logprobs + more.model_logprobs
    )
    later = [(start + offset, version) for start, version in more.versions]
    return Completion(
        tokens=begun.tokens + more.tokens,
        logprobs=begun.logprobs + more.logprobs,
        stop=more.stop,
        model_logprobs=model,
        authors=None if begun.authors is None or more.authors is None else begun.authors + more.authors,
        versions=_spans(begun.versions + later, offset + len(more.tokens)),
        experts=more.experts,  # all of the text was its prompt
    )


def _spans(versions: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """(first token, version) without the spans that hold none of the `length` tokens, and those that go on with the same version."""
    out: list[tuple[int, int]] = []
    for start, version in versions:
        if out and out[-1][0] == start:
            out.pop()
        if (start < length or start == 0) and (not out or out[-1][1] != version):
            out.append((start, version))
    return out
