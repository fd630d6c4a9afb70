"""Requests to engines and their results: sampling settings, completions and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.types import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemSampling:
    """Settings that let the engine's frozen junior model generate a part of the tokens.

    The author of each token is drawn from a random stream of the row, a function of (seed, key, j), where row j is
    sample j of the request with key `key`.
    """

    rule: Rule
    seed: int | None = None  # seed of the authors if a text is continued; None means the row's seed
    written: int = 0  # number of tokens at the end of the prompt that the two models have already generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of completions. `temperature=0` is greedy decoding. `top_k=0`, `top_p=1` and `min_p=0` are off.

    Sample j of the request with key `key` has a separate random stream, which depends only on (seed, key, j), so a
    completion does not depend on batching. A stop token or end-of-sequence token is kept as the last token of the
    completion. A completion with a stop string ends with the token that completes the string.
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
    logprobs: bool = True  # False if log-probs are not needed; a server may then return nan
    tandem: TandemSampling | None = None  # None means the model alone

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen at each position. Its log-prob under greedy decoding is 0."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return not self.greedy and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether tokens are sampled from the model's unmodified distribution at temperature 1."""
        return self.temperature == 1.0 and not self.truncated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampled answer. The constructor converts lists to arrays."""

    tokens: np.ndarray  # [T] int32, generated token ids
    logprobs: np.ndarray  # [T] float32, log p under the sampling distribution (after temperature and truncation)
    stop: Stop
    # [T] float32, log p of the model at temperature 1, if the engine returns it
    model_logprobs: np.ndarray | None = None
    versions: Sequence[tuple[int, int]] = field(
        default_factory=list
    )  # (index of the first token, weight version from this token on); empty means the engine's version
    experts: np.ndarray | None = None  # [prompt + T - 1, L, k] int16, expert ids, if the engine returns them
    authors: np.ndarray | None = (
        None  # tandem only: [T] bool, True for tokens of the senior; log-probs are those of each token's author
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
    """Returns the empty completion of a prompt that fills the model's context."""
    none = np.empty(0)
    return Completion(tokens=none, logprobs=none, stop=Stop.LENGTH, authors=None if sampling.tandem is None else none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopScores:
    """The log-probs of one text, and the k most likely tokens at every position under the same model."""

    logprobs: np.ndarray  # [T] float32, log-probs of the text's tokens, as returned by `Engine.score`
    # [T, k] int32, ids of the k most likely tokens at each position, most likely first; 0 at the first position
    ids: np.ndarray
    top_logprobs: np.ndarray  # [T, k] float32, log-probs of `ids`
