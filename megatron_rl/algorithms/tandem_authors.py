"""Says which of two models writes the next token of one text (Tandem, arXiv 2606.28166), by five strategies."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args

import numpy as np

from megatron_rl.config.schema import Strategy

WORD_MARKS = (
    "\u0120",
    "\u2581",
    " ",
)  # what a vocabulary writes for a leading space: byte-level BPE, SentencePiece, plain text
SENTENCE_END = "\n\n"
LAST = 2**64 - 1  # the greatest number of 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule by which the author changes. `p` is the chance that a draw gives the pen to the senior.

    bernoulli: a draw for every token. alternating: senior, junior, senior, ... chunk: `chunk_size` tokens each, in
    turns. sentence: the other one after every blank line. word: a draw at first, after every token that opens a word,
    and after `max_gap` tokens without. The senior begins where nothing is drawn. (The paper's code counts the steps of
    alternating and chunk over the whole engine, so that a request begins at any phase; here every request counts for
    itself.)
    """

    strategy: Strategy = "word"
    p: float = 0.5
    max_gap: int = 32
    chunk_size: int = 16

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy {self.strategy!r}: it is one of {', '.join(get_args(Strategy))}")
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"p = {self.p}: it is a share, between 0 and 1")
        if self.max_gap < 1 or self.chunk_size < 1:
            raise ValueError(f"max_gap = {self.max_gap}, chunk_size = {self.chunk_size}: give at least 1 token")

    def senior_share(self, lengths: np.ndarray) -> tuple[float, float] | None:
        """Returns the share of the tokens that the senior is expected to write of texts with [S] lengths, and an upper
        bound of that share's standard deviation, 0 where nothing is drawn. None where the text decides, and for no
        tokens."""
        total = int(lengths.sum())
        if self.strategy == "sentence" or not total:
            return None
        if self.strategy in ("bernoulli", "word"):  # a draw holds for at most so many tokens
            most = 1 if self.strategy == "bernoulli" else min(self.max_gap, int(lengths.max()))
            return self.p, math.sqrt(self.p * (1.0 - self.p) * most / total)
        size = 1 if self.strategy == "alternating" else self.chunk_size
        own = lengths // (2 * size) * size + np.minimum(lengths % (2 * size), size)
        return float(own.sum() / total), 0.0


class Pen:
    """The author of one text: `senior` says who writes its next token. It is a function of (rule, boundaries, key,
    tokens so far) alone, so that any engine gives the same authors, and a request that is begun again goes on as it
    was."""

    __slots__ = ("_boundaries", "_key", "_rule", "count", "draws", "senior", "written")

    def __init__(self, rule: Rule, boundaries: frozenset[int], key: int) -> None:
        """`boundaries`: see the function of that name. `key`: of the draws, another one for every text."""
        self._rule, self._boundaries, self._key = rule, boundaries, key
        self.written = 0  # tokens
        self.count = 0  # tokens since the last draw (word)
        self.draws = 0
        self.senior = self._draw() if rule.strategy in ("bernoulli", "word") else True

    def write(self, token: int) -> bool:
        """Takes the token that was chosen -> whether the senior wrote it. Negative ids, an engine's placeholders,
        change nothing."""
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

    def resume(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Moves a new pen behind tokens that are written already."""
        own = np.asarray(tokens, np.int64)
        own = own[own >= 0]
        numbers = _draw_numbers(self._rule, self._boundaries, own)
        self.senior = bool(_authors(self._rule, self._boundaries, self._key, own)[-1])
        self.written = len(own)
        self.draws = 0 if numbers is None else int(numbers[-1]) + 1
        if self._rule.strategy == "word":
            assert numbers is not None
            self.count = len(own) - int(np.searchsorted(numbers, numbers[-1]))

    def _draw(self) -> bool:
        self.draws += 1
        return _drawn(self._key, self.draws - 1, self._rule.p)


def replay(rule: Rule, boundaries: frozenset[int], key: int, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns who wrote the [T] tokens of a text: [T] bool, True where the senior did. The same as a Pen that writes
    them one by one."""
    own = np.asarray(tokens, np.int64)
    real = own >= 0
    before = np.cumsum(real) - real  # a placeholder has the author of the token after it
    return _authors(rule, boundaries, key, own[real])[before]


def resumed(rule: Rule, boundaries: frozenset[int], key: int, written: Sequence[int] | np.ndarray) -> Pen:
    """Returns the pen after the tokens that are written already."""
    pen = Pen(rule, boundaries, key)
    pen.resume(written)
    return pen


def boundaries(tokenizer: Any, strategy: Strategy) -> frozenset[int]:
    """Finds the token ids after which the author may change (word), or does (sentence); none for the other strategies.
    It takes seconds for a large vocabulary: keep the answer.

    word: ids that open a word: their vocabulary string begins with a space's mark (53,021 of Qwen3's). Where no id has
    one, those that the tokenizer sets apart by a space. sentence: ids whose text ends with an empty line.
    """
    special = set(tokenizer.all_special_ids)
    ids = sorted(set(range(len(tokenizer))) - special)
    if strategy == "sentence":
        texts = tokenizer.batch_decode([[i] for i in ids])
        return frozenset(i for i, text in zip(ids, texts, strict=True) if text.endswith(SENTENCE_END))
    if strategy != "word":
        return frozenset()
    strings = tokenizer.convert_ids_to_tokens(ids)
    found = frozenset(
        i for i, string in zip(ids, strings, strict=True) if string is not None and string.startswith(WORD_MARKS)
    )
    if found:
        return found
    pairs = tokenizer.batch_decode([[i, i] for i in ids], clean_up_tokenization_spaces=False)
    return frozenset(i for i, string, pair in zip(ids, strings, pairs, strict=True) if pair == f"{string} {string}")


def fingerprint(ids: Iterable[int]) -> str:
    """Returns a short text that stands for a set of token ids: two sides that replay the same texts compare it."""
    return hashlib.blake2b(",".join(map(str, sorted(ids))).encode(), digest_size=8).hexdigest()


def switches(senior: Sequence[bool] | np.ndarray) -> int:
    """Returns how often the author changes."""
    return int(np.count_nonzero(np.diff(np.asarray(senior, np.int8))))


def _authors(rule: Rule, boundaries: frozenset[int], key: int, tokens: np.ndarray) -> np.ndarray:
    """Returns who writes each of [T] tokens and the one after them: [T + 1] bool, True for the senior."""
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
    """Returns the number of the draw that decides on each of [T] tokens and the one after them, [T + 1]; None where
    nothing is drawn."""
    if rule.strategy == "bernoulli":
        return np.arange(len(tokens) + 1)
    if rule.strategy != "word":
        return None
    opens, places = _among(tokens, boundaries), np.arange(len(tokens))
    last = np.maximum.accumulate(np.append(-1, np.where(opens, places, -1)))[:-1]  # boundary before each token
    redrawn = opens | ((places - last) % rule.max_gap == 0)
    return np.append(0, np.cumsum(redrawn))


def _among(tokens: np.ndarray, boundaries: frozenset[int]) -> np.ndarray:
    table = _membership(boundaries)
    return table[np.minimum(tokens, len(table) - 1)]


@lru_cache(maxsize=8)
def _membership(ids: frozenset[int]) -> np.ndarray:
    """Returns a table [largest id + 2] bool; its last entry stands for all greater ids."""
    table = np.zeros(max(ids, default=-1) + 2, bool)
    table[np.fromiter(ids, np.int64, len(ids))] = True
    return table


Bits = TypeVar("Bits", int, np.ndarray)  # below 2^64, or an array [D] uint64


def _drawn(key: int, number: Bits, p: float) -> Any:
    """Draws True with chance p. A draw is its number mixed with the text's key (splitmix64): there is no generator's
    state to keep, or to lose with a request. One number -> bool, [D] numbers -> [D] bool."""
    bits = _mixed((_mixed(key & LAST) + (number + 1) * 0x9E3779B97F4A7C15) & LAST)
    return (bits >> 11) * 2.0**-53 < p


def _mixed(bits: Bits) -> Bits:
    """Scrambles 64 bits (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & LAST
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & LAST
    return bits ^ (bits >> 31)
