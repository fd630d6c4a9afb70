"""Escapes control tokens in texts that come from models, tools and data. Control tokens, such as `<|im_end|>`, mark the
beginning and end of turns in a chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from megatron_rl.texts.chat_template import ASSISTANT, QUOTED, Message
from megatron_rl.texts.text import TOKENIZERS, fill


class ControlTokens:
    """The strings that a tokenizer converts to control tokens, such as `<|im_end|>`.

    A tokenizer does not distinguish control tokens that the chat template writes from control tokens in a tool's
    output. The output of a tool could therefore end the tool's turn and begin another turn. To prevent this, a space is
    inserted after the first character of each such string (`< |im_end|>`), so that the string is tokenized as plain
    text.
    """

    def __init__(self, tokenizer: Any, frame: str = "") -> None:
        """Collects the control tokens of a tokenizer: its special tokens, and other added tokens that the chat template
        writes. For instance, `<｜User｜>` of DeepSeek-R1's distilled Qwen models is an added token that is not special.

        `frame`: a conversation rendered with the chat template. An added token that occurs in it is a control token.
        """
        tokens = tokenizer.added_tokens_decoder.values()
        added = [(token.content, token.special) for token in tokens]
        special = [text for text, is_special in added if is_special]
        in_frame = [text for text, is_special in added if not is_special and text.strip() and text in frame]
        # Matching after normalization accepts several spellings of a token: for example, NFKC converts ＜ to <.
        normalizer = tokenizer.backend_tokenizer.normalizer if any(token.normalized for token in tokens) else None
        normalise = None if normalizer is None else normalizer.normalize_str
        self._special, self._all = _Speller(special, normalise), _Speller([*special, *in_frame], normalise)

    def spell(self, text: str) -> str:
        """Returns a text in which all control tokens are escaped by a space after the first character."""
        return self._all.spell(text)

    def spell_message(self, message: Message) -> dict[str, Any]:
        """Returns a message in which the control tokens in all texts are escaped. In messages of the assistant, only
        special tokens are escaped, because chat templates search for other added tokens, such as `<think>`.
        """
        speller = self._special if message.get("role") == ASSISTANT else self._all
        return {name: speller.spell_within(value) for name, value in message.items() if name != QUOTED}


def fill_quoting(tokenizer: Any, template: str, **values: str) -> str:
    """Replaces `{name}` in a prompt template by each value, and escapes control tokens in the values. So a value that a
    model or a data set wrote cannot end the prompt's turn and begin another. Control tokens of the template itself are
    not escaped.
    """
    return fill(template, **{name: spelled(tokenizer, value) for name, value in values.items()})


def spelled(tokenizer: Any, text: str) -> str:
    """Returns a text with the control tokens escaped, so that the tokenizer converts no part of the text to a control
    token.
    """
    return _control_tokens(tokenizer).spell(text)


@lru_cache(maxsize=TOKENIZERS)
def _control_tokens(tokenizer: Any) -> ControlTokens:
    return ControlTokens(tokenizer)


class _Speller:
    """Finds given strings (control tokens) in texts, and inserts a space after the first character of each.

    `normalise`: the normalization that the tokenizer applies before it searches for control tokens; None if there is no
    normalization.
    """

    def __init__(self, texts: Iterable[str], normalise: Callable[[str], str] | None = None) -> None:
        """Compiles the pattern that finds the strings. Single-character strings are ignored, because they are ordinary
        characters rather than control tokens.
        """
        self._normalise = normalise
        long_texts = {text for text in texts if len(text) > 1}
        longest_first = sorted(long_texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # The first two characters of each string. A text is searched for them first, because the pattern is slow.
        self._starts = sorted({text[:2] for text in long_texts})

    def spell(self, text: str) -> str:
        text = self._spaced(text)
        if self._normalise is None or not self._pattern.search(normalised := self._normalise(text)):
            return text
        text = self._spaced(normalised)
        # If the tokenizer's normalization removes spaces, a space does not escape a control token: remove the token.
        if self._pattern.search(self._normalise(text)):
            return self._pattern.sub("", normalised)
        return text

    def _spaced(self, text: str) -> str:
        if not any(start in text for start in self._starts):
            return text
        return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    def spell_within(self, value: Any) -> Any:
        """Returns a copy of a JSON value in which the control tokens in all texts are escaped."""
        if isinstance(value, str):
            return self.spell(value)
        if isinstance(value, Mapping):
            return {self.spell_within(name): self.spell_within(member) for name, member in value.items()}
        return [self.spell_within(member) for member in value] if isinstance(value, (list, tuple)) else value
