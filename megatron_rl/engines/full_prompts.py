"""Counts and reports prompts that fill the model's context. The completions of such prompts are empty."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from megatron_rl.engines.protocol import Completion
from megatron_rl.types import Stop

_log = logging.getLogger(__name__)


class FullPrompts:
    """A thread-safe counter of prompts that fill an engine's context. The completions of such prompts are empty."""

    def __init__(self, name: str) -> None:
        """`name`: name of the engine, shown in the warnings."""
        self.count = 0
        self._name, self._next = name, 1  # `_next`: the next warning is logged when `count` reaches this value
        self._change = threading.Lock()

    def look(self, prompt_tokens: int, completions: Sequence[Completion]) -> None:
        """Counts a prompt of `prompt_tokens` tokens if all its completions are empty because the prompt fills the
        context. Logs a warning for the first such prompt, the tenth, the hundredth, and so on.
        """
        if any(len(completion.tokens) or completion.stop is not Stop.LENGTH for completion in completions):
            return
        with self._change:
            self.count += 1
            if self.count < self._next:
                return
            self._next, count = 10 * self.count, self.count
        _log.warning(
            "%s: %d prompt(s) so far filled the model's context, the last one with %d tokens, and have empty answers: "
            "lower max_prompt_tokens, or raise engine.max_model_len where it is below what the model can",
            self._name, count, prompt_tokens,
        )  # fmt: skip
