"""Keeps what a message says from becoming the control tokens of a chat template, by which turns are told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.chat import ASSISTANT, Message
from megatron_rl.environments.moves import QUOTED


class ControlTokens:
    """The texts that a tokenizer turns into control tokens, such as `<|im_end|>`.

    A tokenizer makes no difference between those that a chat template wrote and those that a tool printed: with them
    the output of a tool could end its turn and begin another one. A text is spelled with a space behind the first
    character of each (`< |im_end|>`), so that it is read as text.
    """

    def __init__(self, tokenizer: Any, frame: str = "") -> None:
        """`frame`: a conversation as the chat template renders it. Control tokens are the special tokens, and those
        other added ones that stand there: `<｜User｜>` of DeepSeek-R1's distilled Qwen models is not special."""
        added = [(token.content, token.special) for token in tokenizer.added_tokens_decoder.values()]
        special = [text for text, is_special in added if is_special]
        self._special = _any_of(special)
        self._all = _any_of(
            [*special, *(text for text, is_special in added if not is_special and text.strip() and text in frame)]
        )

    def spell(self, text: str) -> str:
        """Returns a text without control tokens."""
        return _spelled(self._all, text)

    def spell_message(self, message: Message) -> dict[str, Any]:
        """Returns a message for a chat template, without control tokens in any of its texts. An assistant's keeps the
        added tokens that are not special: the model's own `<think>` is one, which templates look for."""
        pattern = self._special if message.get("role") == ASSISTANT else self._all
        return {name: _spelled_within(pattern, value) for name, value in message.items() if name != QUOTED}


def _any_of(texts: list[str]) -> re.Pattern[str] | None:
    """Returns the pattern of any of some texts, the longest first; None without any. One character is a letter or a
    mark rather than a control token."""
    longest = sorted({text for text in texts if len(text) > 1}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest))) if longest else None


def _spelled(pattern: re.Pattern[str] | None, text: str) -> str:
    return text if pattern is None else pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def _spelled_within(pattern: re.Pattern[str] | None, value: Any) -> Any:
    """Returns a JSON value with all of its texts spelled."""
    if isinstance(value, str):
        return _spelled(pattern, value)
    if isinstance(value, Mapping):
        return {_spelled_within(pattern, name): _spelled_within(pattern, one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled_within(pattern, one) for one in value]
    return value
