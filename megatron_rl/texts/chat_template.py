"""Renders conversations with a tokenizer's chat template, and finds the tokens of the assistant's turns.

A message is a mapping with a role and a content, as in transformers, TRL and verl. A rendered conversation is tokenized
without the tokenizer's additional special tokens, because the template already contains them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.config.model import Model
from megatron_rl.texts.response_forms import MARKS, ResponseForm, form_of
from megatron_rl.texts.text import fill, load_tokenizer
from megatron_rl.texts.vocabulary import Vocabulary, check_vocabularies, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
# Additional key of a message. The value lists the character ranges [[start, end], ...] of the message's content that
# were not written by the message's author, see `environments.episode_types.quoting`.
QUOTED = "quoted"
# Additional key of an assistant message. The value 0 excludes the turn from training; other turns lack the key.
WEIGHT = "weight"
SYSTEMS = (SYSTEM, "developer")  # possible roles of a system message, which is the first message of a conversation
# Message keys that a chat template may ignore, because they carry no content for the model.
_UNWRITTEN = {"role", "content", "tool_call_id", "id"}
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(ValueError):
    """Raised for a conversation that the chat template cannot render, or whose assistant tokens cannot be
    determined.
    """


class UserText(str):
    """A subclass of str whose value is the text of a user message. The attributes `preceding` and `following` hold the
    messages before and after the user message. `tokenize` renders the whole conversation with the chat template.
    """

    preceding: tuple[Message, ...]
    following: tuple[Message, ...]

    def __new__(cls, text: str, preceding: Sequence[Message] = (), following: Sequence[Message] = ()) -> Self:
        user_text = super().__new__(cls, text)
        user_text.preceding, user_text.following = tuple(preceding), tuple(following)
        return user_text

    @classmethod
    def within(cls, messages: Sequence[Message], text: str) -> Self:
        """Returns a UserText in which `text` replaces the last user message of a conversation. Raises ChatError if the
        conversation has no user message.
        """
        place = last_user(messages)
        return cls(text, messages[:place], messages[place + 1 :])

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, including the user message."""
        return [*self.preceding, {"role": USER, "content": str(self)}, *self.following]


class ChatTokenizer:
    """A wrapper of a tokenizer for which `tokenize` renders every prompt as a user message of the chat template. In all
    other respects it behaves like the wrapped tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.plain = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.plain(*args, **settings)


def tokenizer_of(model: Model) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer. The file `model.chat_template`, if set, replaces the tokenizer's chat template. Raises
    ConfigError if the file cannot be read, or if the model has no embedding row for a token in use.
    """
    tokenizer = load_tokenizer(model.tokenizer or model.path)
    if model.chat_template is not None:
        unreadable = f"model.chat_template = {model.chat_template!r} cannot be read"
        cure = "give a file with a Jinja template, or null for the tokenizer's own"
        with refusing(lambda error: f"{unreadable} ({error}): {cure}", OSError, UnicodeDecodeError):
            tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
    if model.thought_marks is not None:
        tokenizer.init_kwargs[MARKS] = list(model.thought_marks)
    vocabulary_of(model, tokenizer)
    return tokenizer


def check_models(first: Model, second: Model, why: str) -> None:
    """Raises ConfigError if the tokenizers of two models have different tokens for the same id. Checks nothing unless
    both models are in local directories. `why`: the beginning of the error message, see `check_vocabularies`.
    """
    if all(Path(model.tokenizer or model.path).is_dir() for model in (first, second)):
        check_vocabularies(tokenizer_of(first), tokenizer_of(second), why)


def problem_text(template: str, values: Mapping[str, Any]) -> str:
    """Returns the prompt of a problem. If the problem has messages, returns the conversation with the question as its
    last user message. Otherwise returns the template filled with the problem's values.
    """
    if "messages" in values:
        return UserText.within(values["messages"], str(values["question"]))
    return fill(template, **{name: str(value) for name, value in values.items()})


def system_of(messages: Sequence[Message]) -> str | None:
    """Returns the text of a conversation's system message, or None if there is none."""
    return str(messages[0].get("content", "")) if messages and messages[0]["role"] in SYSTEMS else None


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Returns a conversation that begins with the system message `system`. Returns the conversation unchanged if
    `system` is None or the conversation has a system message already.
    """
    if system is None or system_of(messages) is not None:
        return [*messages]
    return [{"role": SYSTEM, "content": system}, *messages]


def last_user(messages: Sequence[Message]) -> int:
    """Returns the index of the last user message of a conversation. Raises ChatError if there is no user message."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == USER:
            return place
    raise ChatError("the conversation has no user's message")


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a prompt text.

    A UserText is rendered with the chat template, which writes all special tokens. If the tokenizer is a ChatTokenizer,
    every text is rendered in this way. Otherwise a plain string is tokenized with the tokenizer's additional special
    tokens (such as Llama's begin token). Raises the errors of `prompt_ids`.
    """
    if isinstance(text, UserText):
        return prompt_ids(tokenizer, text.messages)
    if isinstance(tokenizer, ChatTokenizer):
        return prompt_ids(tokenizer, UserText(text).messages)
    ids, begin = list(tokenizer(text)["input_ids"]), tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids  # the text has a begin token already


def without_end(tokenizer: Any, text: str) -> str:
    """Returns a response without the special tokens and spaces at its end if the response ends with a special token,
    such as `2</s>`. The end of a response is then written once, by the chat template or after the text. Returns other
    texts unchanged.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    shortened = text.rstrip()
    while end := next((mark for mark in special if mark.strip() and shortened.endswith(mark.strip())), None):
        text = shortened = shortened.removesuffix(end.strip()).rstrip()
    return text


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Renders a conversation as a prompt and returns the prompt's token ids. The prompt ends with the template's header
    of an assistant turn. If the last message is the assistant's, the prompt instead ends with the text of this message,
    without the end of the turn, so that the model continues the message (as in TRL).

    Raises ConfigError if the tokenizer has no chat template, and ChatError if the template fails to render the
    conversation or leaves a part of it out.
    """
    continued = messages[-1]["role"] == ASSISTANT
    text = render(tokenizer, messages, header=not continued, continued=continued)
    _refuse_left_out(tokenizer, messages, None, text)
    return _ids(tokenizer, text)


def answered_ids(tokenizer: Any, text: str, answer: str) -> list[int]:
    """Returns the token ids of a prompt text followed by an answer. The sequence ends like a training sample of
    `megatron-rl sft`.

    A UserText, and every text if the tokenizer is a ChatTokenizer, is rendered with the chat template, and the answer
    is the assistant's turn. If the conversation ends with an assistant's turn, the answer continues this turn. Without
    a chat template, the answer directly follows the prompt, and the tokenizer's EOS token (if any) follows the answer.
    """
    if isinstance(tokenizer, ChatTokenizer) and not isinstance(text, UserText):
        text = UserText(text)
    if isinstance(text, UserText):
        messages = text.messages
        if messages[-1]["role"] == ASSISTANT:
            answer, messages = str(messages[-1]["content"]) + answer, messages[:-1]
        return _ids(tokenizer, render(tokenizer, [*messages, {"role": ASSISTANT, "content": answer}]))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenize(tokenizer, text), *tokenizer.encode(answer, add_special_tokens=False), *end]


def render(
    tokenizer: Any, messages: Sequence[Message], *, header: bool = False, continued: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:  # fmt: skip
    """Renders a conversation with the chat template and returns the text.

    `header`: append the header of an assistant turn. `continued`: leave out the end of the last turn. Raises the errors
        of `prompt_ids`.
    """
    settings = {"add_generation_prompt": header, "continue_final_message": continued, "tokenize": False}
    return _applied(tokenizer, messages, tools, settings)


def conversation_tokens(
    tokenizer: Any, messages: Sequence[Message], *, first: int = 0, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes a whole conversation. Returns its tokens, [T] int32, and whether an assistant turn generated each
    token, [T] bool. Turns before the message with index `first` belong to the prompt.

    If the template has {% generation %} marks, a turn's tokens are those inside the marks (transformers'
    return_assistant_tokens_mask). Otherwise they are the tokens after the turn's header, up to and including the end of
    the turn (TRL's rule for completions). To find them, the conversation before the turn (with the header) and the
    conversation up to the turn's end are rendered separately. The tokens of both must be prefixes of the
    whole conversation's tokens.

    A turn whose message has the key WEIGHT is not trained on. Special tokens at the end of an assistant's content are
    left out, because the template writes the end of the turn.

    Raises ConfigError if the tokenizer has no chat template. Raises ChatError if the template fails to render the
    conversation, renders it inconsistently, or leaves a part of it out. Also raises ChatError if no token of the
    conversation is an assistant token to train on.
    """
    messages = [
        {**message, "content": without_end(tokenizer, message["content"])}
        if message["role"] == ASSISTANT and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    text = render(tokenizer, messages, tools=tools)
    _refuse_left_out(tokenizer, messages, tools, text)
    marked = _MARKS.search(_template(tokenizer, tools)) is not None
    if marked:
        settings = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        rendered = _applied(tokenizer, messages, tools, settings)
        tokens, written = np.array(rendered["input_ids"], np.int32), np.array(rendered["assistant_masks"], bool)
        written[: _beginning(tokenizer, messages, tokens, first, tools)] = False
    else:
        tokens = np.array(_ids(tokenizer, text), np.int32)
        written = np.zeros(len(tokens), bool)
    for place in range(first, len(messages)):
        trained = messages[place]["role"] == ASSISTANT and WEIGHT not in messages[place]
        if messages[place]["role"] == ASSISTANT and trained != marked:
            start = _beginning(tokenizer, messages, tokens, place, tools, header=not marked)
            written[start : _beginning(tokenizer, messages, tokens, place + 1, tools)] = trained
    written[:1] = False  # never train on the first token, because no position predicts it
    if not written.any():
        raise ChatError("an assistant wrote none of its tokens, so that there is nothing to train on")
    return tokens, written


def refuse_endless(vocabulary: Vocabulary, trained: np.ndarray) -> None:
    """Raises ChatError if none of the trained tokens [T] of a conversation is an end-of-text token or a special token.
    A model trained on such conversations would not stop after its answer, and engines could not detect the answer's
    end.
    """
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
    """Raises ChatError if the rendered text lacks a part of the conversation: a message key, the content of a message,
    or the tools. An assistant's thought (up to the mark that ends it) may be left out.
    """
    template = _template(tokenizer, tools)
    cure = "take it out of the rows, or give model.chat_template a template that writes it"
    closing = (form_of(tokenizer) or ResponseForm()).closing
    if tools and not _mentions(template, "tools"):
        raise ChatError(f"the chat template does not write 'tools': {cure}")
    for place, message in enumerate(messages):
        label = f"message {place + 1}, of role {message['role']}"
        unwritten = _UNWRITTEN | ({"name"} if message["role"] == TOOL else set())
        for key in sorted(message.keys() - unwritten - {WEIGHT}):
            if message[key] not in ("", [], {}) and not _mentions(template, key):
                raise ChatError(f"{label} has {key!r}, which the chat template does not write: {cure}")
        content = str(message.get("content", ""))
        needed = (content.split(closing)[-1] if message["role"] == ASSISTANT else content).strip()
        if not any(
            form in text for form in (needed, json.dumps(needed)[1:-1], json.dumps(needed, ensure_ascii=False)[1:-1])
        ):
            raise ChatError(f"the chat template does not write the content of {label}: {cure}")


def _mentions(template: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def _beginning(
    tokenizer: Any, messages: Sequence[Message], tokens: np.ndarray, place: int,
    tools: Sequence[Mapping[str, Any]] | None, *, header: bool = False,
) -> int:  # fmt: skip
    """Returns how many tokens the first `place` messages of a conversation have, rendered without the later messages.

    `tokens`: the tokens of the whole conversation. `header`: if True, counts the header of an assistant's turn after
    these messages, too. Raises ChatError if `tokens` does not begin with the counted tokens.
    """
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
    from jinja2 import TemplateError  # a slow import, needed only when a template is rendered

    _template(tokenizer, tools)
    try:
        shown = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
        return tokenizer.apply_chat_template(shown, tools=tools, **settings)
    except (TemplateError, ValueError, TypeError, KeyError) as error:  # a template can raise any of these
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
