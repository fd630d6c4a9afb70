"""A session with a pool of servers. Requests may arrive at any time, each with separate sampling settings, and are
answered in the order in which they finish.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.pool.continuation import dated, joined, nothing_of, seed_after
from megatron_rl.engines.pool.dispatch import Dispatcher, Outstanding, Request
from megatron_rl.engines.pool.membership import Member, Waiting
from megatron_rl.engines.protocol import Completion, SampleLog, Sampling, Tokens
from megatron_rl.engines.session_base import Asked, SessionBase
from megatron_rl.types import Stop

Finished = tuple[int, dict[int, Completion]]  # key of a request, and its newly finished completions by sample index


@dataclass(eq=False)
class _Asked(Asked):
    """One request that has not been answered completely. `work` holds the tasks of all requests of the session."""

    work: Outstanding
    prefer: Member | None

    @property
    def seed(self) -> int:
        """Returns the seed of the first sample. Sample j has this seed plus j."""
        return sampling_seeds.request_seed(self.sampling.seed, self.key)


class PoolSession(SessionBase):
    """Implements engines.protocol.Session with a pool of servers. `dispatcher`: sends the requests to the servers.

    Samples are added to the log when a server has sent them, in the thread of the dispatcher: a finished sample does
    not have to wait until the caller reads `answers`.
    """

    def __init__(self, dispatcher: Dispatcher, priority: int = 0, log: SampleLog | None = None) -> None:
        super().__init__(log)
        self._dispatcher, self._priority = dispatcher, priority
        self._asked: dict[int, _Asked] = {}  # unanswered requests, by key
        # {key of an answered request: the server that answered it and has the request's prefix in its cache}
        self._homes: dict[int, Member] = {}
        self._work = Outstanding()

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Implements `engines.protocol.Session.ask`. Also raises ValueError for an invalid sampling setting, and
        EngineError after `close`.
        """
        sampling_seeds.check(sampling)
        prompt = np.array(tokens, np.int32)
        with self._change:
            self._use_key(key)
            prefer = None if after is None else self._homes.get(after)
            address, known = self._log.known(key, prompt, sampling)
            whole = not known and (not self._priority or sampling.greedy)
            asked = _Asked(key, prompt, sampling, address, known, self._work, prefer)
            self._asked[key] = asked
            missing = asked.missing
        # The n samples of a prompt are one request to a server, unless the log has some of the samples.
        # A request occupies a server's capacity for all its samples until its longest sample is complete.
        # Therefore each sample is a separate request if iterations are generated ahead of training. When a sample is
        # finished, its capacity can then be used by samples of other iterations.
        for samples in [range(sampling.n)] if whole else [range(j, j + 1) for j in missing]:
            self._dispatcher.submit(asked.work, self._write, asked, samples)
        if not missing:
            done: Future[Finished] = Future()
            done.set_result((key, {}))
            asked.work.add(done)

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """Implements `engines.protocol.Session.answers`.

        While no server has the current weights, waits and logs that the run waits. Raises EngineError if no server is
        available within `engine.wait_s`, or if live servers failed a request `engine.attempts` times; RequestRefused if
        a request is invalid for every server; ConfigError if servers belong to another run. An error cancels all
        requests.
        """
        waiting = Waiting(self._dispatcher.members)
        ended = False
        try:
            while True:
                with self._change:
                    work, pending = self._work, bool(self._asked)
                    if self._closed or (not pending and not self._askers):
                        ended = True
                        return
                finished = self._dispatcher.wait(work, waiting if pending else None)
                if finished is not None and (whole := self._take_in(*finished)) is not None:
                    yield finished[0], whole
        finally:
            if not ended:
                self._call_off()

    def close(self) -> None:
        """Cancels all requests."""
        self._closed = True
        self._call_off()

    def _wake(self) -> None:
        self._work.wake()

    def _take_in(self, key: int, completions: dict[int, Completion]) -> list[Completion] | None:
        """Stores finished completions of a request. Returns all n completions of the request if they are finished;
        otherwise returns None.
        """
        with self._change:
            asked = self._asked.get(key)
            if asked is None:  # the request was cancelled meanwhile
                return None
            asked.found |= completions
            if len(asked.found) < asked.sampling.n:
                return None
            del self._asked[key]
        self._dispatcher.full.look(len(asked.tokens), asked.completions)
        return asked.completions

    def _call_off(self) -> None:
        """Cancels all requests. Completions that still arrive are discarded."""
        with self._change:
            over, self._work = self._work, Outstanding()
            self._asked.clear()
        over.over = True
        self._dispatcher.look()

    async def _write(self, asked: _Asked, samples: range) -> Finished:
        """Sends one request for consecutive samples to a server and returns the finished completions. A completion that
        a weight sync (refit) interrupted is continued in a separate task.
        """
        finished = {}
        sampling = replace(asked.sampling, n=len(samples))
        answers = await self._send(asked, asked.tokens, sampling, asked.seed + samples.start)
        for j, completion in zip(samples, answers, strict=True):
            if completion.stop is Stop.ABORTED:
                self._dispatcher.submit(asked.work, self._complete, asked, j, completion)
            else:
                finished[j] = completion
        return self._logged(asked, finished)

    async def _complete(self, asked: _Asked, sample: int, begun: Completion) -> Finished:
        """Continues an interrupted completion until it ends, even if weight syncs (refits) interrupt it several
        times.
        """
        seed, restart = asked.seed + sample, self._dispatcher.members.limits.partial == "restart"
        while begun.stop is Stop.ABORTED:
            kept = nothing_of(begun) if restart else begun
            written = len(kept.tokens)
            if written >= asked.sampling.max_tokens:
                begun = replace(kept, stop=Stop.LENGTH)
                break
            tandem = asked.sampling.tandem and replace(asked.sampling.tandem, seed=seed, written=written)
            sampling = replace(asked.sampling, n=1, max_tokens=asked.sampling.max_tokens - written, tandem=tandem)
            prompt = np.concatenate([asked.tokens, kept.tokens])
            [more] = await self._send(asked, prompt, sampling, seed_after(seed, written))
            begun = joined(kept, more)
        return self._logged(asked, {sample: begun})

    def _logged(self, asked: _Asked, finished: dict[int, Completion]) -> Finished:
        self._log.add([(asked.address, j, completion) for j, completion in finished.items()])
        return asked.key, finished

    async def _send(self, asked: _Asked, prompt: np.ndarray, sampling: Sampling, seed: int) -> list[Completion]:
        members = self._dispatcher.members

        async def ask(member: Member, version: int) -> list[Completion]:
            timeout_s, sleep_count = members.limits.request_timeout_s, members.state.sleeps
            answers = await member.server.generate(
                prompt, sampling, seed=seed, timeout_s=timeout_s, priority=self._priority
            )
            return [self._checked(member, version, answer, sleep_count) for answer in answers]

        what = f"a prompt of {len(prompt)} tokens"
        request = Request(ask, what, sampling.n, asked.prefer, self._priority)
        answers, member = await self._dispatcher.send(asked.work, request)
        with self._change:
            self._homes[asked.key] = member
        return answers

    def _checked(self, member: Member, version: int, answer: Completion, sleep_count: int) -> Completion:
        """Returns a completion with its weight versions. Raises ServerLost if a weight version is older than the
        server's version when the request was sent, or newer than the pool's current version.

        `sleep_count`: how many times the servers had been put to sleep when the request was sent. Used to tell an
        aborted request from a lost server.
        """
        members = self._dispatcher.members
        if members.fixed:
            answer = replace(answer, versions=[(0, version)])
        told, problem = [v for _, v in answer.versions] or [version], None
        if min(told) < version:
            problem = f"answered with version {min(told)} of the weights, not {version}"
        elif max(told) > members.version:
            problem = f"answered with version {max(told)} of the weights, and the newest is {members.version}"
        elif answer.stop is Stop.ABORTED and members.serves(member, version) and members.state.sleeps == sleep_count:
            problem = "ended a request early, though no refit had begun"
        if problem is not None:
            raise ServerLost(f"{member.server.url} {problem}")
        return dated(answer, version)
