"""Who writes the next token when two models write one text (Tandem, arXiv 2606.28166): five strategies, and their replay from tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from megatron_rl.config.schema import Strategy

WORD_MARKS = (
    "\u0120",
    "\u2581",
    " ",
)  # what a vocabulary writes for a leading space: byte-level BPE, SentencePiece, plain text
SENTENCE_END = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When the author changes. `p` is the chance that a draw gives the pen to the senior.

    bernoulli: a draw for every token. alternating: senior, junior, senior, ... chunk: `chunk_size` tokens each, in turns. sentence:
    the other one after every blank line. word: a draw at first, after every token that opens a word, and after `max_gap` tokens without.
    The senior begins where nothing is drawn. (The paper's code counts the steps of alternating and chunk over the whole engine, so that
    a request begins at any phase; here every request counts for itself.)
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

    @property
    def senior_share(self) -> float | None:
        """Of the tokens, as expected; None where the text decides."""
        match self.strategy:
            case "bernoulli" | "word":
                return self.p
            case "alternating" | "chunk":
                return 0.5
            case "sentence":
                return None


class Pen:
    """The state of one text: `senior` says who writes its next token. A function of (rule, boundaries, key, tokens so far) alone, so that
    any engine gives the same authors, and a request that is begun again goes on as it was."""

    __slots__ = ("_boundaries", "_key", "_rule", "count", "draws", "senior", "written")

    def __init__(self, rule: Rule, boundaries: frozenset[int], key: int) -> None:
        """`boundaries`: see the function of that name. `key`: of the draws, another one for every text."""
        self._rule, self._boundaries, self._key = rule, boundaries, key
        self.written = 0  # tokens
        self.count = 0  # tokens since the last draw (word)
        self.draws = 0
        self.senior = self._draw() if rule.strategy in ("bernoulli", "word") else True

    def write(self, token: int) -> bool:
        """`token` is the one that was chosen -> whether the senior wrote it. Negative ids, an engine's placeholders, change nothing."""
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

    def _draw(self) -> bool:
        """The draw's number is hashed with the key: no generator's state to keep, or to lose with a request."""
        digest = hashlib.blake2b(f"{self._key}/{self.draws}".encode(), digest_size=8).digest()
        self.draws += 1
        return int.from_bytes(digest, "big") < self._rule.p * 2.0**64


def replay(rule: Rule, boundaries: frozenset[int], key: int, tokens: Iterable[int]) -> list[bool]:
    """[T] tokens of a text -> [T], True where the senior wrote it."""
    pen = Pen(rule, boundaries, key)
    return [pen.write(token) for token in tokens]


def resumed(rule: Rule, boundaries: frozenset[int], key: int, written: Iterable[int]) -> Pen:
    """The pen after the tokens that are written already."""
    pen = Pen(rule, boundaries, key)
    for token in written:
        pen.write(token)
    return pen


def boundaries(tokenizer: Any, strategy: Strategy) -> frozenset[int]:
    """Token ids after which the author may change (word), or does (sentence); none for the other strategies. Takes seconds for a large
    vocabulary: keep the answer.

    word: ids that open a word: their vocabulary string begins with a space's mark (53,021 of Qwen3's). Where no id has one, those that
    the tokenizer sets apart by a space. sentence: ids whose text ends with an empty line.
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
    """Of a set of token ids: two sides that replay the same texts compare it."""
    return hashlib.blake2b(",".join(map(str, sorted(ids))).encode(), digest_size=8).hexdigest()


def switches(senior: Sequence[bool]) -> int:
    """How often the author changes."""
    return sum(a != b for a, b in zip(senior, senior[1:], strict=False))
