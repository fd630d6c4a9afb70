"""Converts chat messages into tokens, and the tokens of a model's answer into a message."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.config.schema import ConfigError
from megatron_rl.environments.episode_types import Call, Tool
from megatron_rl.texts.chat_template import ASSISTANT, QUOTED, USER, ChatError, Message, render
from megatron_rl.texts.control_tokens import ControlTokens
from megatron_rl.texts.response_forms import check_form, read_response
from megatron_rl.texts.text import decode

TEXT, CHAT = "text", "chat"  # names of two kinds of dialogue; the third kind is `renderers:NAME`
RENDERERS = "renderers:"
THOUGHT_KEYS = ("reasoning_content", "thinking")  # keys of a message by which chat templates read a thought
# Exceptions that a chat template or a renderer raises if it cannot process a message or an answer.
# A `try` block that catches these exceptions must not call an engine, because an engine's exceptions must propagate.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, NotImplementedError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """A parsed answer of a model."""

    text: str  # the text without special tokens, and without tool calls if the dialogue parses tool calls
    calls: Sequence[Call]
    message: Message  # the answer as a message for the conversation's history


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """A conversation up to and including the last answer of a model."""

    prompt: np.ndarray  # [T] int32, all tokens before the answer
    answer: np.ndarray  # [T] int32
    history: Sequence[Message]  # all messages; the last one is the answer
    tools: Sequence[Tool]


class Dialogue(ABC):
    """A converter between chat messages and tokens, for one tokenizer. By default, tool calls in an answer are not
    parsed and stay in the answer's text."""

    stop_tokens: tuple[int, ...] = ()  # tokens that end an answer, in addition to the model's end tokens

    def __init__(self, tokenizer: Any, frame: str = "") -> None:
        """`frame`: a rendered example conversation, from which the chat template's control tokens are found."""
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, frame)

    @abstractmethod
    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """Returns the tokens [T] int32 of a conversation, up to the beginning of the model's answer.

        Raises ChatError if the conversation cannot be rendered.
        """
        ...

    @abstractmethod
    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        """Returns the tokens [T] between the last answer and the model's next answer: the tokens that end the turn, and
        the new messages. `past`: the conversation up to the last answer. `new`: the messages since then.

        Returns None if rendering the conversation with the new messages would change tokens that exist already. The
        caller then calls `open` with the whole conversation.
        """
        ...

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        """Parses an answer of the model. `answer` [T]: the generated tokens. `prompt` [T]: all tokens before them."""
        content = decode(self._tokenizer, answer).text
        text = read_response(self._tokenizer, prompt, answer).text
        return Reply(text=text, calls=(), message={"role": ASSISTANT, "content": content})


def dialogue_of(kind: str, tokenizer: Any) -> Dialogue:
    """Returns a new Dialogue. `kind`: a value of the setting EpisodeSettings.dialogue. Raises ConfigError if this kind
    is not available, or if the kind is "chat" and the form of the model's thoughts is unknown."""
    if kind == TEXT:
        return TextDialogue(tokenizer)
    if kind == CHAT:
        check_form(tokenizer)
        return ChatDialogue(tokenizer)
    return RendererDialogue(tokenizer, _renderer_name(kind))


def check_dialogue(kind: str) -> None:
    """Raises ConfigError for an unknown or unavailable kind of dialogue."""
    if kind not in (TEXT, CHAT):
        _renderer_name(kind)


def _renderer_name(kind: str) -> str:
    """Returns NAME of the dialogue kind `renderers:NAME`.

    Raises ConfigError if `kind` has another form, if NAME is unknown, or if the library `renderers` is not installed.
    """
    name = kind.removeprefix(RENDERERS)
    if not kind.startswith(RENDERERS) or not name:
        raise ConfigError(f"dialogue = {kind!r}: give text, chat, or renderers:NAME with the name of a renderer")
    try:
        from renderers import config_from_name
    except ImportError as error:
        raise ConfigError(
            f"dialogue = {kind!r}: the package renderers is not installed; run `pip install -e '.[agents]'` in the "
            "checkout of this project"
        ) from error
    try:
        config_from_name(name)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"dialogue = {kind!r}: the package renderers has no such renderer ({error})") from error
    return name


class TextDialogue(Dialogue):
    """A dialogue that concatenates the texts of messages without any template, for base models.

    The texts themselves must mark where turns begin and end. Control tokens in a text are recognized, except in the
    quoted parts of messages made with `episode_types.quoting`.
    """

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        if tools:
            raise ChatError(
                f"it is offered tools, which the dialogue {TEXT!r} shows to no model: set recipe.args.dialogue to "
                f"{RENDERERS}NAME, or describe them in the message"
            )
        return np.asarray(self._tokenizer("".join(map(self._text, messages)))["input_ids"], np.int32)

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        return _ids(self._tokenizer, "".join(map(self._text, new)))

    def _text(self, message: Message) -> str:
        """Returns the text of a message. Raises ChatError if the content of the message is not a string."""
        text = message.get("content")
        if not isinstance(text, str):
            raise ChatError(f"the dialogue {TEXT!r} puts texts alone, and a message has the content {str(text)[:80]}")
        for start, end in sorted(message.get(QUOTED, ()), reverse=True):
            text = text[:start] + self._control.spell(text[start:end]) + text[end:]
        return text


class ChatDialogue(Dialogue):
    """A dialogue that renders messages with the tokenizer's chat template.

    To find the tokens between two answers, the conversation is rendered up to the beginning of the second answer, with
    a placeholder in place of the first answer. The text after the placeholder is the text between the answers. The
    template must render earlier messages identically before and after the new messages are added, and the model's
    answer unchanged except for surrounding whitespace; otherwise `bridge` returns None. Only the template can produce
    control tokens; the content of a message cannot.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, _frame(lambda messages: render(tokenizer, messages, header=True)))

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        spelled = [self._control.spell_message(message) for message in messages]
        text = render(self._tokenizer, spelled, header=True, tools=_specifications(tools) or None)
        return _ids(self._tokenizer, text)

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        offered = _specifications(past.tools) or None
        *earlier, answer = map(self._control.spell_message, past.history)
        new = [self._control.spell_message(message) for message in new]
        opening = render(self._tokenizer, earlier, header=True, tools=offered)
        held = opening + _STAND_IN
        short = [*earlier, {"role": ASSISTANT, "content": _STAND_IN}]
        ended = render(self._tokenizer, short, tools=offered)
        following = render(self._tokenizer, [*short, *new], header=True, tools=offered)
        full = render(self._tokenizer, [*earlier, answer, *new], header=True, tools=offered)
        shown = full.removeprefix(opening).lstrip()
        if not (ended.startswith(held) and following.startswith(ended) and full.startswith(opening)):
            return None
        if not shown.startswith(str(answer["content"]).strip()):
            return None
        between = following[len(held) :]
        for token in past.answer[-1:].tolist():  # the model may have generated the end-of-turn token itself
            between = between.removeprefix(self._tokenizer.decode([token]))
        return _ids(self._tokenizer, between)

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        """Parses an answer by the form of the model's responses. Tool calls are parsed if the form separates them by
        special tokens, as OpenAI's harmony format does. The thought then becomes a key of the message, by the name that
        the chat template reads, so that the template can render or drop it."""
        response = read_response(self._tokenizer, prompt, answer)
        if response.parts is None:
            text = decode(self._tokenizer, answer).text
            return Reply(text=response.text, calls=(), message={"role": ASSISTANT, "content": text})
        thought, content = response.parts
        message: dict[str, Any] = {"role": ASSISTANT, "content": content}
        template = str(self._tokenizer.chat_template)
        name = next((key for key in THOUGHT_KEYS if re.search(rf"\b{key}\b", template)), None)
        calls = [Call(name=tool, arguments=_object(text)) for tool, text in response.calls]
        if readable := [call for call in calls if call.arguments is not None]:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}
                for call in readable
            ]
        if thought and name is not None and not (readable and content):  # gpt-oss's template refuses all three
            message[name] = thought
        return Reply(text=response.text, calls=calls, message=message)


class RendererDialogue(Dialogue):
    """A dialogue that renders messages with a renderer of the library `renderers`, which also parses tool calls.

    The content of a message cannot produce control tokens.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        from renderers import config_from_name, create_renderer

        settings: Any = config_from_name(name)
        self._renderer: Any = create_renderer(tokenizer, settings)
        self.stop_tokens = tuple(self._renderer.get_stop_token_ids())
        super().__init__(tokenizer, _frame(lambda messages: tokenizer.decode(self._rendered(messages))))

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        return np.asarray(self._rendered(self._spelled(messages), tools), np.int32)

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        prompt, answer = past.prompt.tolist(), past.answer.tolist()
        tokens = [*prompt, *answer]
        bridged = self._renderer.bridge_to_next_turn(prompt, answer, self._spelled(new), tools=_tools(past.tools))
        if bridged is None or list(bridged.token_ids[: len(tokens)]) != tokens:
            return None
        return np.asarray(bridged.token_ids[len(tokens) :], np.int32)

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        try:
            parsed = self._renderer.parse_response(answer.tolist(), tools=_tools(tools), prompt_ids=prompt.tolist())
        except UNREADABLE:  # e.g. a tool call whose JSON has a number of 5,000 digits, or 2,000 nested brackets
            return super().read(prompt, answer, tools)
        calls = [_call(parsed_call) for parsed_call in parsed.tool_calls]
        message: dict[str, Any] = {"role": ASSISTANT, "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        for call in calls:
            if call.arguments is not None:
                function = {"name": call.name, "arguments": dict(call.arguments)}
                written = {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
                message.setdefault("tool_calls", []).append(written)
        return Reply(text=parsed.content, calls=calls, message=message)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Sequence[int]:
        shown = [dict(message) for message in messages]
        return self._renderer.render_ids(shown, tools=_tools(tools), add_generation_prompt=True)

    def _spelled(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._control.spell_message(message) for message in messages]


_STAND_IN = "0"


def _frame(render_text: Callable[[Sequence[Message]], str]) -> str:
    """Renders a short example conversation, which contains the chat template's control tokens. Returns "" if rendering
    fails."""
    try:
        return render_text([{"role": role, "content": _STAND_IN} for role in (USER, ASSISTANT, USER)])
    except UNREADABLE:
        return ""


def _ids(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    names = ("name", "description", "parameters")
    return [{key: getattr(tool, key) for key in names} for tool in tools] or None


def _specifications(tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """Returns the descriptions of tools in OpenAI's format, which chat templates expect."""
    return [{"type": "function", "function": tool} for tool in _tools(tools) or ()]


def _call(parsed: Any) -> Call:
    readable = parsed.status.value == "ok" and isinstance(parsed.arguments, dict)
    name = parsed.name if isinstance(parsed.name, str) else ""
    return Call(name=_written_out(name), arguments=_written_out(parsed.arguments) if readable else None, id=parsed.id)


def _object(text: str) -> Mapping[str, Any] | None:
    """Returns the JSON object in a text, or None if the text is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _written_out(value) if isinstance(value, dict) else None


def _written_out(value: Any) -> Any:
    r"""Returns a JSON value with lone surrogates such as "\ud800" replaced. Tokenizers and UTF-8 files reject lone
    surrogates."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_written_out(name): _written_out(member) for name, member in value.items()}
    return [_written_out(entry) for entry in value] if isinstance(value, list) else value
