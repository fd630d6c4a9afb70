"""The forms in which models write thoughts, answers and tool calls. This is the only place that knows them.

The chat template of a model determines the form. Readers of responses (rewards, judges, environments, evaluations) get
every response in one form: the thought between <think> and </think>, followed by the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import hub_cache
from megatron_rl.config.base import ConfigError, read_object
from megatron_rl.config.model import Model
from megatron_rl.texts.tags import THINK, THOUGHT_END, after_thinking
from megatron_rl.texts.text import TOKENIZERS, Decoded, decode

MARKS = "thought_marks"  # key of tokenizer_config.json, and setting of a model, that states the marks of thoughts
TAIL_TOKENS = 16  # number of tokens at the end of a prompt that are searched for the mark that opens a thought
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"  # marks of OpenAI's harmony format (gpt-oss)
BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", START, CHANNEL)
# (text that opens a thought, text that ends a thought) of public models: Qwen3, DeepSeek-R1 and many others; Seed-OSS;
# Magistral; Kimi-VL; Command A Reasoning; EXAONE Deep; OpenThinker.
KNOWN_MARKS = (
    (THINK, THOUGHT_END),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
# Words by which chat templates call an assistant's thought. A template that has one of them and no known mark writes
# thoughts in an unknown form.
_THOUGHT_WORDS = re.compile(r"\b(reasoning_content|reasoning|thinking|thoughts?)\b")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The form of a model's responses. With `harmony`, a response consists of messages in channels, as in OpenAI's
    harmony format, and `opening` and `closing` have no meaning.
    """

    opening: str = THINK
    closing: str = THOUGHT_END
    harmony: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A parsed response of a model."""

    text: str  # thought and answer, with the thought between <think> and </think>; without `calls`
    # The thought and the answer, if the form separates them by special tokens. None: `text` has the model's own marks,
    # which the chat template finds in the content of a message.
    parts: tuple[str, str] | None = None
    calls: tuple[tuple[str, str], ...] = ()  # (name of the tool, text of the arguments) of each tool call


def form_for(template: str, added: Collection[str], stated: Sequence[str] | None) -> ResponseForm | None:
    """Returns the form of responses, or None if the form is unknown.

    `template`: the chat template, "" if there is none. `added`: the tokenizer's added tokens. `stated`: the marks in
    the setting `thought_marks`. A model without a template, or whose template has no thoughts, has the form of the
    packaged prompts, which ask for <think> and </think>.
    """
    if stated is not None:
        return ResponseForm(stated[0], stated[1])
    if CHANNEL in template and MESSAGE in template:
        return ResponseForm(harmony=True)
    form_marks = next((marks for marks in KNOWN_MARKS if marks[1] in template), None)
    form_marks = form_marks or next((marks for marks in KNOWN_MARKS if marks[1] in added), None)
    if form_marks is None and _THOUGHT_WORDS.search(template):
        return None
    return ResponseForm(*(form_marks or KNOWN_MARKS[0]))


def form_of(tokenizer: Any) -> ResponseForm | None:
    """Returns the form of the responses of a tokenizer's model, or None if the form is unknown."""
    template = tokenizer.chat_template
    return _form_of(tokenizer, "".join(template.values()) if isinstance(template, dict) else template or "")


@lru_cache(maxsize=TOKENIZERS)
def _form_of(tokenizer: Any, template: str) -> ResponseForm | None:
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return form_for(template, added, tokenizer.init_kwargs.get(MARKS))


def unknown_form(setting: str, path: str) -> str:
    """Returns the error message for a model whose form of thoughts is unknown. `setting`: name of the model's section
    of settings."""
    return (
        f"the chat template of {setting}.path = {path!r} writes thoughts between marks that are not known, so that "
        f"thoughts cannot be told from answers: set {setting}.{MARKS} to the two texts that begin and end a thought"
    )


def form_problems(model: Model, setting: str, why: str) -> Iterator[str]:
    """Yields an error message if the form of a model's responses is unknown. Reads the chat template from the model's
    files, and yields nothing if they are not on this machine. `setting`: name of the model's section of settings.
    `why`: the setting that needs the form.
    """
    folder = Path(model.tokenizer or model.path)
    if not folder.is_dir() and (commit := hub_cache.head(str(folder), "models")) is not None:
        folder = hub_cache.cache() / f"models--{str(folder).replace('/', '--')}" / "snapshots" / commit
    if model.thought_marks is not None or not (folder / "tokenizer_config.json").is_file():
        return
    config = read_object(folder / "tokenizer_config.json")
    stored: Any = config.get("chat_template") or ""
    files = [Path(model.chat_template)] if model.chat_template else [folder / "chat_template.jinja"]
    template = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    template = template or (stored if isinstance(stored, str) else json.dumps(stored, ensure_ascii=False))
    added = {str(token.get("content")) for token in (config.get("added_tokens_decoder") or {}).values()}
    if form_for(template, added, config.get(MARKS)) is None:
        yield f"{why}: {unknown_form(setting, model.path)}"


def thought_opening(tokenizer: Any, prompt: Sequence[int] | np.ndarray) -> str:
    """Returns <think> and a line break if a prompt of [T] tokens ends with the mark that opens a thought, and ""
    otherwise. The chat templates of some reasoning models end prompts with this mark.
    """
    form = form_of(tokenizer) or ResponseForm()
    if form.harmony:
        return ""
    end = tokenizer.decode([int(token) for token in prompt[-TAIL_TOKENS:]], skip_special_tokens=False).rstrip()
    return f"{THINK}\n" if end.endswith(form.opening) else ""


def response_text(
    tokenizer: Any, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray,
    decoded: Decoded | None = None,
) -> str:  # fmt: skip
    """Returns the text of a response of [T] tokens to a prompt, as rewards and judges read it: the thought between
    <think> and </think>, and then the answer. <think> is put first if the prompt ends with the mark that opens a
    thought. If the form is unknown, the text is unchanged. `decoded`: the result of `decode` for the response.
    """
    return thought_opening(tokenizer, prompt) + read_response(tokenizer, prompt, tokens, decoded).text


def response_answer(tokenizer: Any, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray) -> str:
    """Returns the answer in a response, without the thought (see texts.tags.after_thinking). Raises ConfigError if
    the form of the model's responses is unknown."""
    check_form(tokenizer)
    return after_thinking(response_text(tokenizer, prompt, tokens))


def check_form(tokenizer: Any) -> None:
    """Raises ConfigError if the form of the responses of a tokenizer's model is unknown."""
    if form_of(tokenizer) is None:
        raise ConfigError(unknown_form("model", str(tokenizer.name_or_path)))


def read_response(
    tokenizer: Any, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray,
    decoded: Decoded | None = None,
) -> Response:  # fmt: skip
    """Parses a response of [T] tokens to a prompt. Arguments as in `response_text`. The text does not repeat a mark
    that the prompt ends with."""
    form = form_of(tokenizer)
    if form is not None and form.harmony:
        return _read_channels(tokenizer, prompt, tokens)
    text = (decode(tokenizer, tokens) if decoded is None else decoded).text
    if form is None:
        return Response(text=text)
    marks = {tokenizer.convert_tokens_to_ids(mark): mark for mark in (form.opening, form.closing)}
    special = [token for token in marks if token in tokenizer.added_tokens_decoder]
    if any(tokenizer.added_tokens_decoder[token].special for token in special):  # `decode` drops these marks
        text = _with_special_marks(tokenizer, tokens, {token: marks[token] for token in special})
        text = _canonical(text, form)
        opened = thought_opening(tokenizer, prompt) + text
        thought = opened.rpartition(THOUGHT_END)[0] if THOUGHT_END in opened else opened if THINK in opened else ""
        return Response(text=text, parts=(thought.replace(THINK, "", 1).strip(), after_thinking(opened)))
    return Response(text=_canonical(text, form))


def _canonical(text: str, form: ResponseForm) -> str:
    return text.replace(form.opening, THINK).replace(form.closing, THOUGHT_END)


def _with_special_marks(tokenizer: Any, tokens: Sequence[int] | np.ndarray, marks: dict[int, str]) -> str:
    """Returns the text of tokens, in which the special tokens `marks` ({id: text}) are kept and others are left out."""
    text, run = "", list[int]()
    for token in map(int, tokens):
        if token in marks:
            text, run = text + decode(tokenizer, run).text + marks[token], []
        else:
            run.append(token)
    return text + decode(tokenizer, run).text


def _read_channels(
    tokenizer: Any, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray
) -> Response:  # fmt: skip
    """Parses a response in OpenAI's harmony format. The channel analysis is the thought. The other channels are the
    answer, without messages to a recipient, which are tool calls. A response without any message is an answer.
    """
    opened, response = [int(token) for token in prompt], [int(token) for token in tokens]
    start, message = (tokenizer.convert_tokens_to_ids(mark) for mark in (START, MESSAGE))
    ends = {tokenizer.convert_tokens_to_ids(mark) for mark in BODY_ENDS}
    begin = len(opened) - opened[::-1].index(start) if start in opened else len(opened)
    conversation, first = opened[begin:] + response, len(opened) - begin
    thoughts, answers, calls = list[str](), list[str](), list[tuple[str, str]]()
    place, unfinished = 0, False
    while message in conversation[place:]:
        body = conversation.index(message, place) + 1
        header = tokenizer.decode(conversation[place : body - 1], skip_special_tokens=False)
        place = next((i for i in range(body, len(conversation)) if conversation[i] in ends), len(conversation))
        text = decode(tokenizer, conversation[max(body, first) : place]).text
        recipient, channel = _RECIPIENT.search(header), header.rpartition(CHANNEL)[2].split()
        unfinished = channel[:1] == ["analysis"] and place == len(conversation)
        if place < first:
            continue
        if recipient is not None:
            calls.append((recipient[1], text))
        else:
            (thoughts if channel[:1] == ["analysis"] else answers).append(text)
    if not (thoughts or answers or calls):
        answers = [decode(tokenizer, response).text]
    thought, answer = "\n".join(thoughts), "\n".join(answers)
    closed = "" if unfinished else f"\n{THOUGHT_END}\n\n"
    text = f"{THINK}\n{thought}{closed}{answer}" if thoughts else answer
    return Response(text=text, parts=(thought, answer), calls=tuple(calls))
