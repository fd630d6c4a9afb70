"""Ways to put messages to a model, token for token: how a conversation opens, goes on, and is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_rl.chat import ASSISTANT, Message, render
from megatron_rl.config.schema import ConfigError
from megatron_rl.environments.moves import Call, Tool
from megatron_rl.text import decode

TEXT, CHAT = "text", "chat"  # kinds of dialogue; a third is RENDERERS with a name behind it
RENDERERS = "renderers:"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """An answer of a model, read."""

    text: str  # without special tokens, and without calls of tools where the template has a form for them
    calls: Sequence[Call]
    message: Message  # as the conversation's history has it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """A conversation up to a model's last answer."""

    prompt: np.ndarray  # [T] int32, all that stood before the answer
    answer: np.ndarray  # [T] int32
    history: Sequence[Message]  # with the answer's last
    tools: Sequence[Tool]


class Dialogue(Protocol):
    """Turns messages into tokens and answers into messages, for one tokenizer."""

    stop_tokens: tuple[int, ...]  # that end an answer, beside the model's own

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """Returns the tokens [T] int32 of a conversation, up to where the model speaks. Raises ChatError for one that
        cannot be rendered."""
        ...

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        """Returns the tokens [T] that stand between an answer and the next one: the end of the turn, and the new
        messages. None where the whole conversation would be rendered in another way than it stands: then it is opened
        anew."""
        ...

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        """Reads an answer [T]."""
        ...


def dialogue_of(kind: str, tokenizer: Any) -> Dialogue:
    """Returns the dialogue of a kind, see EpisodeSettings. Raises ConfigError for one that is not known or cannot be
    had."""
    if kind == TEXT:
        return TextDialogue(tokenizer)
    if kind == CHAT:
        return ChatDialogue(tokenizer)
    return RendererDialogue(tokenizer, _renderer_name(kind))


def check_dialogue(kind: str) -> None:
    """Raises ConfigError for a kind of dialogue that is not known or cannot be had."""
    if kind not in (TEXT, CHAT):
        _renderer_name(kind)


def _renderer_name(kind: str) -> str:
    """Returns NAME of the dialogue `renderers:NAME`. Raises ConfigError for another kind, an unknown name, and where
    the library is not installed."""
    name = kind.removeprefix(RENDERERS)
    if not kind.startswith(RENDERERS) or not name:
        raise ConfigError(f"dialogue = {kind!r}: give text, chat, or renderers:NAME with the name of a renderer")
    try:
        from renderers import config_from_name
    except ImportError as error:
        raise ConfigError(
            f"dialogue = {kind!r}: the package renderers is not installed; run `pip install megatron_rl[agents]`"
        ) from error
    try:
        config_from_name(name)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"dialogue = {kind!r}: the package renderers has no such renderer ({error})") from error
    return name


class TextDialogue:
    """Messages one behind the other as they are, for base models: what makes turns of them stands in the messages."""

    stop_tokens: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        return np.asarray(self._tokenizer(_joined(messages))["input_ids"], np.int32)

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        return _ids(self._tokenizer, _joined(new))

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        text = decode(self._tokenizer, answer).text
        return Reply(text=text, calls=(), message={"role": ASSISTANT, "content": text})


class ChatDialogue:
    """Messages in the tokenizer's chat template. It reads no calls of tools: those are texts like others.

    The tokens between two answers are the template's own: a conversation whose answer is a short stand-in is rendered
    up to the answer's end and up to the next answer, and the second text less the first is what comes between. The
    template must render the past alike in both, and the true answer as it stands, but for spaces around it.
    """

    stop_tokens: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        text = render(self._tokenizer, messages, header=True, tools=_specifications(tools) or None)
        return _ids(self._tokenizer, text)

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        offered = _specifications(past.tools) or None
        *earlier, said = past.history
        before = render(self._tokenizer, earlier, header=True, tools=offered)
        held = before + _STAND_IN
        short = [*earlier, {"role": ASSISTANT, "content": _STAND_IN}]
        ended = render(self._tokenizer, short, tools=offered)
        following = render(self._tokenizer, [*short, *new], header=True, tools=offered)
        whole = render(self._tokenizer, [*past.history, *new], header=True, tools=offered)
        shown = whole.removeprefix(before).lstrip()
        if not (ended.startswith(held) and following.startswith(ended) and whole.startswith(before)):
            return None
        if not shown.startswith(str(said["content"]).strip()):
            return None
        between = following[len(held) :]
        for token in past.answer[-1:].tolist():  # the model may have written the end of its turn
            between = between.removeprefix(self._tokenizer.decode([token]))
        return _ids(self._tokenizer, between)

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        text = decode(self._tokenizer, answer).text
        return Reply(text=text, calls=(), message={"role": ASSISTANT, "content": text})


class RendererDialogue:
    """Messages as a renderer of the library `renderers` writes them, which also reads calls of tools."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        from renderers import config_from_name, create_renderer

        self._tokenizer = tokenizer
        settings: Any = config_from_name(name)
        self._renderer: Any = create_renderer(tokenizer, settings)
        self.stop_tokens = tuple(self._renderer.get_stop_token_ids())

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        rendered = self._renderer.render_ids(
            [dict(message) for message in messages], tools=_tools(tools), add_generation_prompt=True
        )
        return np.asarray(rendered, np.int32)

    def bridge(self, past: Exchange, new: Sequence[Message]) -> np.ndarray | None:
        prompt, answer = past.prompt.tolist(), past.answer.tolist()
        before = [*prompt, *answer]
        found = self._renderer.bridge_to_next_turn(
            prompt, answer, [dict(message) for message in new], tools=_tools(past.tools)
        )
        if found is None or list(found.token_ids[: len(before)]) != before:
            return None
        return np.asarray(found.token_ids[len(before) :], np.int32)

    def read(self, prompt: np.ndarray, answer: np.ndarray, tools: Sequence[Tool]) -> Reply:
        parsed = self._renderer.parse_response(answer.tolist(), tools=_tools(tools), prompt_ids=prompt.tolist())
        calls = [_call(found) for found in parsed.tool_calls]
        message: dict[str, Any] = {"role": ASSISTANT, "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if written := [_written(call) for call in calls if call.arguments is not None]:
            message["tool_calls"] = written
        return Reply(text=parsed.content, calls=calls, message=message)


_STAND_IN = "0"


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)


def _ids(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    own = ("name", "description", "parameters")
    return [{key: getattr(tool, key) for key in own} for tool in tools] or None


def _specifications(tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """Describes tools as chat templates take them (OpenAI's form)."""
    return [{"type": "function", "function": tool} for tool in _tools(tools) or ()]


def _call(parsed: Any) -> Call:
    readable = parsed.status.value == "ok" and isinstance(parsed.arguments, dict)
    return Call(name=parsed.name or "", arguments=parsed.arguments if readable else None, id=parsed.id)


def _written(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments or {})}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
