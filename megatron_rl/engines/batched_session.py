"""A session for engines that sample requests in rounds. Each round is a batch of all pending requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, SampleLog, Sampling, Tokens
from megatron_rl.engines.session_base import Asked, SessionBase

# Seconds to wait for further requests. If no request arrives in this time, all pending requests are sampled.
SETTLE_S = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One completion to sample: a prompt, sampling settings and a sample index. The completion's random stream depends
    only on (sampling.seed, key, sample).
    """

    tokens: np.ndarray  # prompt, [T] int32; the samples of one request share this array
    key: int  # key of the request
    sample: int  # index among the samples of the request
    sampling: Sampling


Run = Callable[[Sequence[Row]], list[Completion]]  # [R] rows -> [R] completions, in order
# Raises an error if the engine cannot answer a request. Arguments: prompt, sampling settings and key of the request.
Check = Callable[[np.ndarray, Sampling, int], None]


class BatchedSession(SessionBase):
    """Implements engines.protocol.Session in rounds. Each round samples the completions of all pending requests in one
    call of `run`, and adds them to the log together: a log has all samples of a round or none of them. So a round that
    is repeated after the process was killed has the same rows as before. This keeps log-probs bit-identical, because
    their last bits can depend on the other rows of a batch.

    Rounds run in the thread that iterates over `answers`.
    `check`: raises an error if the engine cannot answer a request.
    `full`: counts the prompts that fill the engine's context.
    """

    def __init__(self, run: Run, check: Check, full: FullPrompts, log: SampleLog | None = None) -> None:
        super().__init__(log)
        self._run, self._check, self._full = run, check, full
        self._pending: list[Asked] = []

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Adds a request to the next round, which samples all pending requests together. The argument `after` has no
        effect.

        Raises ValueError if the key was used before, EngineError if the session is closed, and any error of the
        session's `check`.
        """
        prompt = np.asarray(tokens, np.int32)
        self._check(prompt, sampling, key)
        with self._change:
            self._use_key(key)
            self._pending.append(Asked(key, prompt, sampling, *self._log.known(key, prompt, sampling)))
            self._wake()

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """Yields (key, completions) of every request. Requests are sampled in rounds: a request that arrives while the
        completions of a round are yielded is sampled in the next round.

        If the caller stops iterating early or a round fails, all pending requests are cancelled.
        """
        ended = False
        try:
            while asks := self._next_round():
                wanted = [(asked, j) for asked in asks for j in asked.missing]
                rows = [Row(asked.tokens, asked.key, j, asked.sampling) for asked, j in wanted]
                drawn = self._run(rows) if rows else []
                self._log.add([(asked.address, j, one) for (asked, j), one in zip(wanted, drawn, strict=True)])
                for (asked, j), completion in zip(wanted, drawn, strict=True):
                    asked.found[j] = completion
                for asked in asks:
                    self._full.look(len(asked.tokens), asked.completions)
                    if self._closed:
                        return
                    yield asked.key, asked.completions
            ended = True
        finally:
            if not ended:
                self._call_off()

    def close(self) -> None:
        """Cancels the pending requests. A call of `run` in progress is finished, and its completions are discarded."""
        with self._change:
            self._closed = True
        self._call_off()

    def _next_round(self) -> list[Asked]:
        """Waits for requests and returns all pending requests, which are then sampled together. A thread that may send
        further requests is inside the context manager `asking`. While there is such a thread, waits until no more
        requests arrive, because sampling many requests together costs little more than sampling one request. Returns an
        empty list if there is no request and no thread is inside `asking`.
        """
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
            self._wake()
