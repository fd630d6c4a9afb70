"""Reads samples for supervised fine-tuning, texts or conversations, and converts them to rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.chat_template import (
    ASSISTANT,
    WEIGHT,
    Message,
    conversation_tokens,
    refuse_endless,
    tokenize,
)
from megatron_rl.config.schema import SftData
from megatron_rl.data.conversations import (
    CONVERSATIONS,
    is_conversation,
    parsed,
    read_messages,
    with_columns,
    without_nulls,
)
from megatron_rl.data.rows import DataError, NotThere, reach, read_all, refuse, reject, rows_of, text_at
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of
from megatron_rl.vocabulary import Vocabulary

_RESPONSES = ("response", "completion")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """A prompt and the response to it, as texts."""

    prompt: str
    response: str
    where: str = field(default="", compare=False)  # file and line of the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation whose assistant messages from index `first` on are trained."""

    messages: Sequence[Message]
    first: int = 0
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of tools for the chat template
    where: str = ""  # file and line of the sample


SftSample = TextPair | Conversation


def read_samples(data: SftData, *, split: str = "train") -> list[SftSample]:
    """Returns the samples of data.train. `split`: the split if the path is a directory or a data set.

    A sample is a prompt and a response (both texts, or both messages), or one conversation. The keys of the sample in
    the rows are found in the first row that has a sample, and are used for all rows. Bad rows are skipped with a
    warning that names file and line. Raises DataError if more than data.max_bad_share of the rows are bad.
    """
    fields: tuple[str, ...] = ()

    def read(where: str, row: Mapping[str, Any]) -> SftSample:
        nonlocal fields
        fields = fields or sample_fields(data, row)
        return _sample(row, fields or (data.prompt_field, data.response_field or _RESPONSES[0]), where)

    found, bad, count = read_all(rows_of(data.train, split, None), read)
    if not count:
        raise DataError(f"{data.train} has no rows: look at data.train and data.validation")
    refuse(bad, count, data.max_bad_share, data.train)
    return [sample for _, sample in found]


def sample_fields(data: SftData, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the keys under which a row holds its sample: (key of the prompt, key of the response), or (key of the
    conversation,). Returns () if the row has no sample."""
    if data.messages_field is not None:
        return (data.messages_field,)
    responses = _RESPONSES if data.response_field is None else (data.response_field,)
    found = [key for key in responses if not isinstance(reach(row, key), NotThere)]
    if found and not isinstance(reach(row, data.prompt_field), NotThere):
        return data.prompt_field, found[0]
    return tuple(key for key in CONVERSATIONS if is_conversation(row.get(key)))[:1]


def sft_rollouts(
    samples: Sequence[SftSample],
    tokenizer: Any,
    *,
    append_eos: bool,
    max_tokens: int,
    max_bad_share: float = 0.0,
    vocabulary: Vocabulary | None = None,
) -> list[Rollout]:
    """Converts samples to rollouts. The trained tokens are the response and its EOS token, or the assistant's messages
    (`chat_template.conversation_tokens`).

    The prompt and response of a pair are tokenized separately, so that the boundary is the same as in generation. A
    sample is bad if it is longer than `max_tokens`, the chat template fails, the model of `vocabulary` has no embedding
    for a token, or a conversation would not teach the model to stop. Bad samples are dropped with a warning. Raises
    DataError if more than `max_bad_share` are bad or none is left, and ConfigError for conversations without a chat
    template.
    """
    if append_eos and tokenizer.eos_token_id is None and any(isinstance(sample, TextPair) for sample in samples):
        raise DataError(
            "data.append_eos = true, but the tokenizer has no EOS token: set it in the tokenizer, or append_eos to "
            "false"
        )

    def read(where: str, item: tuple[int, SftSample]) -> Rollout:
        number, sample = item
        if isinstance(sample, TextPair):
            prompt = tokenize(tokenizer, sample.prompt)
            response = tokenizer.encode(sample.response, add_special_tokens=False)
            tokens = np.array([*prompt, *response, *([tokenizer.eos_token_id] if append_eos else [])], np.int32)
            trained = np.arange(len(tokens)) >= len(prompt)
        else:
            tokens, trained = conversation_tokens(tokenizer, sample.messages, first=sample.first, tools=sample.tools)
            if vocabulary is not None and append_eos:
                refuse_endless(vocabulary, tokens[trained])
        why = None if vocabulary is None else vocabulary.missing(tokens)
        if not why and len(tokens) > max_tokens:
            why = f"{len(tokens)} tokens: raise data.max_tokens = {max_tokens}"
        if why:
            raise DataError(f"it has {why}")
        return _rollout(str(number), tokens, trained)

    rows = ((item[1].where or f"sample {item[0]}", item) for item in enumerate(samples))
    found, bad, _ = read_all(rows, read)
    refuse(bad, len(samples), max_bad_share, "the data")
    if not found:
        raise DataError(f"no sample is left: all {len(samples)} are longer than data.max_tokens = {max_tokens}")
    return [rollout for _, rollout in found]


def _sample(row: Mapping[str, Any], fields: Sequence[str], where: str) -> SftSample:
    values = [reach(row, key) for key in fields]
    absent = [key for key, value in zip(fields, values, strict=True) if isinstance(value, NotThere)]
    reject(*(f"no {key}; the row has {', '.join(map(str, row))}" for key in absent))
    if len(fields) == 1:
        return _conversation(read_messages(values[0], fields[0]), 0, row, where)
    prompt, response = fields
    if not any(isinstance(value, (list, tuple)) for value in values):
        return TextPair(prompt=text_at(row, "prompt", prompt), response=text_at(row, "response", response), where=where)
    texts = [key for key, value in zip(fields, values, strict=True) if not isinstance(value, (list, tuple))]
    reject(*(f"{key!r} is no list of messages, as the other of {prompt!r} and {response!r} is" for key in texts))
    before = read_messages(values[0], prompt)
    return _conversation([*before, *read_messages(values[1], response)], len(before), row, where)


def _conversation(messages: Sequence[Message], first: int, row: Mapping[str, Any], where: str) -> Conversation:
    if not any(message["role"] == ASSISTANT and WEIGHT not in message for message in messages[first:]):
        raise DataError("no message of an assistant to train on: look at data.messages_field and data.response_field")
    framed = with_columns(row, messages)
    first += len(framed) - len(messages) if first else 0
    tools = without_nulls(row.get("tools"))
    tools = parsed(tools, "'tools' must be a list of JSON schemas, and is") if isinstance(tools, str) else tools
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise DataError(f"'tools' is a {type(tools).__name__}: give a list of JSON schemas")
    return Conversation(messages=framed, first=first, tools=tools or None, where=where)


def _rollout(group: str, tokens: np.ndarray, trained: np.ndarray) -> Rollout:
    cuts = np.flatnonzero(np.diff(trained)) + 1
    lengths = np.diff(np.concatenate([[0], cuts, [len(tokens)]]))
    authors = [(Author.POLICY, 0) if own else (Author.ENVIRONMENT, NO_VERSION) for own in trained[[0, *cuts]]]
    parts = [(int(length), author, version) for length, (author, version) in zip(lengths, authors, strict=True)]
    logprobs = np.zeros(len(tokens), np.float32)
    return Rollout(role="model", group=group, tokens=tokens, logprobs=logprobs, spans=spans_of(*parts))
