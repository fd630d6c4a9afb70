"""Checks that a tokenizer fits a model: finds tokens without an embedding row, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.base import ConfigError, read_object
from megatron_rl.config.model import Model


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a model, according to its config.json, generation_config.json and tokenizer."""

    path: str  # path of the model
    rows: int | None  # number of embedding rows; None if there is no config.json or config.json lacks vocab_size
    ends: frozenset[int]  # ids of end-of-text tokens, at which engines end a completion
    # ids of the tokenizer's special tokens; their texts may be used as stop strings (`sampling.stop_strings`)
    special: frozenset[int]
    without_row: Mapping[int, str]  # {id: token}, the tokenizer's tokens that have no embedding row

    def missing(self, tokens: Iterable[int] | np.ndarray) -> str | None:
        """Returns an error message about the first of the given token ids that has no embedding row, or None if all ids
        have one.
        """
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64)
        if self.rows is None or not len(ids) or ids.max() < self.rows:
            return None
        first = int(ids[ids >= self.rows][0])
        return (
            f"token {first} ({self.without_row.get(first, '?')!r}), and the embedding of {self.path} has {self.rows} "
            "rows (vocab_size): resize the embedding to the tokenizer, or give the tokenizer that belongs to the model"
        )


def vocabulary_of(model: Model, tokenizer: Any) -> Vocabulary:
    """Reads a model's vocabulary from its files.

    Raises ConfigError if an EOS or padding token, an end-of-text token, or a token of the chat template has no
    embedding row. Unused tokens of the tokenizer may lack an embedding row.
    """
    facts, generation = (_read(model.path, name) for name in ("config.json", "generation_config.json"))
    rows = facts.get("vocab_size", (facts.get("text_config") or {}).get("vocab_size"))
    end_ids = {
        "eos_token of the tokenizer": tokenizer.eos_token_id,
        "eos_token_id of config.json": facts.get("eos_token_id"),
        "eos_token_id of generation_config.json": generation.get("eos_token_id"),
    }
    ends = {name: token_ids(model.path, name, value) for name, value in end_ids.items()}
    names = {} if rows is None else {i: name for name, i in tokenizer.get_vocab().items() if i >= rows}
    special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    vocabulary = Vocabulary(model.path, rows, frozenset().union(*ends.values()), special, names)
    used = {**ends, "pad_token of the tokenizer": {tokenizer.pad_token_id} - {None}, **_of_template(tokenizer, names)}
    for name, ids in used.items():
        if why := vocabulary.missing(sorted(ids)):
            raise ConfigError(f"{model.tokenizer or model.path}: {name} is {why}")
    return vocabulary


def padding_token(tokenizer: Any, vocabulary: Vocabulary) -> int | None:
    """Returns the id of a token that can pad texts whose last token has a meaning, such as the texts of a reward model:
    a token that ends no text and is not in the chat template. Returns None if there is no such token.

    This is the tokenizer's padding token if possible, and otherwise a special token, preferably one that is called
    padding.
    """
    rows = len(tokenizer) if vocabulary.rows is None else vocabulary.rows
    usable = {i for i in (*vocabulary.special, tokenizer.pad_token_id) if i is not None and i < rows} - vocabulary.ends
    template = str(tokenizer.chat_template or "")
    tokens = {i: token for i in usable if (token := tokenizer.convert_ids_to_tokens(i)) not in template}
    if tokenizer.pad_token_id in tokens:
        return tokenizer.pad_token_id
    return max(tokens, key=lambda i: ("pad" in tokens[i].lower(), i != tokenizer.unk_token_id, i), default=None)


def check_vocabularies(first: Any, second: Any, why: str) -> None:
    """Raises ConfigError if two tokenizers have different tokens for the same id. `why`: the beginning of the error
    message, which explains where ids are passed from one model to the other.
    """
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (first, second))
    if differing := sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i]):
        i = differing[0]
        raise ConfigError(
            f"{why}, and their vocabularies differ in {len(differing)} tokens, such as {i}, which is {ours[i]!r} and "
            f"{theirs[i]!r}: take models of one family"
        )


def _of_template(tokenizer: Any, names: Mapping[int, str]) -> dict[str, set[int]]:
    """Returns the ids of tokens that prompts contain independently of the prompt's text, as {description for error
    messages: ids}. These are tokens that the tokenizer adds around every text, and those tokens of `names` (tokens
    without an embedding row) that occur in the chat template.
    """
    around = {*tokenizer("")["input_ids"]}
    template = str(tokenizer.chat_template or "")
    if "bos_token" in template:
        around |= {tokenizer.bos_token_id} - {None}
    written = {i for i, token in names.items() if token in template and i in tokenizer.added_tokens_decoder}
    return {"a token that the tokenizer puts around texts": around, "a token of the chat template": written}


def token_ids(path: str | Path, name: str, value: Any) -> set[int]:
    """Returns the set of token ids in a JSON value: a single id, a list of ids, or null. Raises ConfigError for any
    other value.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ConfigError(f"{path}: {name} is {str(value)[:40]!r}: give a token id, or a list of token ids")
    return {*ids}


def _read(directory: str, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a model directory, or an empty dict if there is no such file."""
    from megatron_rl.weights.hf_model import local_directory  # a slow import, which other functions do not need

    try:
        file = Path(local_directory(directory)) / name
    except OSError:
        return {}
    return read_object(file) if file.is_file() else {}
