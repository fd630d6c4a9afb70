"""The protocol of rollout engines, the same for all: embedded, pools of servers, addresses of others, and those of
tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.types import Stop

Tokens = Sequence[int] | np.ndarray  # [T] token ids


class EngineError(RuntimeError):
    """Engines cannot go on; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemSampling:
    """The engine's junior writes along.

    A stream of random numbers of each row's own, a function of (seed, key, j), draws the authors.
    """

    rule: Rule
    seed: int | None = None  # of the authors of a text that is continued; None: the row's own
    written: int = 0  # number of tokens at the end of the prompt that the two models have written already


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The settings that completions are drawn by. `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` are off.

    Sample j of the ask with key `key` draws from its own random stream, a function of (seed, key, j) alone, so that a
    result does not depend on batching. `stop_tokens` and end-of-sequence tokens are kept as the last token of the
    completion; a completion that meets a stop string ends with the token that completed it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    seed: int = 0
    logprobs: bool = True  # False: nobody reads them; a server that spares itself the work leaves nan
    tandem: TandemSampling | None = None  # None: the model alone

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time. Its log-prob under that choice is 0."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return not self.greedy and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution at temperature 1."""
        return self.temperature == 1.0 and not self.truncated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampled answer. The constructor turns lists into arrays."""

    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, log p under the distribution sampled from (after temperature and truncation)
    stop: Stop
    model_logprobs: np.ndarray | None = None  # [T] float32, log p of the model at temperature 1, where the engine tells
    versions: Sequence[tuple[int, int]] = field(
        default_factory=list
    )  # (first token, weight version from there on); empty: the engine's
    experts: np.ndarray | None = None  # [prompt + T - 1, L, k] int16, where the engine tells
    authors: np.ndarray | None = (
        None  # [T] bool, of a tandem: True where the senior wrote; log-probs are those of the author
    )

    def __post_init__(self) -> None:
        for name, kind in (
            ("tokens", np.int32),
            ("logprobs", np.float32),
            ("model_logprobs", np.float32),
            ("authors", np.bool_),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, kind))


def empty(sampling: Sampling) -> Completion:
    """Returns the completion of a prompt that fills the model's context."""
    none = np.empty(0)
    return Completion(tokens=none, logprobs=none, stop=Stop.LENGTH, authors=None if sampling.tandem is None else none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopScores:
    """The scores of one text, with the likeliest tokens at every place under the same model."""

    logprobs: np.ndarray  # [T] float32, of the text's tokens, as `Engine.score` has them
    ids: np.ndarray  # [T, k] int32: the k likeliest tokens given those before, likeliest first; 0 at the first place
    top_logprobs: np.ndarray  # [T, k] float32, theirs


class Session(Protocol):
    """Questions to one engine and their answers. It lives on the driver, and one thread reads its answers.

    A completion's draw depends on (sampling.seed, key, sample) alone. Leaving `answers` early, or `close`, calls off
    what is not done.
    """

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        """Asks for `sampling.n` completions of `tokens`; may be called at any time, also while answers are read, from
        any thread.

        `key` is another one for every ask of the session. `after` is the key of an earlier turn of the same
        conversation: a pool prefers the server that holds its prefix. Raises ValueError for a key that was used.
        """
        ...

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """A block in which more may be asked: `answers` waits for it to end.

        A thread that asks while another one reads is in it.
        """
        ...

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        """Yields (key, its n completions), each when it is done, until nothing is outstanding and nobody is in
        `asking`. It may be called again after more was asked.
        """
        ...

    def close(self) -> None:
        """Calls off what is not done."""
        ...


class Engine(Protocol):
    """A model that generates and scores, used on the driver.

    `version` is that of the weights it holds, -1 before it has any.
    """

    @property
    def version(self) -> int: ...

    def session(self) -> Session: ...

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Returns log-probabilities of `[S][T]` tokens: [S] arrays [T] float32. Each is the token's, given those before
        it, at temperature 1; 0 for the first.
        """
        ...

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        """Returns for each of `[S][T]` sequences log-probabilities as `score` gives them, and the k likeliest tokens at
        every place.

        Raises EngineError where the engine does not tell them, or not as many.
        """
        ...

    def tend(self) -> None:
        """Looks after the engine's servers while the driver has nothing else to do; engines without servers do
        nothing.
        """
        ...


def complete(engine: Engine, prompts: Sequence[Tokens], sampling: Sampling) -> list[list[Completion]]:
    """Asks for completions of [P] prompts, with their places as keys, and waits for all. -> `[P][n]`, in order."""
    session = engine.session()
    for place, tokens in enumerate(prompts):
        session.ask(place, tokens, sampling)
    found = dict(session.answers())
    return [found[place] for place in range(len(prompts))]
