"""Reads conversations from rows in the formats of TRL, verl and ShareGPT, and finds the prompt of a row."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config.schema import PromptSet
from megatron_rl.data.columns import SYSTEM, lost_columns
from megatron_rl.data.rows import DataError, NotThere, encodable, not_json, reach, reject
from megatron_rl.texts.chat_template import (
    ASSISTANT,
    SYSTEMS,
    TOOL,
    USER,
    WEIGHT,
    Message,
    last_user,
    system_of,
    with_system,
)
from megatron_rl.types import AGENT, EPISODE, SOURCE, TEMPLATE, WRITTEN_BY

MESSAGES, QUESTION, ANSWER = "messages", "question", "answer"  # names of the fields of a problem
ROLES = (*SYSTEMS, USER, ASSISTANT, TOOL)
CONVERSATIONS = (MESSAGES, "conversations")  # keys of a whole conversation in a row
_PROMPT = "prompt"
# Keys of the reference answer in a row; the first key that exists is used
_ANSWERS = (ANSWER, "reward_model.ground_truth", "ground_truth")
_OF_VERL = ("data_source", "extra_info")  # verl's columns for the reward function
# Names of values that the run itself adds to a problem or an answer; columns with these names are not passed on
_OF_RUN = (SOURCE, TEMPLATE, AGENT, EPISODE, WRITTEN_BY, "correct", "grading", "review", "verdicts")
# Names of columns that built-in reward functions read. Such a column is passed on only if data.fields names it.
_OF_REWARDS = ("answers",)
# Keys of a message that determine whether its turn is trained: the keys of OpenAI, axolotl and ms-swift, in this order.
_TRAINED = (WEIGHT, "train", "loss")
_SHAREGPT = {"human": USER, "gpt": ASSISTANT, "function_response": TOOL}


def prompt_fields(source: PromptSet, row: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns {field: key in the row}: `source.fields`, completed by the keys that are found in the row.

    `source`: the problem set, after `data_settings.resolve`. The prompt is the first of the following that the row has:
    a conversation in `prompt` (TRL, verl), a text in `question`, a text in `prompt`, a conversation in `messages` or
    `conversations`. The answer is read from the first key of _ANSWERS that the row has; without such a key, the result
    has no answer field. Returns None if the row has no prompt.
    """
    fields = dict(source.fields)
    if MESSAGES not in fields and QUESTION not in fields:
        if is_conversation(row.get(_PROMPT)):
            fields[MESSAGES] = _PROMPT
        elif texts := [key for key in (QUESTION, _PROMPT) if isinstance(row.get(key), str)]:
            fields[QUESTION] = texts[0]
        elif lists := [key for key in (_PROMPT, *CONVERSATIONS) if isinstance(row.get(key), list) and row[key]]:
            fields[MESSAGES] = lists[0]  # the value may be malformed; `read_messages` then reports the error
        else:
            return None
    if MESSAGES in fields:
        # Ready-made settings (data.settings) may name a column for QUESTION. It is not used here, because the question
        # of a conversation is its last user message.
        fields.pop(QUESTION, None)
    if ANSWER not in fields:
        answer_keys = [key for key in _ANSWERS if not isinstance(reach(row, key), NotThere)]
        fields |= {ANSWER: answer_keys[0]} if answer_keys else {}
    return fields


def passed_on(source: PromptSet, row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Returns the columns that prompt templates, reward functions and environments get in addition to `fields`.

    These are the columns of the row that are not in `fields`. Conversations, nulls, values that JSON cannot represent,
    and columns whose names the run or a built-in reward function uses are left out. The columns in _OF_VERL are never
    left out. Returns {} if the setting data.settings selects ready-made settings for the data set."""
    if source.settings is not None:
        return {}
    left_out = {*fields, *fields.values(), *_OF_RUN, *_OF_REWARDS}
    return {
        key: value
        for key, value in row.items()
        if key in _OF_VERL or not (key in left_out or value is None or is_conversation(value) or [*not_json(value)])
    }


def is_conversation(value: Any) -> bool:
    """Returns whether a value looks like a list of messages: its first item has role and content, or from and value."""
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(first, Mapping) and ({"role", "content"} <= set(first) or {"from", "value"} <= set(first))


def read_messages(value: Any, key: str) -> list[Message]:
    """Returns a row's messages as mappings with `role` and `content` (a text). `key`: the key of the messages in the
    row.

    ShareGPT's `from` and `value` are converted to `role` and `content`. Null entries, which Parquet adds, are removed.
    Raises DataError if a message is malformed.
    """
    if not isinstance(value, (list, tuple)) or not value:
        shown = "not there" if isinstance(value, NotThere) else f"{_shown(value)}, not a list of messages"
        raise DataError(f"{key!r} is {shown}: name a conversation by data.fields")
    return [_message(message, f"{key}.{place}") for place, message in enumerate(value)]


def without_nulls(value: Any) -> Any:
    """Returns a value of a row without null entries in its mappings, which Parquet adds."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [without_nulls(entry) for entry in value]
    return value


def with_columns(row: Mapping[str, Any], messages: Sequence[Message], named: Collection[str] = ()) -> list[Message]:
    """Returns a row's conversation with the text of its column `system`, if any, as the system message. `named`: the
    keys that the settings of the data name.

    Raises DataError if the conversation has a different system message, or the row has columns with content that would
    be lost (see `lost_columns`).
    """
    reject(*lost_columns(row, named))
    system = row.get(SYSTEM)
    if not isinstance(system, str) or not system.strip():
        return [*messages]
    if system_of(messages) not in (None, system):
        raise DataError(f"{SYSTEM!r} and the first message are two system messages: leave one of them out")
    return with_system(messages, system)


def prompt_messages(
    row: Mapping[str, Any], value: Any, key: str, *, continued: bool, system: str | None, named: Collection[str]
) -> list[Message]:
    """Returns the messages of a row's prompt, with the system message `system` if the messages contain none.

    `value`, `key`: the messages in the row and their key. `continued`: whether the last message may be an assistant's,
    which the model then continues. `named`: the keys that the settings name. Raises DataError if a message is
    malformed, if the row has unsupported columns or a second system message, and if the conversation does not end with
    a message that a model can answer.
    """
    read = [{name: field for name, field in message.items() if name != WEIGHT} for message in read_messages(value, key)]
    messages = with_columns(row, read, named)
    reject(*_faults_of_prompt(messages, key, continued))
    return with_system(messages, system)


def _faults_of_prompt(messages: Sequence[Message], key: str, continued: bool) -> Iterator[str]:
    """Yields an error message if a conversation does not end with a message that a model can answer."""
    last = messages[-1]["role"]
    if last not in (USER, TOOL, ASSISTANT):
        yield f"the last message of {key!r} is a {last}'s: a prompt ends with a user's or a tool's message"
    elif last == ASSISTANT and not continued:
        yield (
            f"{key!r} ends with an assistant's turn: cut it off, or set data.fields={{{MESSAGES}: {key}}} to have the "
            "model go on with it"
        )
    elif USER not in (message["role"] for message in messages):
        yield f"{key!r}: the conversation has no user's message"
    elif not str(messages[place := last_user(messages)].get("content", "")).strip():
        yield f"the content of {key}.{place}, the last user's message, is empty"


def as_conversation(question: str, system: str | None) -> list[Message]:
    """Returns a question as a conversation: the system message `system`, if given, and a user message."""
    return with_system([{"role": USER, "content": question}], system)


def shape_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the roles of a problem's messages. The roles mostly determine whether a chat template can render a
    conversation, so one conversation of each shape is enough for a check."""
    return tuple(message["role"] for message in values.get(MESSAGES, ()))


def _message(message_value: Any, key: str) -> Message:
    if not isinstance(message_value, Mapping):
        raise DataError(f"{key} is {_shown(message_value)}, not a message with role and content")
    message = without_nulls(message_value)
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {"role": _SHAREGPT.get(role, role), "content": message.pop("value", None), **message}
    content = message.get("content")
    text = {} if content is None else {"content": _text_of(content, f"{key}.content")}
    reject(*_faults({**message, **text}, key))
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"{key}.tool_calls")
    flags = [message.pop(name) for name in _TRAINED if name in message]
    return {**message, **text} | ({WEIGHT: 0} if flags and not all(flags) else {})


def _faults(message: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yields an error message for each invalid value in a message, after its content has been converted to a text.
    `key`: location of the message in the row."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        yield f"{key}.role is {role!r}: give one of {', '.join(ROLES)}"
    if content is None and not calls:
        yield f"{key} has no content; it has {', '.join(str(name) for name in message if name != 'content')}"
    if role == ASSISTANT and not (content or "").strip() and not calls:
        yield f"{key}.content is empty: an assistant's turn without words is nothing to learn; leave it out"
    for name in _TRAINED:
        value = message.get(name, 0)
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            yield f"{key}.{name} is {_shown(value)}: a turn is trained on (1, true) or not (0, false)"
        elif value and role != ASSISTANT:
            yield f"{key}.{name} is {value!r}, and turns of assistants alone are trained on: leave it out"


def _calls(calls: Any, key: str) -> list[dict[str, Any]]:
    """Returns the tool calls of a message. Arguments that are JSON text, as in OpenAI's format, are parsed. Raises
    DataError for a malformed call."""
    if not isinstance(calls, list) or any(not isinstance(call, Mapping) for call in calls):
        raise DataError(f"{key} is {_shown(calls)}, not a list of calls of tools")
    parsed_calls = []
    for place, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{key}.{place} is no call of a tool: give a name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = parsed(arguments or "{}", f"{key}.{place}: the arguments {arguments[:60]!r} are")
        if not isinstance(arguments, Mapping):
            raise DataError(f"{key}.{place}: the arguments {_shown(arguments)} are no JSON object")
        parsed_function = {**function, "arguments": arguments}
        parsed_calls.append({**call, "function": parsed_function} if "function" in call else parsed_function)
    return parsed_calls


def parsed(text: str, what: str) -> Any:
    """Parses a JSON text. Raises DataError if the text is not JSON. `what`: subject and verb of the error message, for
    example "'tools' is"."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} not JSON ({error})") from error


def _text_of(content: Any, key: str) -> str:
    """Returns a message's content as a text. The text parts of a list, as in OpenAI's format, are joined. Raises
    DataError for content that is not text."""
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(content, str):
        raise DataError(f"{key} is {_shown(content)}, not text: only texts can be put to these models")
    return encodable(content, key)


def _shown(value: Any) -> str:
    if isinstance(value, (str, int, float, type(None))):
        return f"{value!r:.60}"
    return f"an empty {type(value).__name__}" if value in ([], {}) else f"a {type(value).__name__}"
