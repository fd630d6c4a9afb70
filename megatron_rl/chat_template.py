"""Renders conversations with a tokenizer's chat template, and finds the tokens that an assistant wrote in them.

A message is a mapping with a role and a content, as transformers, TRL and verl have it. A rendered conversation is
tokenised without the special tokens that a tokenizer puts around a text: the template has written them already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_rl.config.base import ConfigError
from megatron_rl.config.model import Model
from megatron_rl.text import fill, load_tokenizer
from megatron_rl.vocabulary import Vocabulary, check_vocabularies, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
# A key of a message beside role and content: [[start, end], ...] of those stretches of the content that another one
# than its author wrote, see `environments.episode_types.quoting`.
QUOTED = "quoted"
# A key of a message beside role and content: 0 where an assistant's turn is not trained on. Left out otherwise.
WEIGHT = "weight"
SYSTEMS = (SYSTEM, "developer")  # roles of a conversation's first message that instructs the model
# Keys of a message that a chat template may leave out: what it does not write says nothing to the model.
_UNWRITTEN = {"role", "content", "tool_call_id", "id"}
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(ValueError):
    """A conversation that the chat template cannot render, or in which the assistant's tokens cannot be told."""


class UserText(str):
    """The text of a user's message, with the messages before and after it. It is a prompt for a chat template."""

    before: tuple[Message, ...]
    after: tuple[Message, ...]

    def __new__(cls, text: str, before: Sequence[Message] = (), after: Sequence[Message] = ()) -> Self:
        made = super().__new__(cls, text)
        made.before, made.after = tuple(before), tuple(after)
        return made

    @classmethod
    def within(cls, messages: Sequence[Message], text: str) -> Self:
        """Makes `text` the last user's message of a conversation that has one."""
        place = last_user(messages)
        return cls(text, messages[:place], messages[place + 1 :])

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [*self.before, {"role": USER, "content": str(self)}, *self.after]


class ChatTokenizer:
    """A tokenizer for which `tokenize` renders every prompt as a user message of the chat template. In all other
    respects it behaves like the tokenizer that it wraps."""

    def __init__(self, tokenizer: Any) -> None:
        self.plain = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.plain(*args, **settings)


def tokenizer_of(model: Model) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer, with the chat template that `model.chat_template` names in place of its own. Raises
    ConfigError for a file that cannot be read, and for a token in use that the model has no row for."""
    tokenizer = load_tokenizer(model.tokenizer or model.path)
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template = {model.chat_template!r} cannot be read ({error}): give a file with a Jinja "
                "template, or null for the tokenizer's own"
            ) from error
    vocabulary_of(model, tokenizer)
    return tokenizer


def check_models(first: Model, second: Model, why: str) -> None:
    """Raises ConfigError for two models whose tokenizers give an id different tokens, where both are directories here.
    `why`: see `check_vocabularies`."""
    if all(Path(model.tokenizer or model.path).is_dir() for model in (first, second)):
        check_vocabularies(tokenizer_of(first), tokenizer_of(second), why)


def problem_text(template: str, values: Mapping[str, Any]) -> str:
    """Returns the prompt of a problem: its conversation where it has messages, in which the question is the last user's
    message; else the text of a template that its values fill."""
    if "messages" in values:
        return UserText.within(values["messages"], str(values["question"]))
    return fill(template, **{name: str(value) for name, value in values.items()})


def system_of(messages: Sequence[Message]) -> str | None:
    """Returns the text of a conversation's system message; None where it has none."""
    return str(messages[0].get("content", "")) if messages and messages[0]["role"] in SYSTEMS else None


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Returns a conversation with a system message in front, where one is given and it has none of its own."""
    if system is None or system_of(messages) is not None:
        return [*messages]
    return [{"role": SYSTEM, "content": system}, *messages]


def last_user(messages: Sequence[Message]) -> int:
    """Returns the place of the last user's message. Raises ChatError where there is none."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == USER:
            return place
    raise ChatError("the conversation has no user's message")


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a prompt text.

    Renders a user's message of a conversation (UserText) with the chat template, and every text for a ChatTokenizer,
    too: the template writes all special tokens. Any other text gets the special tokens that the tokenizer puts around a
    text (Llama's begin token). Raises what `prompt_ids` raises.
    """
    if isinstance(text, UserText):
        return prompt_ids(tokenizer, text.messages)
    if isinstance(tokenizer, ChatTokenizer):
        return prompt_ids(tokenizer, UserText(text).messages)
    return list(tokenizer(text)["input_ids"])


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Renders a conversation as a prompt -> its tokens. The template's header of an assistant's turn ends it; where the
    last turn is the assistant's, that turn stays open, and the model continues it (as in TRL).

    Raises ConfigError for a tokenizer without a chat template, ChatError for a conversation that it does not render, or
    of which it leaves something out.
    """
    continued = messages[-1]["role"] == ASSISTANT
    text = render(tokenizer, messages, header=not continued, continued=continued)
    _refuse_left_out(tokenizer, messages, None, text)
    return _ids(tokenizer, text)


def render(
    tokenizer: Any, messages: Sequence[Message], *, header: bool = False, continued: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:  # fmt: skip
    """Returns the text of a conversation. `header`: with the beginning of an assistant's turn behind it; `continued`:
    without the end of its last turn. Raises what `prompt_ids` raises."""
    settings = {"add_generation_prompt": header, "continue_final_message": continued, "tokenize": False}
    return _applied(tokenizer, messages, tools, settings)


def conversation_tokens(
    tokenizer: Any, messages: Sequence[Message], *, first: int = 0, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenises a whole conversation. -> [T] int32 tokens, [T] bool: True where an assistant's turn wrote the token;
    turns before message `first` count as the prompt's.

    What a turn wrote is what the template's {% generation %} marks hold, where it has them (transformers'
    return_assistant_tokens_mask). Without marks it is what stands behind the turn's header, up to the turn's end as
    the template writes it (TRL's rule for completions): the conversation before the turn, with the header, and the one
    up to its end are rendered by themselves, and their tokens must be the beginning of the whole conversation's.

    A turn whose message has WEIGHT is not trained on.

    Raises ConfigError for a tokenizer without a chat template; ChatError for a conversation that it does not render, or
    not so, or of which it leaves something out, and for one in which an assistant wrote nothing.
    """
    text = render(tokenizer, messages, tools=tools)
    _refuse_left_out(tokenizer, messages, tools, text)
    marked = _MARKS.search(_template(tokenizer, tools)) is not None
    if marked:
        settings = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = _applied(tokenizer, messages, tools, settings)
        tokens, written = np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)
        written[: _beginning(tokenizer, messages, tokens, first, tools)] = False
    else:
        tokens = np.array(_ids(tokenizer, text), np.int32)
        written = np.zeros(len(tokens), bool)
    for place in range(first, len(messages)):
        trained = messages[place]["role"] == ASSISTANT and WEIGHT not in messages[place]
        if messages[place]["role"] == ASSISTANT and trained != marked:
            start = _beginning(tokenizer, messages, tokens, place, tools, header=not marked)
            written[start : _beginning(tokenizer, messages, tokens, place + 1, tools)] = trained
    written[:1] = False  # nothing predicts the first token
    if not written.any():
        raise ChatError("an assistant wrote none of its tokens, so that there is nothing to train on")
    return tokens, written


def refuse_endless(vocabulary: Vocabulary, trained: np.ndarray) -> None:
    """Raises ChatError for the trained tokens [T] of a conversation of which none ends a text or is a special token: a
    model that learns from such conversations writes on behind its answer, where no engine can tell that it ended."""
    if vocabulary.ends and not np.isin(trained, [*vocabulary.ends, *vocabulary.special]).any():
        raise ChatError(
            "the chat template ends no assistant's turn with a token at which the model stops (ids "
            f"{', '.join(map(str, sorted(vocabulary.ends)))}), or another special token, so that the model would never "
            "learn to stop: give model.chat_template a template that writes {{ eos_token }} behind such turns, within "
            "{% generation %} marks where it has marks, or set data.append_eos to false where texts of the data end "
            "what it writes"
        )


def _refuse_left_out(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, text: str
) -> None:
    """Raises ChatError for what a chat template leaves out of the text that it makes of a conversation: a key of a
    message, its content, or the tools. What an assistant thought (up to </think>) may be left out."""
    template = _template(tokenizer, tools)
    cure = "take it out of the rows, or give model.chat_template a template that writes it"
    if tools and not _mentions(template, "tools"):
        raise ChatError(f"the chat template does not write 'tools': {cure}")
    for place, message in enumerate(messages):
        told = f"message {place + 1}, of role {message['role']}"
        unwritten = _UNWRITTEN | ({"name"} if message["role"] == TOOL else set())
        for key in sorted(message.keys() - unwritten - {WEIGHT}):
            if message[key] not in ("", [], {}) and not _mentions(template, key):
                raise ChatError(f"{told} has {key!r}, which the chat template does not write: {cure}")
        content = str(message.get("content", ""))
        wanted = (content.split("</think>")[-1] if message["role"] == ASSISTANT else content).strip()
        if not any(
            form in text for form in (wanted, json.dumps(wanted)[1:-1], json.dumps(wanted, ensure_ascii=False)[1:-1])
        ):
            raise ChatError(f"the chat template does not write the content of {told}: {cure}")


def _mentions(template: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def _beginning(
    tokenizer: Any, messages: Sequence[Message], tokens: np.ndarray, place: int,
    tools: Sequence[Mapping[str, Any]] | None, *, header: bool = False,
) -> int:  # fmt: skip
    """Returns the number of tokens of the messages before `place`. Raises ChatError when they are not the beginning of
    the whole conversation's."""
    if place == len(messages):
        return len(tokens)
    if place == 0 and not header:
        return 0
    if place == 0:
        raise ChatError(
            "it begins with an assistant's turn, whose header cannot be told from what the assistant wrote: give "
            "model.chat_template a template with {% generation %} marks"
        )
    part = _ids(tokenizer, render(tokenizer, messages[:place], header=header, tools=tools))
    if not np.array_equal(tokens[: len(part)], part):
        raise ChatError(
            f"the chat template renders its first {place} messages in another way when message {place + 1} follows, so "
            "that the assistant's tokens cannot be told: give model.chat_template a template with {% generation %} "
            "marks"
        )
    return len(part)


def _applied(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, settings: Mapping[str, Any]
) -> Any:
    from jinja2 import TemplateError  # only where a template is rendered

    _template(tokenizer, tools)
    try:
        shown = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
        return tokenizer.apply_chat_template(shown, tools=tools, **settings)
    except (TemplateError, ValueError, TypeError, KeyError) as error:  # a template raises what it likes
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ChatError(f"the chat template does not render messages of {roles}: {error}") from error


def _template(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(
            "the prompts are conversations, but the tokenizer has no chat template: name a Jinja file by "
            "model.chat_template, or set chat to false"
        )
    return str(tokenizer.get_chat_template(tools=tools))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
