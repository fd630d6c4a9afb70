"""Converts between tokens and text. Decoding keeps every token's place, so text positions lead back to the tokens."""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_rl.weights.hf import local_directory

PROMPTS = Path(__file__).parent / "recipes" / "prompts"


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model directory or hub name.

    A tokenizer.json is taken as it is. transformers 5 would rebuild the model type's own kind of tokenizer instead (a
    word-level one beside a Qwen2 config becomes byte-level BPE), and token ids would change.
    """
    local = local_directory(directory)
    if (local / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(local)
    return AutoTokenizer.from_pretrained(local)


def decode_with_offsets(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """Decodes [T] tokens into (text, ends): the first ends[i] characters of `text` come from tokens 0 to i.

    `text` is what `tokenizer.decode(tokens, skip_special_tokens=True)` gives without clean-up, and is never tokenised
    again. Special tokens add nothing. A token that completes no character (a part of a multi-byte one) ends where the
    one before it does; a character that stays incomplete at the end of the sequence (U+FFFD in the text) belongs to the
    last token. Any token ids are allowed. `ends` never falls, and its last element is len(text).
    """
    backend = tokenizer.backend_tokenizer
    ids = [int(token) for token in tokens]
    text = backend.decode(ids, skip_special_tokens=True)
    if isinstance(backend.decoder, ByteLevel):
        built, ends = _byte_level_ends(backend, ids)
        if built == text:
            return text, ends
    return text, _single_ends(backend, ids, text) or _windowed_ends(backend, ids, text)


def decode_all(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Returns the text of each sequence of tokens, as `decode_with_offsets` gives it."""
    return tokenizer.backend_tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=True)


def token_span(start: int, end: int, ends: Sequence[int]) -> tuple[int, int]:
    """Returns the tokens [first, last + 1) that hold the characters [start, end). `ends`: of `decode_with_offsets`."""
    first = min(bisect.bisect_right(ends, start), max(len(ends) - 1, 0))
    last = min(bisect.bisect_left(ends, end), max(len(ends) - 1, 0))
    return first, last + 1


def read_template(name: str) -> str:
    """Reads a prompt template by its packaged name (`tango_generator`) or from a file. Raises FileNotFoundError."""
    packaged = PROMPTS / f"{name}.txt"
    path = packaged if packaged.exists() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPTS.glob("*.txt")))
        raise FileNotFoundError(f"no prompt template {name!r}: give a text file, or one of {known}")
    return path.read_text(encoding="utf-8").removesuffix("\n")


def fill(template: str, **values: str) -> str:
    """Replaces every `{name}` by its value. Other braces (LaTeX) stay, and values are not searched for names."""
    pieces = [template]
    for name, value in values.items():
        mark = "{" + name + "}"
        parted: list[str] = []
        for i, piece in enumerate(pieces):
            if i % 2:  # odd pieces are values that were put in
                parted.append(piece)
                continue
            for k, part in enumerate(piece.split(mark)):
                parted += [value, part] if k else [part]
        pieces = parted
    return "".join(pieces)


def _byte_level_ends(backend: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Returns (text, ends) of byte-level BPE tokens, whose bytes pass an incremental UTF-8 decoder."""
    alphabet = _byte_alphabet()
    pieces: dict[int, bytes] = {i: b"" for i, added in backend.get_added_tokens_decoder().items() if added.special}
    for i in set(ids).difference(pieces):
        token = backend.id_to_token(i) or ""  # an id beyond the vocabulary adds nothing
        known = all(character in alphabet for character in token)
        pieces[i] = bytes(alphabet[character] for character in token) if known else token.encode()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for i in ids:
        parts.append(decoder.decode(pieces[i]))
        length += len(parts[-1])
        ends.append(length)
    parts.append(decoder.decode(b"", final=True))
    if ends:
        ends[-1] += len(parts[-1])
    return "".join(parts), ends


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character in a byte-level vocabulary (GPT-2's table). Printable bytes are themselves."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), ord("\u00ff") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _single_ends(backend: Any, ids: Sequence[int], text: str) -> list[int] | None:
    """Returns the ends for a decoder whose tokens, decoded one by one, make up the text; None for any other decoder."""
    known = sorted(set(ids))
    pieces = dict(zip(known, backend.decode_batch([[i] for i in known], skip_special_tokens=True), strict=True))
    if "".join(pieces[i] for i in ids) != text:
        return None
    return list(itertools.accumulate(len(pieces[i]) for i in ids))


def _windowed_ends(backend: Any, ids: Sequence[int], text: str) -> list[int]:
    """Returns the ends for any decoder.

    Each token is decoded behind the last tokens that added text, and counts for what it adds as far as `text` agrees.
    """
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
    return ends


def _common_prefix(piece: str, text: str, offset: int) -> int:
    """Returns how many characters of `piece` stand at text[offset:]."""
    if text.startswith(piece, offset):
        return len(piece)
    return next(k for k, character in enumerate(piece) if text[offset + k : offset + k + 1] != character)
