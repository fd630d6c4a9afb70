"""Decodes tokens together with the position of each token in the text, so that a part of the text leads back to the
model's own tokens."""

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

PROMPTS = Path(__file__).parent / "recipes" / "prompts"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZERS = 16  # whose tables of pieces are kept
TEMPLATES = 64  # whose texts are kept
WIDTH = 16  # bytes; longer pieces of a vocabulary are rare
FILLING = b"\xff"  # a byte that no UTF-8 text has
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how a vocabulary with byte fallback writes a single byte


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model directory or hub name. A tokenizer.json is taken as it is: transformers 5 rebuilds
    a model type's own kind of tokenizer instead (a word-level one beside a Qwen2 config becomes byte-level BPE), and
    ids would change. Raises ConfigError for files that are damaged."""
    # imported here: reading a template needs neither of the two, and they take seconds
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from megatron_rl.weights.hf_model import local_directory

    local = local_directory(directory)
    kind = PreTrainedTokenizerFast if (local / "tokenizer.json").is_file() else AutoTokenizer
    for file in (path for name in TOKENIZER_FILES if (path := local / name).is_file()):
        read_object(file)
    try:
        tokenizer = kind.from_pretrained(local)
        tokenizer("a")  # some wrong values are noticed only here
    except Exception as error:  # a border: the library `tokenizers` raises plain Exceptions
        raise ConfigError(f"the tokenizer in {local} cannot be read ({error}): fetch it again") from error
    return tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """The text of a token sequence, and the position of every token in the text."""

    text: str  # as `tokenizer.decode(tokens, skip_special_tokens=True)` gives it without clean-up
    raw: bytes  # the text in UTF-8; of a byte-level vocabulary the tokens' own bytes, also where the text has U+FFFD
    ends: np.ndarray  # [T] int64: bytes of `raw` that are there once token i is; it never falls, and ends at len(raw)

    def text_of(self, first: int, end: int) -> str:
        """The text that tokens [first, end) add; bytes that spell no character are U+FFFD."""
        start = int(self.ends[first - 1]) if first else 0
        return self.raw[start : int(self.ends[end - 1]) if end else 0].decode("utf-8", "replace")

    def tokens_of(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Turns spans [start, end) of `raw` into ranges of the tokens that hold them. [K, 2] -> [K, 2] int32, [first,
        last + 1)."""
        wanted = np.asarray(spans, np.int64).reshape(-1, 2)
        first = np.searchsorted(self.ends, wanted[:, 0], side="right")
        last = np.searchsorted(self.ends, wanted[:, 1], side="left")
        return np.minimum(np.stack([first, last + 1], axis=1), [len(self.ends) - 1, len(self.ends)]).astype(np.int32)


def decode(tokenizer: Any, tokens: Sequence[int] | np.ndarray) -> Decoded:
    """Decodes [T] tokens. Special tokens and ids beyond the vocabulary add no text. It never tokenises text again."""
    backend = tokenizer.backend_tokenizer
    pieces = _pieces(backend, backend.get_vocab_size())
    if pieces is not None:
        raw, ends = pieces.join(np.asarray(tokens, np.int64))
        if pieces.lossy:
            return Decoded(raw.decode("utf-8", "replace"), raw, ends)
        try:
            return Decoded(raw.decode("utf-8"), raw, ends)
        except UnicodeDecodeError:  # such a decoder shows broken bytes in its own way
            pass
    return _windowed(backend, [int(token) for token in tokens])


def decode_all(tokenizer: Any, sequences: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
    """Returns the text of each sequence, as `decode` gives it."""
    return [decode(tokenizer, tokens).text for tokens in sequences]


def read_template(name: str) -> str:
    """Reads a prompt text: a packaged name (`tango_generator`) or a path to a text file, which is read once in a run.
    Raises FileNotFoundError with both places."""
    packaged = PROMPTS / f"{name}.txt"
    path = packaged if packaged.exists() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPTS.glob("*.txt")))
        raise FileNotFoundError(f"no prompt template {name!r}: give a text file, or one of {known}")
    return _read_file(path.absolute())


@lru_cache(maxsize=TEMPLATES)
def _read_file(path: Path) -> str:
    return path.read_text(encoding="utf-8").removesuffix("\n")


def fill(template: str, **values: str) -> str:
    """Replaces `{name}` in a template by each value. Other braces (LaTeX) stay. Values are not searched for names."""
    pieces = [template]
    for name, value in values.items():
        mark = "{" + name + "}"
        parted: list[str] = []
        for i, piece in enumerate(pieces):
            if i % 2:  # a value that was put in
                parted.append(piece)
                continue
            for k, part in enumerate(piece.split(mark)):
                parted += [value, part] if k else [part]
        pieces = parted
    return "".join(pieces)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The bytes that each token id adds to a text. Rows have a fixed width and are padded, so that the text of many
    tokens is one gather without the padding."""

    rows: np.ndarray  # [V + 1, WIDTH] uint8; the last row stands for every id beyond the vocabulary
    lengths: np.ndarray  # [V + 1] int32
    long: np.ndarray  # [V + 1] bool: the piece does not fit into a row, or has the filling's byte in it
    whole: list[bytes]  # [V + 1]
    strip: bool  # whether a text loses one space at its beginning
    lossy: bool  # whether bytes that spell no character become U+FFFD as in Python's "replace"

    def join(self, ids: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Puts the pieces of [T] ids together. -> (bytes, [T] their number after each id)."""
        known = np.minimum(ids, len(self.lengths) - 1)
        ends = np.cumsum(self.lengths[known], dtype=np.int64)
        padded = self.rows.take(known, axis=0).tobytes()
        parts, done = [], 0
        for t in np.flatnonzero(self.long[known]).tolist():  # few: they are set in between
            parts += [padded[done * WIDTH : t * WIDTH].translate(None, FILLING), self.whole[known[t]]]
            done = t + 1
        raw = b"".join([*parts, padded[done * WIDTH :].translate(None, FILLING)])
        if self.strip and raw.startswith(b" "):
            return raw[1:], np.maximum(ends - 1, 0)
        return raw, ends


@lru_cache(maxsize=TOKENIZERS)
def _pieces(backend: Any, size: int) -> _Pieces | None:
    """Returns the table of a tokenizer's pieces; None where a token's share of the text depends on its neighbours in
    another way than by a space at the beginning. `size`: its vocabulary's, so that a token that is added later makes a
    new table."""
    kind = _kind(backend)
    if kind is None:
        return None
    spell, strip, lossy = kind
    added = backend.get_added_tokens_decoder()
    strings = {i: string for string, i in backend.get_vocab(with_added_tokens=True).items()}
    strings |= {i: token.content for i, token in added.items()}
    whole = [b""] * (max(strings, default=-1) + 2)
    for i, string in strings.items():
        if i not in added or not added[i].special:
            whole[i] = spell(string)
    lengths = np.array(list(map(len, whole)), np.int32)
    long = (lengths > WIDTH) | np.array([FILLING in piece for piece in whole])
    rows = b"".join(b"" if far else piece.ljust(WIDTH, FILLING) for piece, far in zip(whole, long, strict=True))
    table = np.zeros((len(whole), WIDTH), np.uint8)
    table[~long] = np.frombuffer(rows, np.uint8).reshape(-1, WIDTH)
    table[long] = FILLING[0]
    return _Pieces(table, lengths, long, whole, strip, lossy)


def _kind(backend: Any) -> tuple[Callable[[str], bytes], bool, bool] | None:
    """Reads from the decoder's settings how a token of the vocabulary is spelt. -> (token -> bytes, strip, lossy), see
    `_Pieces`."""
    from tokenizers import decoders

    if backend.decoder is None:  # tokens are set apart by spaces
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
    known = names[-1:] == ["Fuse"] and names.count("Fuse") == 1 and set(names) <= {"Replace", "ByteFallback", "Fuse"}
    if not known or any("String" not in part["pattern"] for part in replaced):
        return None
    swaps = [(part["pattern"]["String"], part["content"]) for part in replaced]
    falls_back = "ByteFallback" in names

    def spell(token: str) -> bytes:
        for old, new in swaps:
            token = token.replace(old, new)
        return bytes([int(token[3:5], 16)]) if falls_back and _BYTE.fullmatch(token) else token.encode()

    return spell, strip, False


def _byte_level_spelling() -> Callable[[str], bytes]:
    """Returns token -> bytes of a byte-level vocabulary (GPT-2's table): printable bytes stand for themselves, others
    for characters from 256 on. A token with another character, which was added, is itself."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), ord("\u00ff") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {256 + i: byte for i, byte in enumerate(others)} | dict.fromkeys(others, 0xFFFF)  # 0xFFFF: is no byte

    def spell(token: str) -> bytes:
        try:
            return token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return spell


def _windowed(backend: Any, ids: Sequence[int]) -> Decoded:
    """Decodes with any decoder: a token's share is what it adds behind the tokens of the last addition, as far as the
    text agrees."""
    text = backend.decode(ids, skip_special_tokens=True)
    ends: list[int] = []
    length = start = read = 0  # text[:length] is settled by ids[:read]; ids[start:read] are the context
    context = ""
    for i in range(len(ids)):
        window = backend.decode(ids[start : i + 1], skip_special_tokens=True)
        piece = window[len(context) :]
        shown = _common_prefix(piece, text, length)
        ends.append(max(length + shown, ends[-1] if ends else 0))
        if piece and shown == len(piece) and not piece.endswith("\ufffd"):
            length, start, read = length + shown, read, i + 1
            context = backend.decode(ids[start:read], skip_special_tokens=True)
    if ends:
        ends[-1] = len(text)
    size = np.array([0, *itertools.accumulate(len(character.encode()) for character in text)], np.int64)
    return Decoded(text, text.encode(), size[np.array(ends, np.int64)])


def _common_prefix(piece: str, text: str, offset: int) -> int:
    """Returns how many characters of `piece` stand at text[offset:]."""
    if text.startswith(piece, offset):
        return len(piece)
    return next(k for k, character in enumerate(piece) if text[offset + k : offset + k + 1] != character)
