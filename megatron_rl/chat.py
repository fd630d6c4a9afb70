"""Between tokens and text: decoding with the place of every token, so that text positions lead back to the model's own tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PROMPTS = Path(__file__).parent / "recipes" / "prompts"


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name. A tokenizer.json is taken as it is: transformers 5 rebuilds a model type's own kind
    of tokenizer instead (a word-level one beside a Qwen2 config becomes byte-level BPE), and ids would change."""
    if (Path(directory) / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def decode_with_offsets(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """[T] tokens -> (text, ends): ends[i] characters of `text` are there once token i is. Special tokens add nothing.

    The text is built token by token, never tokenised again. A token that completes no character (a part of a multi-byte one)
    ends where the one before it does; bytes that never become a character are left out.
    """
    stream, backend = DecodeStream(skip_special_tokens=True), tokenizer.backend_tokenizer
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for token in tokens:
        piece = stream.step(backend, int(token))
        if piece:
            parts.append(piece)
            length += len(piece)
        ends.append(length)
    return "".join(parts), ends


def token_span(start: int, end: int, ends: Sequence[int]) -> tuple[int, int]:
    """Characters [start, end) -> tokens [first, last + 1) that hold them, by the offsets of `decode_with_offsets`."""
    first = min(bisect.bisect_right(ends, start), max(len(ends) - 1, 0))
    last = min(bisect.bisect_left(ends, end), max(len(ends) - 1, 0))
    return first, last + 1


def read_template(name: str) -> str:
    """A prompt text: a packaged name (`tango_generator`) or a path to a text file. Raises FileNotFoundError with both places."""
    packaged = PROMPTS / f"{name}.txt"
    path = packaged if packaged.exists() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPTS.glob("*.txt")))
        raise FileNotFoundError(f"no prompt template {name!r}: give a text file, or one of {known}")
    return path.read_text(encoding="utf-8").removesuffix("\n")


def fill(template: str, **values: str) -> str:
    """Replaces `{name}` by each value; other braces (LaTeX) stay. Values are not searched for names."""
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
