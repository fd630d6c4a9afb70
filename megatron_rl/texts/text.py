"""Decodes tokens together with the position of each token in the text, so that a part of the text can be mapped back to
the model's tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config.base import ConfigError, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS = Path(__file__).parents[1] / "recipes" / "prompts"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZERS = 16  # maximum number of tokenizers whose piece tables are cached
TEMPLATES = 64  # maximum number of cached template texts
WIDTH = 16  # number of bytes of a row in the piece table; longer pieces are rare and are stored separately
FILLING = b"\xff"  # padding byte, which does not occur in UTF-8
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # vocabulary string that represents a single byte (byte fallback)


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model directory or hub name. Raises ConfigError if the tokenizer's files are damaged.

    A tokenizer.json is used unchanged. AutoTokenizer of transformers 5 would instead build a new tokenizer of the class
    for the model type (a word-level tokenizer with a Qwen2 config would become byte-level BPE), with other token ids.
    """
    # These imports take seconds, and reading a template does not need them.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from megatron_rl.weights.hf_model import local_directory

    local = local_directory(directory)
    kind = PreTrainedTokenizerFast if (local / "tokenizer.json").is_file() else AutoTokenizer
    for file in (path for name in TOKENIZER_FILES if (path := local / name).is_file()):
        read_object(file)
    try:
        tokenizer = kind.from_pretrained(local)
        tokenizer("a")  # a test call, which detects errors in the files that loading does not detect
    except Exception as error:  # the library `tokenizers` raises plain Exceptions
        raise ConfigError(f"the tokenizer in {local} cannot be read ({error}): fetch it again") from error
    return tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """The text of a token sequence, and the position of every token in the text."""

    text: str  # equal to `tokenizer.decode(tokens, skip_special_tokens=True)` without clean-up of spaces
    # The UTF-8 bytes of the text. With a byte-level vocabulary, the bytes of the tokens, which may be invalid UTF-8:
    # `text` has U+FFFD in place of invalid bytes.
    raw: bytes
    # [T] int64: number of bytes of `raw` up to and including token i; never decreases, and ends at len(raw)
    ends: np.ndarray

    def text_of(self, first: int, end: int) -> str:
        """Returns the text of tokens [first, end). Invalid UTF-8 bytes are replaced by U+FFFD."""
        start = int(self.ends[first - 1]) if first else 0
        return self.raw[start : int(self.ends[end - 1]) if end else 0].decode("utf-8", "replace")

    def tokens_of(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Converts byte ranges [start, end) of `raw` to the index ranges [first, last + 1) of the tokens that overlap
        them. [K, 2] -> [K, 2] int32
        """
        ranges = np.asarray(spans, np.int64).reshape(-1, 2)
        first = np.searchsorted(self.ends, ranges[:, 0], side="right")
        last = np.searchsorted(self.ends, ranges[:, 1], side="left")
        return np.minimum(np.stack([first, last + 1], axis=1), [len(self.ends) - 1, len(self.ends)]).astype(np.int32)


def decode(tokenizer: Any, tokens: Sequence[int] | np.ndarray) -> Decoded:
    """Decodes [T] tokens. Special tokens and ids outside the vocabulary add no text. The positions come from the given
    tokens: the text is never tokenized again.
    """
    backend = tokenizer.backend_tokenizer
    pieces = _pieces(backend, backend.get_vocab_size())
    if pieces is not None:
        raw, ends = pieces.join(np.asarray(tokens, np.int64))
        if pieces.lossy:
            return Decoded(raw.decode("utf-8", "replace"), raw, ends)
        try:
            return Decoded(raw.decode("utf-8"), raw, ends)
        except UnicodeDecodeError:  # the decoder may replace invalid bytes in another way than Python
            pass
    return _windowed(backend, [int(token) for token in tokens])


def decode_all(tokenizer: Any, sequences: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
    """Decodes several sequences. Returns the text of each sequence, as `decode` does."""
    return [decode(tokenizer, tokens).text for tokens in sequences]


def read_template(name: str) -> str:
    """Reads a prompt text: a packaged name (`tango_generator`) or the path of a text file. Each file is read once per
    process. Raises FileNotFoundError, with the packaged names, if there is no such template.
    """
    packaged = PROMPTS / f"{name}.txt"
    path = packaged if packaged.exists() else Path(name)
    if not path.is_file():
        packaged_names = ", ".join(sorted(p.stem for p in PROMPTS.glob("*.txt")))
        raise FileNotFoundError(f"no prompt template {name!r}: give a text file, or one of {packaged_names}")
    return _read_file(path.absolute(), encoding="utf-8").removesuffix("\n")


_read_file = lru_cache(maxsize=TEMPLATES)(Path.read_text)


def fill(template: str, **values: str) -> str:
    """Replaces `{name}` in a template by each value. Other braces (LaTeX) are kept. Values are not searched
    for names.
    """
    names = "|".join(map(re.escape, values))
    return re.sub(f"{{({names})}}", lambda match: values[match[1]], template) if names else template


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """A table of the bytes (the piece) that each token id adds to a text. Rows have a fixed width and are padded, so
    that the text of many tokens is computed by one gather, followed by removing the padding.
    """

    rows: np.ndarray  # [V + 1, WIDTH] uint8; the last row is used for every id outside the vocabulary
    lengths: np.ndarray  # [V + 1] int32, number of bytes of the piece of each id
    long: np.ndarray  # [V + 1] bool: True if the piece does not fit into a row, or contains the padding byte
    complete: list[bytes]  # [V + 1], each complete piece
    strip: bool  # whether one space at the beginning of the decoded text is removed
    lossy: bool  # whether the decoder replaces invalid UTF-8 by U+FFFD like Python's errors="replace"

    def join(self, ids: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Concatenates the pieces of [T] ids. Returns (bytes, [T] number of bytes after each id)."""
        rows = np.minimum(ids, len(self.lengths) - 1)
        ends = np.cumsum(self.lengths[rows], dtype=np.int64)
        padded = self.rows.take(rows, axis=0).tobytes()
        parts, done = [], 0
        for t in np.flatnonzero(self.long[rows]).tolist():  # few long pieces, inserted in between
            parts += [padded[done * WIDTH : t * WIDTH].translate(None, FILLING), self.complete[rows[t]]]
            done = t + 1
        raw = b"".join([*parts, padded[done * WIDTH :].translate(None, FILLING)])
        if self.strip and raw.startswith(b" "):
            return raw[1:], np.maximum(ends - 1, 0)
        return raw, ends


@lru_cache(maxsize=TOKENIZERS)
def _pieces(backend: Any, size: int) -> _Pieces | None:
    """Returns the table of a tokenizer's pieces. Returns None if the text of a token depends on its neighbours, apart
    from a space at the beginning of the text.

    `size`: size of the tokenizer's vocabulary. It is a part of the cache key, so that a token added later leads to a
    new table.
    """
    kind = _kind(backend)
    if kind is None:
        return None
    spell, strip, lossy = kind
    added = backend.get_added_tokens_decoder()
    strings = {i: string for string, i in backend.get_vocab(with_added_tokens=True).items()}
    strings |= {i: token.content for i, token in added.items()}
    pieces = [b""] * (max(strings, default=-1) + 2)
    for i, string in strings.items():
        if i not in added or not added[i].special:
            pieces[i] = spell(string)
    lengths = np.array(list(map(len, pieces)), np.int32)
    long = (lengths > WIDTH) | np.array([FILLING in piece for piece in pieces])
    rows = b"".join(b"" if far else piece.ljust(WIDTH, FILLING) for piece, far in zip(pieces, long, strict=True))
    table = np.zeros((len(pieces), WIDTH), np.uint8)
    table[~long] = np.frombuffer(rows, np.uint8).reshape(-1, WIDTH)
    table[long] = FILLING[0]
    return _Pieces(table, lengths, long, pieces, strip, lossy)


def _kind(backend: Any) -> tuple[Callable[[str], bytes], bool, bool] | None:
    """Determines from a tokenizer's decoder how a vocabulary string is converted to bytes. Returns (function from
    vocabulary string to bytes, value of `_Pieces.strip`, value of `_Pieces.lossy`). Returns None if the decoder is
    not supported.
    """
    from tokenizers import decoders

    if backend.decoder is None:  # tokens are separated by spaces
        return lambda token: f" {token}".encode(), True, False
    if isinstance(backend.decoder, decoders.ByteLevel):
        return _byte_level_spelling(), False, True
    settings = json.loads(backend.decoder.__getstate__())
    parts = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    strip = parts[-1] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if strip:
        parts = parts[:-1]
    names = [part["type"] for part in parts]
    replaced = [part for part in parts if part["type"] == "Replace"]
    readable = names[-1:] == ["Fuse"] and names.count("Fuse") == 1 and set(names) <= {"Replace", "ByteFallback", "Fuse"}
    if not readable or any("String" not in part["pattern"] for part in replaced):
        return None
    swaps = [(part["pattern"]["String"], part["content"]) for part in replaced]
    falls_back = "ByteFallback" in names

    def spell(token: str) -> bytes:
        for old, new in swaps:
            token = token.replace(old, new)
        return bytes([int(token[3:5], 16)]) if falls_back and _BYTE.fullmatch(token) else token.encode()

    return spell, strip, False


def _byte_level_spelling() -> Callable[[str], bytes]:
    """Returns the function from vocabulary string to bytes for a byte-level vocabulary (GPT-2's table).

    Printable bytes are represented by themselves, other bytes by the characters with code points from 256 on. A token
    with any other character is an added token, and is encoded as UTF-8.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), ord("\u00ff") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    # 0xFFFF is not a byte, so that encoding a string with an unknown character fails
    alphabet = {256 + i: byte for i, byte in enumerate(others)} | dict.fromkeys(others, 0xFFFF)

    def spell(token: str) -> bytes:
        try:
            return token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return spell


def _windowed(backend: Any, ids: Sequence[int]) -> Decoded:
    """Decodes a sequence with any decoder. The text of a token is the difference between decoding a short window of
    tokens with and without the token, as far as this difference agrees with the text of the whole sequence.
    """
    text = backend.decode(ids, skip_special_tokens=True)
    ends: list[int] = []
    # text[:length] is the final text of ids[:read]; ids[start:read] are the context of the window
    length = start = read = 0
    context = ""
    for i in range(len(ids)):
        window = backend.decode(ids[start : i + 1], skip_special_tokens=True)
        piece = window[len(context) :]
        # number of leading characters of `piece` that match text[length:]
        shown = next((k for k, char in enumerate(piece) if text[length + k : length + k + 1] != char), len(piece))
        ends.append(max(length + shown, ends[-1] if ends else 0))
        if piece and shown == len(piece) and not piece.endswith("\ufffd"):
            length, start, read = length + shown, read, i + 1
            context = backend.decode(ids[start:read], skip_special_tokens=True)
    if ends:
        ends[-1] = len(text)
    size = np.array([0, *itertools.accumulate(len(character.encode()) for character in text)], np.int64)
    return Decoded(text, text.encode(), size[np.array(ends, np.int64)])
