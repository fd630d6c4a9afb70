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

    A random stream chooses the model that generates each token (the token's author). Every sample of a request has a
    separate stream, which depends only on the request's seed, the request's key and the index j of the sample.
    """

    rule: Rule
    # Seed of the random stream, set only if the request continues a completion.
    # None: the seed is derived from the request's seed, the request's key and the index j of the sample.
    seed: int | None = None
    # The number of tokens at the end of the prompt that were generated earlier, if the request continues a completion.
    written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of completions. `temperature=0` is greedy decoding. `top_k=0`, `top_p=1` and `min_p=0` switch
    the respective truncation off.

    Every sample of a request has a separate random stream, which depends only on the request's seed, the request's key
    and the index j of the sample, so a completion does not depend on batching. A stop token or end-of-sequence token is
    kept as the last token of the completion. A completion with a stop string ends with the token that completes the
    string.
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
    top: int = 0  # number k of most likely tokens to return at each position, besides the sampled token (see num_top)
    tandem: TandemSampling | None = None  # None: one model generates all tokens

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen at each position (greedy decoding). The log-prob of each token under
        the sampling distribution is then 0.
        """
        return self.temperature == 0

    @property
    def num_top(self) -> int:
        """The number of most likely tokens that a completion has at each position: 0 without log-probs."""
        return self.top if self.logprobs else 0

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
    # Pairs (token index, version of the weights that generated the tokens from this index on). Empty if all tokens were
    # generated with the version that the engine serves.
    versions: Sequence[tuple[int, int]] = field(default_factory=list)
    # [prompt + T - 1, L, k] int16, ids of the k experts chosen per token and layer; None if not returned by the engine
    experts: np.ndarray | None = None
    # [T, k] int32 and float32: the k most likely tokens under the sampling distribution at each position, most likely
    # first, and their log-probs, -inf for tokens that top_k, top_p or min_p remove; None if Sampling.top is 0
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    # Tandem RL only: [T] bool, True if the senior model generated the token; `logprobs` come from each token's author
    authors: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("tokens", np.int32),
            ("logprobs", np.float32),
            ("model_logprobs", np.float32),
            ("top_ids", np.int32),
            ("top_logprobs", np.float32),
            ("authors", np.bool_),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, kind))


def empty(sampling: Sampling) -> Completion:
    """Returns a completion without tokens, for a prompt that fills the model's context."""
    none = np.empty(0)
    top = np.empty((0, sampling.num_top)) if sampling.num_top else None
    return Completion(
        tokens=none, logprobs=none, stop=Stop.LENGTH, top_ids=top, top_logprobs=top,
        authors=None if sampling.tandem is None else none,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopScores:
    """The log-probs of one token sequence, and the k most likely tokens at every position under the same model."""

    logprobs: np.ndarray  # [T] float32, log-probs of the text's tokens, as returned by `Engine.score`
    # [T, k] int32, ids of the k most likely tokens at each position, most likely first; 0 at the first position
    ids: np.ndarray
    top_logprobs: np.ndarray  # [T, k] float32, log-probs of `ids`
