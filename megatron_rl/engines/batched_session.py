"""The session of engines that answer requests in batches: all requests that have come make the next round."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, Tokens

SETTLE_S = 0.01  # seconds without a new request after which a round begins, although more requests may come


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One completion to sample. Its random stream is a function of (sampling.seed, key, sample) alone."""

    tokens: np.ndarray  # [T] int32, the prompt; the samples of one request share the array
    key: int  # of the request
    sample: int  # index among the samples of the request
    sampling: Sampling


Run = Callable[[Sequence[Row]], list[Completion]]  # [R] rows -> [R] completions, in order
Check = Callable[[np.ndarray, Sampling, int], None]  # prompt, sampling and key of a request


class BatchedSession:
    """Implements engines.protocol.Session over `run`, which samples all completions of a round in one call.

    Rounds run in the thread that reads the answers. `check` raises for a request that the engine cannot answer. `full`
    is the engine's count of prompts that fill its context.
    """

    def __init__(self, run: Run, check: Check, full: FullPrompts) -> None:
        self._run, self._check, self._full = run, check, full
        self._change = threading.Condition()
        self._keys: set[int] = set()  # of all requests so far
        self._pending: list[tuple[int, np.ndarray, Sampling]] = []
        self._askers = 0  # blocks of `asking` that are open
        self._closed = False

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Adds a request to the next round. `after` has no effect.

        Raises ValueError for a key that was used, EngineError when closed, and what the engine's check raises.
        """
        prompt = np.asarray(tokens, np.int32)
        self._check(prompt, sampling, key)
        with self._change:
            if self._closed:
                raise EngineError("the session was closed: ask in a new one")
            if key in self._keys:
                raise ValueError(f"key {key} was asked before in this session: give every ask a key of its own")
            self._keys.add(key)
            self._pending.append((key, prompt, sampling))
            self._change.notify_all()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Keeps `answers` from ending while the block is open."""
        with self._change:
            self._askers += 1
        try:
            yield
        finally:
            with self._change:
                self._askers -= 1
                self._change.notify_all()

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """Yields (key, completions) round by round. A request that comes while a round's answers are read is in the
        next round.

        When the reader leaves early, or a round fails, all requests are cancelled.
        """
        ended = False
        try:
            while asks := self._next_round():
                rows = [Row(tokens, key, j, sampling) for key, tokens, sampling in asks for j in range(sampling.n)]
                drawn = iter(self._run(rows))
                for key, prompt, sampling in asks:
                    completions = [next(drawn) for _ in range(sampling.n)]
                    self._full.look(len(prompt), completions)
                    if self._closed:
                        return
                    yield key, completions
            ended = True
        finally:
            if not ended:
                self._call_off()

    def close(self) -> None:
        """Cancels the requests that are not done. A round that runs is finished, and its answers are dropped."""
        with self._change:
            self._closed = True
        self._call_off()

    def _next_round(self) -> list[tuple[int, np.ndarray, Sampling]]:
        """Waits for requests and returns all of them; an empty list when there is no request and no thread is in
        `asking`. While a thread is, it waits until no more requests come: a round of many costs little more than a
        round of one."""
        with self._change:
            self._change.wait_for(lambda: self._pending or not self._askers or self._closed)
            known = 0
            while self._askers and known < len(self._pending) and not self._closed:
                known = len(self._pending)
                self._change.wait_for(lambda: self._closed, SETTLE_S)
            asks, self._pending = self._pending, []
            return asks

    def _call_off(self) -> None:
        with self._change:
            self._pending = []
            self._change.notify_all()
