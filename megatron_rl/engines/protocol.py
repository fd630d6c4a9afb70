"""The interface of rollout engines. The embedded engine, server pools, remote endpoints and test doubles implement this
interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_rl.algorithms.sampling import Completion as Completion
from megatron_rl.algorithms.sampling import Sampling as Sampling
from megatron_rl.algorithms.sampling import TandemSampling as TandemSampling
from megatron_rl.algorithms.sampling import TopScores as TopScores
from megatron_rl.algorithms.sampling import empty as empty

Tokens = Sequence[int] | np.ndarray  # [T] token ids


class EngineError(RuntimeError):
    """Raised when an engine cannot continue. The message says which engine failed, why, and what to do."""


class SampleLog(Protocol):
    """A durable log of finished samples. For each request, a session takes the samples that are already in the log,
    asks the engine only for the missing samples, and adds every new sample to the log as soon as the sample is
    finished. Thread-safe.
    """

    def known(self, key: int, tokens: np.ndarray, sampling: Sampling) -> tuple[bytes, dict[int, Completion]]:
        """Returns the request's address, by which the log identifies the request, and the request's finished samples by
        sample index. Called once per request.
        """
        ...

    def add(self, samples: Sequence[tuple[bytes, int, Completion]]) -> None:
        """Adds finished samples atomically, each as (address of the request, sample index, completion). If the process
        is killed during the call, the log contains either all of the samples or none of them.
        """
        ...


class Session(Protocol):
    """A set of requests to one engine, and their completions. A session is used on the driver (rank 0). One thread
    iterates over `answers`; any thread may add requests.

    A completion depends only on (sampling.seed, key, sample index). Leaving `answers` early or calling `close` cancels
    the unfinished requests.
    """

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Requests `sampling.n` completions of the prompt `tokens`. Thread-safe; may be called while another thread
        iterates over `answers`.

        `key`: unique among the requests of the session.
        `after`: the key of an earlier turn of the same conversation. A pool prefers the server that has the
        conversation's prefix in its cache.

        Raises ValueError if the key was used before.
        """
        ...

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager for a thread that will send more requests. While the context is open, `answers`
        does not end.
        """
        ...

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """Yields (key, list of n completions) of each request when all its completions are done. Ends when no request
        is outstanding and no thread is inside the context manager `asking`. May be called again after further requests.
        """
        ...

    def close(self) -> None:
        """Cancels the requests that are not done."""
        ...


class Engine(Protocol):
    """A model that generates and scores token sequences. An engine is used on the driver (rank 0).

    `version`: the version of the engine's weights; -1 before the engine has received any weights.
    """

    @property
    def version(self) -> int: ...

    def session(self, priority: int = 0, log: SampleLog | None = None) -> Session:
        """Returns a new session. An engine with a queue serves requests of a session with a lower `priority` first.

        `log`: a log of finished samples, which the session reads and extends.
        """
        ...

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Returns the log-prob of every token given the tokens before it, at temperature 1: one float32 array [T] for
        each of the `[S][T]` sequences. The log-prob of the first token of a sequence is 0.
        """
        ...

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """Returns, for each of the `[S][T]` sequences, the log-probs that `score` returns, and the k most likely tokens
        at every position with their log-probs. Raises EngineError if the engine cannot return k most likely tokens.
        """
        ...

    def tend(self) -> None:
        """Updates the engine's servers. The driver (rank 0) calls this method while the driver has nothing else to do.
        A no-op for engines without servers.
        """
        ...


def complete(engine: Engine, prompts: Sequence[Tokens], sampling: Sampling) -> list[list[Completion]]:
    """Requests completions of [P] prompts and waits for all completions. The key of each request is the index of the
    prompt. Returns the completions `[P][n]` in the order of the prompts.
    """
    return [*draw(engine, {place: (tokens, sampling) for place, tokens in enumerate(prompts)}).values()]


def draw(engine: Engine, asks: Mapping[int, tuple[Tokens, Sampling]]) -> dict[int, list[Completion]]:
    """Samples completions from an engine and waits until all are done. `asks`: {key: (prompt, sampling parameters)}.
    Returns {key: the n completions of the prompt}, in the order of `asks`.

    The random numbers of a completion only depend on the seed, the key and the sample index.
    """
    session = engine.session()
    for key, (prompt, sampling) in asks.items():
        session.ask(key, prompt, sampling)
    found = dict(session.answers())
    return {key: found[key] for key in asks}
