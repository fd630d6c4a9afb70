"""The session of engines that answer many questions at a time: all that was asked so far makes a round."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, Tokens

SETTLE_S = 0.01  # without a new ask, after which a round begins although more may be asked


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One completion to draw. Its random stream is a function of (sampling.seed, key, sample) alone."""

    tokens: np.ndarray  # [T] int32, the prompt; the samples of one ask share the array
    key: int  # of the ask
    sample: int  # place among the samples of the ask
    sampling: Sampling


Run = Callable[[Sequence[Row]], list[Completion]]  # [R] rows -> [R] completions, in order
Check = Callable[[np.ndarray, Sampling, int], None]  # prompt, sampling and key of an ask


class BatchedSession:
    """Implements engines.protocol.Session over `run`, which draws all completions of a round in one call.

    Rounds run in the thread that reads the answers. `check` raises for an ask that the engine cannot answer. `full` is
    the engine's count of prompts that fill its context.
    """

    def __init__(self, run: Run, check: Check, full: FullPrompts) -> None:
        self._run, self._check, self._full = run, check, full
        self._change = threading.Condition()
        self._keys: set[int] = set()  # of all asks so far
        self._pending: list[tuple[int, np.ndarray, Sampling]] = []
        self._askers = 0  # blocks of `asking` that are open
        self._closed = False

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Adds to the next round. `after` changes nothing here.

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
        """Yields (key, its completions) round by round. What is asked while a round's answers are read is in the next
        one.

        Where the reader leaves early, or a round fails, all that was asked is called off.
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
        """Calls off what is not done; a round that runs is finished, and its answers are dropped."""
        with self._change:
            self._closed = True
        self._call_off()

    def _next_round(self) -> list[tuple[int, np.ndarray, Sampling]]:
        """Waits until something is asked, and takes all of it. Empty: nothing is, and nobody is in `asking`. While
        somebody is, it also waits until nothing more comes: a round of many costs little more than a round of one."""
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
