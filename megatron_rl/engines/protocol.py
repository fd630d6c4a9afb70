"""The interface of rollout engines: of the embedded engine, pools of servers, endpoints, and the fakes of tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron_rl.sampling import Completion, Sampling, TandemSampling, TopScores, empty

__all__ = [
    "Completion",
    "Engine",
    "EngineError",
    "Sampling",
    "Session",
    "TandemSampling",
    "TopScores",
    "complete",
    "empty",
]

Tokens = Sequence[int] | np.ndarray  # [T] token ids


class EngineError(RuntimeError):
    """Engines cannot go on; the message says which, why, and what to do."""


class Session(Protocol):
    """A set of requests to one engine, and their completions. It lives on the driver, and one thread reads `answers`.

    A completion depends on (sampling.seed, key, sample) alone. Leaving `answers` early, or `close`, cancels the
    requests that are not done.
    """

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Requests `sampling.n` completions of `tokens`. Any thread may call it at any time, also while answers are
        read.

        `key` is unique among the requests of the session. `after` is the key of an earlier turn of the same
        conversation: a pool prefers the server that has its prefix in the cache. Raises ValueError for a key that was
        used.
        """
        ...

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a thread may send more requests. `answers` does not end before the context."""
        ...

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """Yields (key, n completions) of each request when it is done, until no request is outstanding and no thread is
        in `asking`. It may be called again after further requests.
        """
        ...

    def close(self) -> None:
        """Cancels the requests that are not done."""
        ...


class Engine(Protocol):
    """A model that generates and scores, used on the driver.

    `version` is the version of its weights, -1 before it has any.
    """

    @property
    def version(self) -> int: ...

    def session(self) -> Session: ...

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Returns the log-prob of every token of `[S][T]` given the tokens before it, at temperature 1: [S] arrays [T]
        float32. The first token of a sequence has 0.
        """
        ...

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """Returns for each of `[S][T]` sequences the log-probs as `score` returns them, and the k likeliest tokens at
        every position. Raises EngineError when the engine does not return them, or fewer than k.
        """
        ...

    def tend(self) -> None:
        """Updates the engine's servers while the driver has nothing else to do; a no-op for engines without servers."""
        ...


def complete(engine: Engine, prompts: Sequence[Tokens], sampling: Sampling) -> list[list[Completion]]:
    """Requests completions of [P] prompts, with their indices as keys, and waits for all. -> `[P][n]`, in order."""
    session = engine.session()
    for place, tokens in enumerate(prompts):
        session.ask(place, tokens, sampling)
    found = dict(session.answers())
    return [found[place] for place in range(len(prompts))]
