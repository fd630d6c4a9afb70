"""Reads samples for supervised fine-tuning and preference learning, and converts them to rollouts. The samples are
texts or conversations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from megatron_rl.batches.packed_batch import IN_ADVANTAGES
from megatron_rl.config.schema import SftData
from megatron_rl.data.columns import SYSTEM, TOOLS, lost_columns
from megatron_rl.data.conversations import (
    CONVERSATIONS,
    is_conversation,
    parsed,
    read_messages,
    with_columns,
    without_nulls,
)
from megatron_rl.data.rows import BadRow, DataError, NotThere, reach, read_all, refuse, reject, rows_of, text_at
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.rewards.reward_functions import LARGEST, in_range
from megatron_rl.texts.chat_template import (
    ASSISTANT,
    WEIGHT,
    Message,
    conversation_tokens,
    refuse_endless,
    tokenize,
    without_end,
)
from megatron_rl.texts.vocabulary import Vocabulary
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of

_RESPONSES = ("response", "completion")
_PAIR = ("chosen", "rejected")
# What a row has. completion: a prompt and a response, or a conversation. pair: a preferred and a rejected response.
# labelled: a completion with a label. rewarded: a completion with a reward. scored: a completion with one of the two.
# compared: a pair for a reward model.
# steps: a solution in steps, each of which has a label, for a process reward model.
Rows = Literal["completion", "pair", "labelled", "rewarded", "scored", "compared", "steps"]
# {kind of rows: the columns that give the advantage of a completion}
_SCORES: Mapping[str, tuple[str, ...]] = {
    "labelled": ("label",),
    "rewarded": ("reward",),
    "scored": ("label", "reward"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """A prompt and the response to it, as texts."""

    prompt: str
    response: str
    where: str = field(default="", compare=False)  # file and line of the sample
    advantage: float | None = None  # the row's reward; 1 or -1 for a row with a label; None if the row has neither


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation. The assistant messages from index `first` on are trained on."""

    messages: Sequence[Message]
    first: int = 0
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of tools for the chat template
    where: str = ""  # file and line of the sample
    advantage: float | None = None  # as in TextPair


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, of which people or a judge preferred the first."""

    chosen: TextPair | Conversation
    rejected: TextPair | Conversation
    # Amount by which the score of `chosen` should exceed the score of `rejected`, in a pair for a reward
    # model. None in any other pair.
    margin: float | None = None

    @property
    def where(self) -> str:
        return self.chosen.where


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSteps:
    """A solution in steps, each of which is labelled as right or wrong."""

    prompt: str
    steps: Sequence[str]
    labels: Sequence[bool]
    separator: str  # text after each step; the last token of the separator is the end of the step
    where: str = ""  # file and line of the sample


SftSample = TextPair | Conversation | Preference | LabelledSteps


def rows_of_loss(needs: frozenset[str]) -> Rows:
    """Returns the kind of data rows that a loss with these `needs` reads (see packed_batch.BatchLoss.needs)."""
    if "pairs" in needs:
        return "compared" if "margin" in needs else "pair"
    scored: Rows = "labelled" if "labels" in needs else "rewarded" if "rewards" in needs else "scored"
    return "steps" if "step_label" in needs else scored if needs & IN_ADVANTAGES else "completion"


def columns_read(data: SftData, kind: Rows) -> set[str]:
    """Returns the names of all columns that `read_samples` may read from rows of a kind."""
    fields = {data.prompt_field, *(_RESPONSES if data.response_field is None else (data.response_field,))}
    fields |= {*CONVERSATIONS} if data.messages_field is None else {data.messages_field}
    more = {
        "pair": {data.prompt_field, *_PAIR}, "compared": {data.prompt_field, *_PAIR, "margin"},
        "steps": {data.prompt_field, "completions", "labels"},
    }  # fmt: skip
    keys = more.get(kind, fields | ({*_PAIR, *_SCORES[kind]} if kind in _SCORES else set()))
    return {key.partition(".")[0] for key in keys} | ({TOOLS, SYSTEM} if kind != "steps" else set())


def unread_columns(data: SftData, kind: Rows, split: str, most: int) -> set[str]:
    """Returns the columns of the first `most` rows of data.train that nothing reads."""
    rows = (row for _, row in itertools.islice(rows_of(data.train, split, None), most))
    present = {str(key) for row in rows if not isinstance(row, BadRow) for key in row if row[key] is not None}
    return present - columns_read(data, kind)


def read_samples(data: SftData, *, split: str = "train", kind: Rows = "completion") -> list[SftSample]:
    """Returns the samples of data.train. `split`: the split if the path is a directory or a data set.

    A sample is a prompt and a response (both texts, or both messages), or one conversation, or a pair of responses
    (TRL's preference formats), or a solution in labelled steps (TRL's stepwise supervision). The keys of a prompt and
    its response, or of a conversation, are found in the first row that has a sample, and are used for all rows. If rows
    of kind "labelled", "rewarded" or "scored" have pairs, the advantage of the preferred response is 1, and that of the
    rejected response -1.
    Bad rows are skipped with a warning that names file and line. Raises DataError if more than data.max_bad_share of
    the rows are bad.
    """
    fields: tuple[str, ...] = ()

    def read(where: str, row: Mapping[str, Any]) -> SftSample:
        nonlocal fields
        if kind == "steps":
            return _steps(data, row, where)
        if kind in ("pair", "compared") or (kind in _SCORES and {*_PAIR} <= row.keys()):
            pair = _preference(data, row, where)
            return replace(pair, margin=_margin(row)) if kind == "compared" else pair
        fields = fields or sample_fields(data, row)
        sample = _sample(data, row, fields or (data.prompt_field, data.response_field or _RESPONSES[0]), where)
        return replace(sample, advantage=_advantage(row, _SCORES[kind])) if kind in _SCORES else sample

    samples, bad, count = read_all(rows_of(data.train, split, None), read)
    if not count:
        raise DataError(f"{data.train} has no rows: look at data.train and data.validation")
    refuse(bad, count, data.max_bad_share, data.train)
    return [sample for _, sample in samples]


def sample_fields(data: SftData, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the keys under which a row holds its sample: (key of the prompt, key of the response), or (key of the
    conversation,). Returns () if the row has no sample."""
    if data.messages_field is not None:
        return (data.messages_field,)
    responses = _RESPONSES if data.response_field is None else (data.response_field,)
    keys = [key for key in responses if not isinstance(reach(row, key), NotThere)]
    if keys and not isinstance(reach(row, data.prompt_field), NotThere):
        return data.prompt_field, keys[0]
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
    (`chat_template.conversation_tokens`). A pair becomes two rollouts of one group, the preferred one first, with the
    advantages 1 and -1. In a pair for a reward model and in labelled steps, only the tokens at the indices of scores
    are trained on (`scored_rollout`).

    The prompt and response of a pair are tokenized separately, so that the boundary is the same as in generation. A
    sample is bad if it is longer than `max_tokens`, the chat template fails, the model of `vocabulary` has no embedding
    for a token, or a conversation would not teach the model to stop. Bad samples are dropped with a warning. Raises
    DataError if more than `max_bad_share` are bad or none is left, and ConfigError for conversations without a chat
    template.
    """
    kinds = {type(part) for sample in samples for part, _ in _parts(sample)}
    if append_eos and tokenizer.eos_token_id is None and TextPair in kinds:
        raise DataError(
            "data.append_eos = true, but the tokenizer has no EOS token: set it in the tokenizer, or append_eos to "
            "false"
        )

    def read(where: str, item: tuple[int, SftSample]) -> list[Rollout]:
        rollouts = _rollouts_of(str(item[0]), item[1], tokenizer, append_eos=append_eos, vocabulary=vocabulary)
        for tokens in (rollout.tokens for rollout in rollouts):
            why = None if vocabulary is None else vocabulary.missing(tokens)
            if not why and len(tokens) > max_tokens:
                why = f"{len(tokens)} tokens: raise data.max_tokens = {max_tokens}"
            reject(*[f"it has {why}"] * bool(why))
        return rollouts

    rows = ((item[1].where or f"sample {item[0]}", item) for item in enumerate(samples))
    converted, bad, _ = read_all(rows, read)
    refuse(bad, len(samples), max_bad_share, "the data")
    if not converted:
        raise DataError(f"no sample is left: all {len(samples)} are longer than data.max_tokens = {max_tokens}")
    return [rollout for _, rollouts_of_sample in converted for rollout in rollouts_of_sample]


def mismatched(rollouts: Sequence[Rollout], max_tokens: int, *, other_row: Sequence[Rollout] = ()) -> list[Rollout]:
    """Combines the prompt of each rollout with the response of the rollout before it, and the first prompt with the
    response of the last rollout. Returns the new rollouts, truncated to `max_tokens`. The rollouts are reordered
    before they are combined, so that the two responses of a pair, which have the same prompt, are not adjacent.
    `other_row`: rollouts of another row. If all rollouts are of a single row, their prompts get its responses.

    KTO estimates a KL divergence with such mismatched texts (arXiv 2402.01306, section 4.1).
    """
    if other_row and len({rollout.group for rollout in rollouts}) == 1:
        renamed = [replace(rollout, group="") for rollout in other_row]  # rows of other data may have the same group
        return [rollout for rollout in mismatched([*renamed, *rollouts], max_tokens) if rollout.group]
    seen: Counter[str] = Counter()
    places = []
    for rollout in rollouts:
        places.append(seen[rollout.group])
        seen[rollout.group] += 1
    order, combined = sorted(range(len(rollouts)), key=places.__getitem__), []
    for number, previous in zip(order, [order[-1], *order[:-1]], strict=True):
        target, source = rollouts[number], rollouts[previous]
        tokens = np.concatenate([target.tokens[: target.start], source.tokens[source.start :]])
        trained = np.concatenate([np.zeros(target.start, bool), source.trainable[source.start :]])
        combined.append(_rollout(target.group, tokens[:max_tokens], trained[:max_tokens]))
    return combined


def _parts(sample: SftSample) -> list[tuple[TextPair | Conversation | LabelledSteps, float | None]]:
    """Returns each text of a sample with the advantage of the text, which is None if the text has no advantage. A pair
    has two texts, and any other sample has one."""
    if isinstance(sample, Preference):
        return [(sample.chosen, 1.0), (sample.rejected, -1.0)]
    return [(sample, None if isinstance(sample, LabelledSteps) else sample.advantage)]


def _rollouts_of(
    group: str, sample: SftSample, tokenizer: Any, *, append_eos: bool, vocabulary: Vocabulary | None
) -> list[Rollout]:
    """Returns the rollouts of a sample. Their lengths are not checked, nor whether each token has an embedding."""
    rollouts, margin = [], sample.margin if isinstance(sample, Preference) else None
    for part, advantage in _parts(sample):
        if isinstance(part, LabelledSteps):
            rollouts.append(_labelled(group, part, tokenizer))
            continue
        if isinstance(part, TextPair):
            prompt = tokenize(tokenizer, part.prompt)
            text = without_end(tokenizer, part.response) if append_eos else part.response
            reject(*["the response is only the end of a text"] * (not text))
            response = tokenizer.encode(text, add_special_tokens=False)
            tokens = np.array([*prompt, *response, *([tokenizer.eos_token_id] if append_eos else [])], np.int32)
            trained = np.arange(len(tokens)) >= len(prompt)
        else:
            tokens, trained = conversation_tokens(tokenizer, part.messages, first=part.first, tools=part.tools)
            if vocabulary is not None and append_eos and margin is None:
                refuse_endless(vocabulary, tokens[trained])
        if margin is None:
            rollouts.append(_rollout(group, tokens, trained, advantage))
        else:
            rollouts.append(scored_rollout("model", group, tokens, values={"margin": [margin]}))
    return rollouts


def _labelled(group: str, sample: LabelledSteps, tokenizer: Any) -> Rollout:
    """Returns the rollout of a solution in steps. One score is read at the last token of each step, and the rollout's
    value "step_label" at this score is the label of the step, 0 or 1. As in TRL, steps and separators are tokenized one
    by one.
    """
    tokens, ends = tokenize(tokenizer, sample.prompt), list[int]()
    for step in sample.steps:
        for text in (step, sample.separator):
            tokens += tokenizer.encode(text, add_special_tokens=False)
        ends.append(len(tokens) - 1)
    return scored_rollout("model", group, tokens, ends=ends, values={"step_label": [*map(float, sample.labels)]})


def _preference(data: SftData, row: Mapping[str, Any], where: str) -> Preference:
    """Returns the pair of a row in one of TRL's formats: texts or messages under the keys `chosen` and `rejected`,
    which follow the prompt of the row. If the row has no prompt, the prompt is the common beginning of `chosen` and
    `rejected`. If both begin with the prompt of the row, the prompt counts once. A prompt that is a text beside
    conversations must be one of their common first messages.
    """
    prompt, *sides = (reach(row, key) for key in (data.prompt_field, *_PAIR))
    absent = [key for key, side in zip(_PAIR, sides, strict=True) if isinstance(side, NotThere)]
    reject(*(f"no {key}; the row has {', '.join(map(str, row))}" for key in absent))
    if isinstance(sides[0], (list, tuple)):
        read = [read_messages(side, key) for key, side in zip(_PAIR, sides, strict=True)]
        context = read_messages(prompt, data.prompt_field) if isinstance(prompt, (list, tuple)) else []
        first = len(context) or _common(*read)
        reject(*["chosen and rejected begin with different messages, and the row has no prompt"] * (not first))
        if isinstance(prompt, str) and not any(prompt.strip() in str(m.get("content")) for m in read[0][:first]):
            raise DataError(
                f"{data.prompt_field!r} is a text that is not among the first messages of chosen and rejected: give "
                "messages in its place"
            )
        repeated = _repeated(context, read)
        responses = [_conversation(data, [*context, *messages[repeated:]], first, row, where) for messages in read]
    else:
        _refuse_beside_texts(data, row)
        if all(isinstance(side, str) for side in sides):
            if isinstance(prompt, NotThere):
                prompt = sides[0][: _common(*sides)]
                sides = [side[len(prompt) :] for side in sides]
            elif isinstance(prompt, str):
                sides = [side[_repeated(prompt, sides) :] for side in sides]
        texts = dict(zip((data.prompt_field, *_PAIR), (prompt, *sides), strict=True))
        context = text_at(texts, "prompt", data.prompt_field)
        responses = [TextPair(prompt=context, response=text_at(texts, key, key), where=where) for key in _PAIR]
    reject(*["chosen and rejected are equal: there is nothing to prefer"] * (responses[0] == responses[1]))
    return Preference(chosen=responses[0], rejected=responses[1])


def _common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the number of messages, or characters, in the common beginning of `chosen` and `rejected`. As in TRL, a
    space before the first different character belongs to the responses.
    """
    places = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    size = next(places, min(len(chosen), len(rejected)))
    return size - 1 if size and chosen[size - 1] == " " else size


def _steps(data: SftData, row: Mapping[str, Any], where: str) -> LabelledSteps:
    """Returns the labelled steps of a row in TRL's format: texts under `prompt` and `completions`, and `labels`."""
    _refuse_beside_texts(data, row)
    steps, labels = (row.get(key) for key in ("completions", "labels"))
    lists = [value for value in (steps, labels) if isinstance(value, (list, tuple)) and value]
    reject(
        *["completions and labels are no lists: give the texts of the steps, and true or false for each of them"]
        * (len(lists) < 2)
    )
    texts, marks = lists
    wrong = [label for label in marks if label not in (True, False)]
    reject(*(f"labels has {label!r:.40}: give true or false for each step" for label in wrong))
    reject(
        *[f"{len(texts)} completions with {len(marks)} labels: give one label per step"] * (len(texts) != len(marks))
    )
    return LabelledSteps(
        prompt=text_at(row, "prompt", data.prompt_field),
        steps=[text_at({"step": text}, "step", "step") for text in texts],
        labels=[bool(label) for label in marks],
        separator=data.step_separator,
        where=where,
    )


def _margin(row: Mapping[str, Any]) -> float:
    """Returns the margin of the pair in a row; 0 if the row has no margin."""
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, (int, float)) and not isinstance(margin, bool) and in_range(margin):
        return float(margin)
    raise DataError(
        f"margin is {margin!r:.40}: give a number up to {LARGEST:g}, by which the score of `chosen` should be larger"
    )


def _advantage(row: Mapping[str, Any], columns: Sequence[str]) -> float:
    """Returns the reward of a row, or 1 or -1 for a row with a label. `columns`: the columns that the objective reads,
    `label`, `reward` or both."""
    scores = {column: row[column] for column in columns if row.get(column) is not None}
    reject(*["it has a label and a reward, and the objective takes either: leave one of them out"] * (len(scores) > 1))
    label, reward = scores.get("label"), scores.get("reward")
    if label in (True, False):
        return 1.0 if label else -1.0
    if isinstance(reward, (int, float)) and not isinstance(reward, bool) and in_range(reward):
        return float(reward)
    labels = " and ".join(f"{column} is {row.get(column)!r:.40}" for column in columns)
    forms = {"label": "`label`, true or false", "reward": f"`reward`, a number up to {LARGEST:g}"}
    raise DataError(f"{labels}: give {', or '.join(forms[column] for column in columns)}")


def _sample(data: SftData, row: Mapping[str, Any], fields: Sequence[str], where: str) -> TextPair | Conversation:
    values = [reach(row, key) for key in fields]
    absent = [key for key, value in zip(fields, values, strict=True) if isinstance(value, NotThere)]
    reject(*(f"no {key}; the row has {', '.join(map(str, row))}" for key in absent))
    if len(fields) == 1:
        return _conversation(data, read_messages(values[0], fields[0]), 0, row, where)
    prompt, response = fields
    if not any(isinstance(value, (list, tuple)) for value in values):
        _refuse_beside_texts(data, row)
        return TextPair(prompt=text_at(row, "prompt", prompt), response=text_at(row, "response", response), where=where)
    texts = [key for key, value in zip(fields, values, strict=True) if not isinstance(value, (list, tuple))]
    reject(*(f"{key!r} is no list of messages, as the other of {prompt!r} and {response!r} is" for key in texts))
    context, reply = read_messages(values[0], prompt), read_messages(values[1], response)
    return _conversation(data, [*context, *reply[_repeated(context, [reply]) :]], len(context), row, where)


def _repeated(prompt: Sequence[Any], responses: Sequence[Sequence[Any]]) -> int:
    """Returns the number of messages, or characters, at the beginning of all responses that repeat the prompt, or the
    last messages of the prompt. Returns 0 if the last message of the prompt is an assistant's, which a response may
    continue by another turn of the assistant."""
    if not prompt or isinstance(prompt[-1], Mapping) and prompt[-1]["role"] == ASSISTANT:
        return 0
    sizes = [len(prompt)] if isinstance(prompt, str) else range(len(prompt), 0, -1)
    repeats = (n for n in sizes if all(len(response) > n and response[:n] == prompt[-n:] for response in responses))
    return next(repeats, 0)


def _refuse_beside_texts(data: SftData, row: Mapping[str, Any]) -> None:
    """Raises DataError if a row with a prompt and a response as texts has a column that only conversations use."""
    named = (data.prompt_field, data.response_field or "")
    reject(*lost_columns(row, named))
    cure = "write it into the prompt, or give messages in place of texts"
    reject(
        *(f"{key!r} is not read beside texts: {cure}" for key in (TOOLS, SYSTEM) if key not in named and row.get(key))
    )


def _conversation(
    data: SftData, messages: Sequence[Message], first: int, row: Mapping[str, Any], where: str
) -> Conversation:
    if not any(message["role"] == ASSISTANT and WEIGHT not in message for message in messages[first:]):
        raise DataError("no message of an assistant to train on: look at data.messages_field and data.response_field")
    fields = (data.prompt_field, data.response_field or "", data.messages_field or "")
    framed = with_columns(row, messages, fields)
    first += len(framed) - len(messages) if first else 0
    tools = without_nulls(row.get("tools"))
    tools = parsed(tools, "'tools' must be a list of JSON schemas, and is") if isinstance(tools, str) else tools
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise DataError(f"'tools' is a {type(tools).__name__}: give a list of JSON schemas")
    return Conversation(messages=framed, first=first, tools=tools or None, where=where)


def _rollout(group: str, tokens: np.ndarray, trained: np.ndarray, advantage: float | None = None) -> Rollout:
    cuts = np.flatnonzero(np.diff(trained)) + 1
    lengths = np.diff(np.concatenate([[0], cuts, [len(tokens)]]))
    authors = [(Author.POLICY, 0) if policy else (Author.ENVIRONMENT, NO_VERSION) for policy in trained[[0, *cuts]]]
    parts = [(int(length), author, version) for length, (author, version) in zip(lengths, authors, strict=True)]
    logprobs = np.zeros(len(tokens), np.float32)
    spans = spans_of(*parts)
    return Rollout(role="model", group=group, tokens=tokens, logprobs=logprobs, spans=spans, advantages=advantage)
