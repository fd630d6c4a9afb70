"""Requests to engines and their results: sampling settings, completions and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.types import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemSampling:
    """Tandem RL settings of a request: the engine's frozen junior model generates a part of the tokens, the senior
    model the rest.

    The model that generates a token (its author) is chosen with a random stream of the row, a function of (seed, key,
    j), where the row is sample j of the request with key `key`.
    """

    rule: Rule
    # seed of the choice of authors if the prompt ends with a part of the completion; None: the row's seed
    seed: int | None = None
    written: int = 0  # number of tokens at the end of the prompt that are a part of the completion, generated earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of completions. `temperature=0` is greedy decoding. `top_k=0`, `top_p=1` and `min_p=0` switch
    the respective truncation off.

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
    logprobs: bool = True  # False if the caller does not need log-probs; a server may then return nan
    tandem: TandemSampling | None = None  # None means the model alone

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen at each position. Its log-prob under greedy decoding is 0."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether top_k, top_p or min_p excludes a part of the vocabulary from sampling."""
        return not self.greedy and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether tokens are sampled from the model's distribution at temperature 1, without truncation."""
        return self.temperature == 1.0 and not self.truncated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One generated completion of a prompt. The constructor converts lists to arrays."""

    tokens: np.ndarray  # [T] int32, generated token ids
    # [T] float32, log-probs of the tokens under the sampling distribution (after temperature and truncation)
    logprobs: np.ndarray
    stop: Stop
    # [T] float32, log-probs of the tokens under the model at temperature 1; None if the engine does not return them
    model_logprobs: np.ndarray | None = None
    # pairs (index of the first token, weight version from this token on); empty means the engine's version
    versions: Sequence[tuple[int, int]] = field(default_factory=list)
    # [prompt + T - 1, L, k] int16, ids of the chosen experts; None if the engine does not return them
    experts: np.ndarray | None = None
    # for Tandem RL: [T] bool, True for tokens of the senior; the log-prob of a token is that of its author
    authors: np.ndarray | None = None

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
    """Returns a completion without tokens, for a prompt that fills the model's context."""
    none = np.empty(0)
    return Completion(tokens=none, logprobs=none, stop=Stop.LENGTH, authors=None if sampling.tandem is None else none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopScores:
    """The log-probs of one token sequence, and the k most likely tokens at every position under the same model."""

    logprobs: np.ndarray  # [T] float32, log-probs of the text's tokens, as returned by `Engine.score`
    # [T, k] int32, ids of the k most likely tokens at each position, most likely first; 0 at the first position
    ids: np.ndarray
    top_logprobs: np.ndarray  # [T, k] float32, log-probs of `ids`
