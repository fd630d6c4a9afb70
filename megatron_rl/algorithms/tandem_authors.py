"""Decides which of two models, senior or junior, generates the next token of a text (Tandem, arXiv 2606.28166), by five
strategies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron_rl.config.base import UNREADABLE, ConfigError, Share, refusing
from megatron_rl.config.schema import Strategy

# marks of a leading space in vocabulary strings: byte-level BPE, SentencePiece, plain text
WORD_MARKS = ("\u0120", "\u2581", " ")
SENTENCE_END = "\n\n"
LAST = 2**64 - 1  # largest unsigned 64-bit integer


@dataclass(frozen=True, slots=True, kw_only=True)  # pydantic's dataclass, which validates the fields
class Rule:
    """The rule by which the author (senior or junior model) changes. `p` is the probability that a random draw selects
    the senior.

    `strategy` is one of:
      "bernoulli": a random draw before every token.
      "alternating": senior and junior generate one token each in turn.
      "chunk": senior and junior generate `chunk_size` tokens each in turn.
      "sentence": the author changes after every blank line.
      "word": a random draw at the start, after every token that begins a word, and after `max_gap` tokens without such
          a token.
    In the strategies without draws, the senior begins.
    In the paper's code, the steps of alternating and chunk are counted over the whole engine, so a request may begin
    with either author; this class counts each request separately.
    """

    strategy: Strategy = "word"
    p: Share = 0.5
    max_gap: PositiveInt = 32
    chunk_size: PositiveInt = 16
    boundary_ids: str | None = None  # path of a JSON list of the boundary tokens' ids; None: search the vocabulary

    def senior_share(self, lengths: np.ndarray) -> tuple[float, float] | None:
        """Returns the expected share of tokens that the senior generates in S texts with the given `lengths`, and an
        upper bound of the standard deviation of the share (0 for strategies without draws). Returns None if the share
        depends on the content of the text, or if there are no tokens.
        """
        total = int(lengths.sum())
        if self.strategy == "sentence" or not total:
            return None
        if self.strategy in ("bernoulli", "word"):  # one draw decides on at most `most` tokens
            most = 1 if self.strategy == "bernoulli" else min(self.max_gap, int(lengths.max()))
            return self.p, math.sqrt(self.p * (1.0 - self.p) * most / total)
        size = 1 if self.strategy == "alternating" else self.chunk_size
        senior_tokens = lengths // (2 * size) * size + np.minimum(lengths % (2 * size), size)
        return float(senior_tokens.sum() / total), 0.0


class Pen:
    """The state that determines which model (senior or junior) generates the next token of one text. `senior` is True
    if the senior model generates the next token.

    The state depends only on (rule, boundaries, key, tokens so far). So every engine chooses the same authors, and a
    restarted request continues unchanged.
    """

    __slots__ = ("_boundaries", "_key", "_rule", "count", "draws", "senior", "written")

    def __init__(
        self, rule: Rule, boundaries: frozenset[int], key: int, written: Sequence[int] | np.ndarray = ()
    ) -> None:
        """Creates the state at the beginning of a text, or after the tokens that have already been generated.

        `written`: the ids of these tokens.
        `boundaries`: token ids after which the author may change, see the function `boundaries`.
        `key`: integer that determines the random draws, different for every text.
        """
        self._rule, self._boundaries, self._key = rule, boundaries, key
        self.written = 0  # number of tokens so far
        self.count = 0  # number of tokens since the last draw (used by the strategy word)
        self.draws = 0
        self.senior = self._draw() if rule.strategy in ("bernoulli", "word") else True
        if len(written):
            self._resume(np.asarray(written, np.int64))

    def write(self, token: int) -> bool:
        """Advances the state by one token, and returns whether the senior generated this token. A negative id is an
        engine's placeholder and does not change the state.
        """
        wrote = self.senior
        if token < 0:
            return wrote
        self.written += 1
        match self._rule.strategy:
            case "bernoulli":
                self.senior = self._draw()
            case "alternating":
                self.senior = not wrote
            case "chunk":
                self.senior = self.written // self._rule.chunk_size % 2 == 0
            case "sentence":
                self.senior = wrote != (token in self._boundaries)
            case "word":
                self.count += 1
                if token in self._boundaries or self.count >= self._rule.max_gap:
                    self.senior, self.count = self._draw(), 0
        return wrote

    def _resume(self, tokens: np.ndarray) -> None:
        """Advances a new Pen by all [T] tokens that have already been generated."""
        real_tokens = tokens[tokens >= 0]
        numbers = _draw_numbers(self._rule, self._boundaries, real_tokens)
        self.senior = bool(_authors(self._rule, self._boundaries, self._key, real_tokens)[-1])
        self.written = len(real_tokens)
        self.draws = 0 if numbers is None else int(numbers[-1]) + 1
        if self._rule.strategy == "word":
            assert numbers is not None
            self.count = len(real_tokens) - int(np.searchsorted(numbers, numbers[-1]))

    def _draw(self) -> bool:
        self.draws += 1
        return _drawn(self._key, self.draws - 1, self._rule.p)


def replay(rule: Rule, boundaries: frozenset[int], key: int, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns which of [T] tokens of a text the senior generated: [T] bool. The result is the same as that of a Pen to
    which the tokens are passed one by one. Each strategy has a second, vectorised definition for this purpose, because
    a Pen needs 100 times as long: 36 ms instead of 0.3 ms for 8,192 tokens, which a client would spend per response.
    """
    ids = np.asarray(tokens, np.int64)
    real = ids >= 0
    real_before = np.cumsum(real) - real  # a placeholder (negative id) has the author of the next real token
    return _authors(rule, boundaries, key, ids[real])[real_before]


def read_boundaries(path: str, vocab: int | None = None) -> frozenset[int]:
    """Reads a JSON file that contains one list of token ids, and returns the ids. Raises ConfigError for other
    contents, for an empty list, and for an id that is not below `vocab`, the size of the vocabulary (if given).
    """
    with refusing(lambda _: f"tandem.boundary_ids = {path} is no JSON list of token ids: give one", *UNREADABLE):
        ids = TypeAdapter(frozenset[NonNegativeInt]).validate_json(Path(path).read_bytes())
    if not ids or (vocab is not None and max(ids) >= vocab):
        problem = f"the model has {vocab} tokens, and the largest id is {max(ids)}" if ids else "the list is empty"
        raise ConfigError(f"tandem.boundary_ids = {path}: {problem}; give the ids of the model's own tokenizer")
    return ids


def boundaries(tokenizer: Any, rule: Rule) -> frozenset[int]:
    """Returns the token ids after which the author may change (strategy "word") or does change (strategy "sentence").
    Returns an empty set for other strategies. Takes seconds for a large vocabulary, so the caller should cache the
    result.

    The ids are those in the file `rule.boundary_ids`. Without a file they are found in the vocabulary.
    For "word", these are the tokens that begin a word: the vocabulary string begins with a space mark (53,021 ids of
    Qwen3), or, if no vocabulary string has such a mark, the tokenizer separates the token by a space when it decodes.
    For "sentence", these are the tokens whose text ends with an empty line.
    """
    if rule.boundary_ids is not None:
        return read_boundaries(rule.boundary_ids)
    special = set(tokenizer.all_special_ids)
    ids = sorted(set(range(len(tokenizer))) - special)
    if rule.strategy == "sentence":
        texts = tokenizer.batch_decode([[i] for i in ids])
        return frozenset(i for i, text in zip(ids, texts, strict=True) if text.endswith(SENTENCE_END))
    if rule.strategy != "word":
        return frozenset()
    strings = tokenizer.convert_ids_to_tokens(ids)
    marked = frozenset(
        i for i, string in zip(ids, strings, strict=True) if string is not None and string.startswith(WORD_MARKS)
    )
    if marked:
        return marked
    pairs = tokenizer.batch_decode([[i, i] for i in ids], clean_up_tokenization_spaces=False)
    return frozenset(i for i, string, pair in zip(ids, strings, pairs, strict=True) if pair == f"{string} {string}")


def fingerprint(ids: Iterable[int]) -> str:
    """Returns a short hash of a set of token ids. An engine's client and server compare their hashes to make sure that
    they use the same boundaries.
    """
    return hashlib.blake2b(",".join(map(str, sorted(ids))).encode(), digest_size=8).hexdigest()


def switches(senior: Sequence[bool] | np.ndarray) -> int:
    """Returns the number of changes between senior and junior in a text. `senior`: whether the senior generated each
    token.
    """
    return int(np.count_nonzero(np.diff(np.asarray(senior, np.int8))))


def _authors(rule: Rule, boundaries: frozenset[int], key: int, tokens: np.ndarray) -> np.ndarray:
    """Returns whether the senior generates each of [T] tokens and the token that follows them: [T + 1] bool."""
    places = np.arange(len(tokens) + 1)
    match rule.strategy:
        case "alternating":
            return places % 2 == 0
        case "chunk":
            return places // rule.chunk_size % 2 == 0
        case "sentence":
            return np.cumsum(np.append(False, _among(tokens, boundaries))) % 2 == 0
    numbers = _draw_numbers(rule, boundaries, tokens)
    assert numbers is not None
    return _drawn(key, np.arange(numbers[-1] + 1, dtype=np.uint64), rule.p)[numbers]


def _draw_numbers(rule: Rule, boundaries: frozenset[int], tokens: np.ndarray) -> np.ndarray | None:
    """Returns the index of the draw that decides on each of [T] tokens and on the token after them, [T + 1]; None for
    strategies without draws.
    """
    if rule.strategy == "bernoulli":
        return np.arange(len(tokens) + 1)
    if rule.strategy != "word":
        return None
    opens, places = _among(tokens, boundaries), np.arange(len(tokens))
    # position of the last boundary before each token
    last = np.maximum.accumulate(np.append(-1, np.where(opens, places, -1)))[:-1]
    redrawn = opens | ((places - last) % rule.max_gap == 0)
    return np.append(0, np.cumsum(redrawn))


def _among(tokens: np.ndarray, boundaries: frozenset[int]) -> np.ndarray:
    table = table_of(boundaries)
    return table[np.minimum(tokens, len(table) - 1)]


@lru_cache(maxsize=8)
def table_of(ids: frozenset[int]) -> np.ndarray:
    """Returns a table [largest id + 2] bool that is True at the given ids. The last entry, False, is used for all
    larger ids.
    """
    table = np.zeros(max(ids, default=-1) + 2, bool)
    table[np.fromiter(ids, np.int64, len(ids))] = True
    return table


Bits = TypeVar("Bits", int, np.ndarray)  # type of 64-bit values: an integer below 2^64, or an array [D] uint64


def _drawn(key: int, number: Bits, p: float) -> Any:
    """Draws True with probability p. The draw is a hash (splitmix64) of its index `number` and the text's key, so there
    is no generator state to save or restore. Returns a bool for one index, or [D] bool for [D] indices.
    """
    bits = _mixed((_mixed(key & LAST) + (number + 1) * 0x9E3779B97F4A7C15) & LAST)
    return (bits >> 11) * 2.0**-53 < p


def _mixed(bits: Bits) -> Bits:
    """Mixes 64 bits (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & LAST
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & LAST
    return bits ^ (bits >> 31)
