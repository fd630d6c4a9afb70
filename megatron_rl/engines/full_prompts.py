"""Says that prompts fill a model's context, whose completions are empty for that reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from megatron_rl.engines.protocol import Completion
from megatron_rl.types import Stop

_log = logging.getLogger(__name__)


class FullPrompts:
    """A count of the prompts of one engine that left no room for an answer. Threads may share it."""

    def __init__(self, name: str) -> None:
        """`name`: of the engine, for the warnings."""
        self.count = 0
        self._name, self._next = name, 1  # the count at which the next warning is due
        self._change = threading.Lock()

    def look(self, prompt_tokens: int, completions: Sequence[Completion]) -> None:
        """Counts a prompt of so many tokens if it was cut before the first token of all its completions: at least one
        is always asked for. Warns of the first such prompt, of the tenth, the hundredth, and so on."""
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
