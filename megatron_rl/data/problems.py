"""Reads problems from files and Hugging Face data sets, or generates them.

A `PromptReader` returns the problems as a stream of prompts. The position in the stream is saved in checkpoints.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import logging
import math
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.base import refusing
from megatron_rl.config.data_settings import generated_name, resolve
from megatron_rl.config.schema import ConfigError, PromptSet
from megatron_rl.data.columns import SYSTEM, TOOLS, lost_columns
from megatron_rl.data.conversations import (
    ANSWER,
    MESSAGES,
    QUESTION,
    as_conversation,
    passed_on,
    prompt_fields,
    prompt_messages,
    with_columns,
)
from megatron_rl.data.rows import (
    BadRow,
    DataError,
    NotThere,
    not_json,
    reach,
    read_all,
    refuse,
    reject,
    rows_of,
    text_at,
)
from megatron_rl.texts.chat_template import SYSTEMS, ChatError, last_user, with_system
from megatron_rl.types import Prompt

MEASURED = 10_000  # maximum number of problems of a set whose prompt lengths are checked before a run
Fits = Callable[[Prompt], bool]  # whether a prompt may be used
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a data set.

    `row`: index among the rows that pass the filters. `values`: {field: value} with `question`, usually `answer`,
    `messages` if the prompt is a conversation, and the other fields in `data.fields`. The question of a
    conversation is its last user message.
    """

    row: int
    values: Mapping[str, Any]


def read_problems(source: PromptSet) -> list[Problem]:
    """Returns all usable rows of `source` as problems, in file order.

    Fields that data.fields does not set are found in the first row that passes the filters and has a prompt. Bad rows
    (not JSON, a missing field, an empty question, malformed messages, a value that JSON cannot represent) are skipped
    with a warning that names file and line. Raises DataError if more than max_bad_share of the rows that pass the
    filters are bad, or if no row passes, and ConfigError if the path contains no data.
    """
    source = resolve(source)
    refusal = f"data.answer_pattern = {source.answer_pattern!r} is not a regular expression"
    with refusing(lambda error: f"{refusal}: {error}", re.error):
        pattern = re.compile(source.answer_pattern) if source.answer_pattern else None
    fields: dict[str, str] = {}

    def read(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if not _passes(row, source):
            return None
        if not fields:
            fields.update(prompt_fields(source, row) or {})
            put_as_text = source.chat is False if MESSAGES in fields else not source.chat
            if source.system is not None and fields and put_as_text:  # plain texts have no system message
                raise ConfigError(
                    f"data.system = {source.system[:40]!r}, but the problems of {source.path} are put as texts: set "
                    "data.chat to true, or write it into the prompt template"
                )
        return _mapped(row, source, fields or {QUESTION: QUESTION}, pattern)

    return read_rows(source, read)


def fields_of(source: PromptSet) -> dict[str, str]:
    """Returns {field: key in the row} for the rows of a problem set, as `read_problems` uses it. Returns {} if no row
    has a prompt. Raises ConfigError if the path contains no data."""
    source = resolve(source)
    for _, row in _rows(source):
        if not isinstance(row, BadRow) and _passes(row, source) and (fields := prompt_fields(source, row)):
            return fields
    return {}


def columns_of(source: PromptSet, most: int) -> tuple[set[str], set[str]]:
    """Returns (columns that are passed to templates, rewards and environments under their own names, columns that
    nothing reads) of the first `most` rows of a problem set. The columns of `fields_of` are in neither set."""
    source = resolve(source)
    fields, passed, present = fields_of(source), set[str](), set[str]()
    for _, row in itertools.islice(_rows(source), most):
        if not isinstance(row, BadRow) and _passes(row, source):
            present |= {str(key) for key, value in row.items() if value is not None}
            passed |= passed_on(source, row, fields).keys()
    keys = [*fields.values(), *source.filters, *([SYSTEM] if MESSAGES in fields or source.chat else [])]
    read = {key.partition(".")[0] for key in keys}
    return passed - read, present - passed - read


def read_rows(source: PromptSet, read: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> list[Problem]:
    """Returns the rows of a problem set as problems, like `read_problems`, but with the values that `read` returns for
    each row.

    `read`: function that returns the values of a row, or None to skip the row, and raises DataError for a bad row. Of
    the settings in `source`, only path, generated, split, subset, file, limit and max_bad_share are used.
    """

    def checked(where: str, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        values = read(row)
        reject(*not_json(values or {}))
        return values

    indexed, bad, count = read_all(_rows(source), checked, limit=source.limit)
    if not (indexed or bad):
        raise DataError(
            f"none of the {count} rows of {source.path} passes the filters {source.filters}: look at data.filters and "
            "data.path"
        )
    refuse(bad, len(indexed) + len(bad), source.max_bad_share, source.path)
    return [Problem(index, values) for index, values in indexed]


def asked(values: Mapping[str, Any]) -> str:
    """Returns a text that identifies a problem's question and messages. Two problems have the same text if their
    questions and messages are equal."""
    return repr((values[QUESTION], values.get(MESSAGES)))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The settings with which a stage of the run takes prompts from a reader."""

    weights: Mapping[str, float] | None = None  # weights of the sources; None selects the weights that the reader has
    max_prompt_tokens: float = math.inf  # prompts longer than this, or than the reader's own maximum, are dropped


ANY = Draw()


class NothingLeft(DataError):
    """Raised when a curriculum skips all problems of the training data, or of one of its sources."""


def source_of(prompt: Prompt) -> str:
    """Returns the name of the source in the id of a PromptReader's prompt; "" if the run has one data set."""
    return prompt.id.rpartition("/")[0].rpartition("/")[0]


def place_of(prompt: Prompt) -> tuple[int, int | str]:
    """Returns (epoch, row) from the id of a PromptReader's prompt. The row is the index of the problem, or the text
    SOURCE/INDEX if the problem belongs to one of several sources. Raises DataError for any other id.
    """
    *source, epoch, row = prompt.id.rsplit("/", 2) if "/" in prompt.id else ("", "")
    if not (epoch.isdecimal() and row.isdecimal()):
        raise DataError(f"prompt {prompt.id!r} is not from a data set: its id is no epoch/row")
    return int(epoch), f"{source[0]}/{row}" if source else int(row)


class PromptReader:
    """An endless, deterministic stream of prompts over problems.

    Every epoch contains each problem once; with `shuffle`, every epoch has a different order. `encode` converts a
    problem's values to prompt tokens when the stream reaches the problem. Prompts with more than `max_prompt_tokens`
    are dropped and counted in `dropped`; a prompt is counted again in every epoch. The id of a prompt is `epoch/row`,
    or `source/epoch/row` with the name of a `source`. `state_dict()` is the position in the stream. Methods that return
    prompts raise DataError if the chat template cannot render a conversation.
    """

    def __init__(
        self, problems: Sequence[Problem], encode: Callable[[Mapping[str, Any]], list[int]], *, seed: int | str,
        shuffle: bool, max_prompt_tokens: int, source: str = "",
    ) -> None:  # fmt: skip
        if not problems:
            raise DataError("the data set has no problems: look at data.path and data.filters")
        self._problems, self._encode = list(problems), encode
        self._seed, self._shuffle, self._max = seed, shuffle, max_prompt_tokens
        self._prefix = f"{source}/" if source else ""
        self._epoch, self._position, self.dropped = 0, 0, 0
        self._order = self._order_of(0)

    def refuse_long(self, setting: str, max_bad_share: float, where: str) -> None:
        """Logs a warning if problems have prompts longer than `max_prompt_tokens`, which the stream drops. Raises
        DataError if their fraction is above `max_bad_share`.

        `setting`: name of the setting that determines max_prompt_tokens, for the message. `where`: name of the data
        set, for the message.
        """
        long = [
            BadRow(f"problem {row}", f"its prompt has {tokens} tokens: raise {setting} = {self._max}")
            for row, tokens in self.lengths
            if tokens > self._max
        ]
        refuse(long, len(self.lengths), max_bad_share, where)

    def first(self, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of the stream. The position of this reader is not changed."""
        reader = copy.copy(self)
        reader._epoch, reader._position, reader._order = 0, 0, self._order_of(0)
        return reader.take(count)

    def beside(self, name: object, taken: Collection[Prompt], state: Mapping[str, Any]) -> PromptReader:
        """Returns a second reader over the same problems in another random order. The order depends only on this
        reader's seed and on `name`. The second reader begins in the epoch that `state` contains, and in this epoch it
        skips the problems of `taken`.

        `taken`: prompts that `self` returned earlier. `state`: what `self.state_dict()` returned after these prompts.
        `self` may have advanced since then: its position is neither used nor changed.
        """
        reader = copy.copy(self)
        reader._seed, reader._shuffle, reader.dropped = f"{self._seed}/{name}", True, 0
        rows = {int(prompt.id.rpartition("/")[2]) for prompt in taken}
        reader._epoch, reader._position = state["epoch"], 0
        reader._order = [i for i in reader._order_of(reader._epoch) if self._problems[i].row not in rows]
        return reader

    def once(self, count: int | None = None) -> list[Prompt]:
        """Returns the first `count` prompts of the first epoch, without prompts that are too long. Returns all prompts
        of the epoch if `count` is None or if the epoch has fewer prompts.
        """
        problems = (self._problems[i] for i in self._order_of(0))
        kept = (p for p in ((problem, self._tokens(problem)) for problem in problems) if len(p[1]) <= self._max)
        return [
            Prompt(id=f"{self._prefix}0/{problem.row}", tokens=tokens, payload=problem.values)
            for problem, tokens in itertools.islice(kept, count)
        ]

    def take(self, count: int, fits: Fits = lambda prompt: True, draw: Draw = ANY) -> list[Prompt]:
        """Returns the next `count` prompts of the stream for which `fits` returns True, and skips the other prompts.
        Raises DataError if all prompts of an epoch are too long. `draw.weights` has no effect, because a PromptReader
        has only one source.
        """
        prompts: list[Prompt] = []
        misses, longest = 0, min(self._max, draw.max_prompt_tokens)
        while len(prompts) < count:
            problem = self._next()
            tokens = self._tokens(problem)
            if len(tokens) > longest:
                self.dropped, misses = self.dropped + 1, misses + 1
                # 2 N - 1 consecutive prompts of a stream over N problems include a whole epoch
                if misses >= 2 * len(self._problems) - 1:
                    raise DataError(
                        f"every prompt is longer than max_prompt_tokens = {longest}, e.g. {len(tokens)}: raise it"
                    )
                continue
            misses = 0
            prompt = Prompt(id=f"{self._prefix}{self._epoch}/{problem.row}", tokens=tokens, payload=problem.values)
            prompts += [prompt] if fits(prompt) else []
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream as a dict of numbers and texts."""
        return {"epoch": self._epoch, "position": self._position, "dropped": self.dropped, "order": self._told_order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved position. If the data, seed or shuffle have changed, continues at the beginning of the next
        epoch. For an empty position, begins with the first epoch. Whether a run may continue with changed data is
        decided before this call, in run/input_digests.py."""
        self._epoch, self._position = state.get("epoch", -1), state.get("position", 0)
        self.dropped = state.get("dropped", 0)
        if state.get("order") != self._told_order:
            self._epoch, self._position = self._epoch + 1, 0
            _log.warning("the data, run.seed or data.shuffle have changed: epoch %d begins with them", self._epoch)
        self._order = self._order_of(self._epoch)

    def _tokens(self, problem: Problem) -> list[int]:
        try:
            return self._encode(problem.values)
        except ChatError as error:
            raise DataError(f"problem {problem.row}: {error}") from error

    def _next(self) -> Problem:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        self._position += 1
        return self._problems[self._order[self._position - 1]]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    @functools.cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Returns (row, number of prompt tokens) of at most MEASURED problems, which are evenly spaced in the data."""
        chosen = self._problems[:: -(-len(self._problems) // MEASURED)]
        return [(problem.row, len(self._tokens(problem))) for problem in chosen]

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest prompt among `lengths`."""
        return max(tokens for _, tokens in self.lengths)

    @property
    def questions(self) -> list[str]:
        """Returns, for each problem, the text that identifies the problem's question and messages (see `asked`)."""
        return [asked(problem.values) for problem in self._problems]

    @functools.cached_property
    def told(self) -> dict[str, Any]:
        """Returns a record of the data: {"rows": number of problems, "sha256": digest of the values of all
        problems}."""
        digest = hashlib.sha256()
        for problem in self._problems:
            digest.update(json.dumps(dict(problem.values), sort_keys=True, default=str).encode())
        return {"rows": len(self._problems), "sha256": digest.hexdigest()}

    @property
    def _told_order(self) -> str:
        return f"{self.told['sha256']} {self._seed} {self._shuffle}"


def _rows(source: PromptSet) -> Iterator[tuple[str, Any]]:
    """Yields (location, row) of a problem set: the rows of `generated_rows` for a path `reasoning_gym:NAME`, otherwise
    the rows of `rows_of`."""
    if generated_name(source.path) is None:
        return rows_of(source.path, source.split, source.subset, source.file)
    from megatron_rl.data.generated import generated_rows  # imported here because reasoning-gym is optional

    return generated_rows(source)


def _passes(row: Mapping[str, Any], source: PromptSet) -> bool:
    return all(reach(row, key) == value for key, value in source.filters.items())


def _mapped(
    row: Mapping[str, Any], source: PromptSet, fields: Mapping[str, str], pattern: re.Pattern[str] | None
) -> dict[str, Any]:
    """Returns {field: value} of a row. Raises DataError if a field is missing or invalid."""
    values = {name: reach(row, key) for name, key in fields.items()}
    missing = [f"{name} (from {fields[name]!r})" for name, value in values.items() if isinstance(value, NotThere)]
    if missing:
        has = ", ".join(map(str, row))
        raise DataError(f"no {', '.join(missing)}; the row has {has}: name keys by the setting fields of this data")
    values = passed_on(source, row, fields) | {name: value for name, value in values.items() if name != MESSAGES}
    values |= _asked(row, source, fields)
    return values | ({ANSWER: _answer(row, source, fields[ANSWER], pattern)} if ANSWER in fields else {})


def _asked(row: Mapping[str, Any], source: PromptSet, fields: Mapping[str, str]) -> dict[str, Any]:
    """Returns {"question": text}, with the key `messages` as well if the prompt is a conversation. Raises DataError if
    the question or the messages are invalid."""
    named = source.fields.values()
    if row.get(TOOLS) and TOOLS not in named:
        raise DataError(
            f"{TOOLS!r} is not read: prompts are put without tools, which an environment gives; leave the column out"
        )
    if MESSAGES not in fields:
        question = _shortened(text_at(row, QUESTION, fields[QUESTION]), source)
        if not source.chat:
            reject(*lost_columns(row, named))
            return {QUESTION: question}
        messages = with_columns(row, as_conversation(question, None), named)
        return {QUESTION: question, MESSAGES: with_system(messages, source.system)}
    key = fields[MESSAGES]
    continued = key == "prompt" or MESSAGES in source.fields
    messages = prompt_messages(row, reach(row, key), key, continued=continued, system=source.system, named=named)
    place = last_user(messages)
    question = _shortened(messages[place]["content"], source)
    messages[place] = {**messages[place], "content": question}
    if source.chat is False:
        if len(messages) > place + 1 or any(m["role"] not in SYSTEMS for m in messages[:place]):
            raise DataError(f"{key!r} has more turns than a user's, which data.chat = false would drop: set it to null")
        return {QUESTION: question}
    return {QUESTION: question, MESSAGES: messages}


def _shortened(question: str, source: PromptSet) -> str:
    if source.remove_suffix:
        question = question.removesuffix(source.remove_suffix)
    if not question.strip():
        raise DataError("the question is empty without data.remove_suffix")
    return question


def _answer(row: Mapping[str, Any], source: PromptSet, key: str, pattern: re.Pattern[str] | None) -> str:
    answer, why = text_at(row, ANSWER, key, numbers=True), "is empty"
    if pattern is not None:
        why = f"{answer[-60:]!r} does not match data.answer_pattern = {source.answer_pattern!r}, or is empty"
        matches = list(pattern.finditer(answer))
        answer = (matches[-1].group(1 if pattern.groups else 0) or "") if matches else ""
    if source.answer_commas is False:
        answer = answer.replace(",", "")
    if not answer.strip():
        raise DataError(f"the answer {why}")
    return answer
