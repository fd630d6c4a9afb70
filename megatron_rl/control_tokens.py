"""Keeps texts of models, tools and data from becoming control tokens of a chat template, which mark where a turn begins
and ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from megatron_rl.chat_template import ASSISTANT, QUOTED, Message
from megatron_rl.text import TOKENIZERS, fill


class ControlTokens:
    """The texts that a tokenizer turns into control tokens, such as `<|im_end|>`.

    A tokenizer makes no difference between those that a chat template wrote and those that a tool printed: with them
    the output of a tool could end its turn and begin another one. A text is spelled with a space behind the first
    character of each (`< |im_end|>`), so that it is read as text.
    """

    def __init__(self, tokenizer: Any, frame: str = "") -> None:
        """`frame`: a conversation as the chat template renders it. Control tokens are the special tokens, and those
        other added ones that stand there: `<｜User｜>` of DeepSeek-R1's distilled Qwen models is not special."""
        tokens = tokenizer.added_tokens_decoder.values()
        added = [(token.content, token.special) for token in tokens]
        special = [text for text, is_special in added if is_special]
        in_frame = [text for text, is_special in added if not is_special and text.strip() and text in frame]
        # Tokens that are looked for in what a tokenizer normalised have other spellings: NFKC makes < of ＜.
        normalizer = tokenizer.backend_tokenizer.normalizer if any(token.normalized for token in tokens) else None
        normalise = None if normalizer is None else normalizer.normalize_str
        self._special, self._all = _Speller(special, normalise), _Speller([*special, *in_frame], normalise)

    def spell(self, text: str) -> str:
        """Returns a text without control tokens."""
        return self._all.spell(text)

    def spell_message(self, message: Message) -> dict[str, Any]:
        """Returns a message for a chat template, without control tokens in any of its texts. An assistant's keeps the
        added tokens that are not special: the model's own `<think>` is one, which templates look for."""
        speller = self._special if message.get("role") == ASSISTANT else self._all
        return {name: speller.spell_within(value) for name, value in message.items() if name != QUOTED}


def fill_quoting(tokenizer: Any, template: str, **values: str) -> str:
    """Fills a prompt as `fill` does, with texts that models or data wrote: none of them can write a control token, by
    which it would end the prompt's turn and begin another. Those of the template stay."""
    return fill(template, **{name: spelled(tokenizer, value) for name, value in values.items()})


def spelled(tokenizer: Any, text: str) -> str:
    """Returns a text in which nothing is tokenised as a control token."""
    return _control_tokens(tokenizer).spell(text)


@lru_cache(maxsize=TOKENIZERS)
def _control_tokens(tokenizer: Any) -> ControlTokens:
    return ControlTokens(tokenizer)


class _Speller:
    """Finds given texts in other texts, and inserts a space after the first character of each.

    `normalise` is what the tokenizer does to a text before it looks for control tokens; None: nothing.
    """

    def __init__(self, texts: Iterable[str], normalise: Callable[[str], str] | None = None) -> None:
        """One character is a letter or a mark rather than a control token, and is left."""
        self._normalise = normalise
        found = {text for text in texts if len(text) > 1}
        longest_first = sorted(found, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._starts = sorted({text[:2] for text in found})  # few, and looked for much faster than the pattern

    def spell(self, text: str) -> str:
        text = self._spaced(text)
        if self._normalise is None or not self._pattern.search(normalised := self._normalise(text)):
            return text
        text = self._spaced(normalised)
        if self._pattern.search(self._normalise(text)):  # the tokenizer takes spaces out
            return self._pattern.sub("", normalised)
        return text

    def _spaced(self, text: str) -> str:
        if not any(start in text for start in self._starts):
            return text
        return self._pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def spell_within(self, value: Any) -> Any:
        """Returns a JSON value with all of its texts spelled."""
        if isinstance(value, str):
            return self.spell(value)
        if isinstance(value, Mapping):
            return {self.spell_within(name): self.spell_within(one) for name, one in value.items()}
        return [self.spell_within(one) for one in value] if isinstance(value, (list, tuple)) else value
