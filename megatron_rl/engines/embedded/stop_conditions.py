"""Detects the end of completions: by token, with one table lookup for all rows, and by stop string."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.engines.protocol import Sampling
from megatron_rl.types import Stop

PARTIAL = "\N{REPLACEMENT CHARACTER}"  # text into which tokenizers decode an incomplete character
# The window (the last tokens of a completion, which are searched for stop strings) has this many tokens more than the
# longest stop string has bytes, because decoding may cut a character or drop a space at the edges of the window.
MARGIN = 4
NO_TOKEN = -1  # placeholder for window positions before the first token of a completion
_UNKNOWN, _NO, _MAYBE = 0, 1, 2


class Ends:
    """Decides when and why completions end. All of the completions have the same stop settings."""

    def __init__(self, eos: frozenset[int], sampling: Sampling, tokenizer: Any, vocab: int) -> None:
        self._eos, self._stop_tokens = eos, frozenset(sampling.stop_tokens)
        self._strings, self._tokenizer = sampling.stop_strings, tokenizer
        self.table = np.zeros(vocab, bool)  # [V], True for tokens that end a completion
        self.table[[t for t in (*eos, *sampling.stop_tokens) if 0 <= t < vocab]] = True
        # A token has at least one byte, so a stop string of n bytes lies within the last n tokens.
        longest = max((len(s.encode()) for s in self._strings), default=0)
        # number of last tokens of a completion that `by_text` needs
        self.window = longest + MARGIN if self._strings else 0
        self._last_characters = {s[-1] for s in self._strings}
        self._could_complete = np.full(vocab if self._strings else 0, _UNKNOWN, np.int8)

    def by_text(self, tails: np.ndarray) -> np.ndarray:
        """Returns a bool array [B]: whether each row's newest token completes a stop string. `tails`: [B, window], the
        last tokens of each completion.
        """
        ended = np.zeros(len(tails), bool)
        newest = tails[:, -1]
        for token in np.unique(newest[self._could_complete[newest] == _UNKNOWN]).tolist():
            self._could_complete[token] = self._look_at(token)
        for row in np.flatnonzero(self._could_complete[newest] == _MAYBE).tolist():
            tail = tails[row]
            text = self._tokenizer.decode(tail[tail != NO_TOKEN].tolist(), skip_special_tokens=False)
            ended[row] = any(s in text for s in self._strings)
        return ended

    def reason(self, last: int, by_text: bool) -> Stop:
        """Returns the reason why a completion with the last token `last` ended."""
        if last in self._eos:
            return Stop.EOS
        return Stop.STOP if by_text or last in self._stop_tokens else Stop.LENGTH

    def _look_at(self, token: int) -> int:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        ends = PARTIAL in text or any(c in text or c.isspace() for c in self._last_characters)
        return _MAYBE if ends else _NO
