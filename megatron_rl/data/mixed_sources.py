"""Mixes several sources of problems into one stream of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from megatron_rl.data.problems import ANY, Draw, Fits, NothingLeft, PromptReader, source_of
from megatron_rl.types import Prompt

# 2^64 divided by the golden ratio. Multiples of it modulo 2^64 are spread evenly over [0, 2^64) (a Weyl sequence).
GOLDEN, SIZE = 0x9E3779B97F4A7C15, 1 << 64


class MixedReader:
    """An endless, deterministic stream of prompts from several sources. Has the same methods as a PromptReader.

    Number n of a Weyl sequence, whose first number depends on the seed, selects the source of draw n in proportion to
    the weights. In any sequence of consecutive draws, the shares of the sources are therefore proportional to the
    weights, up to a few draws. The weights may change after any draw. Each source has a separate order and separate
    epochs.
    """

    def __init__(self, readers: Mapping[str, PromptReader], weights: Mapping[str, float], *, seed: int | str) -> None:
        """`weights`: the weight of each source. The weights in the argument `draw` of `take` have precedence."""
        self._readers, self._weights, self._seed, self._draws = dict(readers), dict(weights), seed, 0
        self._start = int.from_bytes(hashlib.blake2b(f"{seed}/sources".encode(), digest_size=8).digest(), "big")

    @property
    def dropped(self) -> int:
        """The number of prompts that were longer than the maximum."""
        return sum(reader.dropped for reader in self._readers.values())

    def take(self, count: int, fits: Fits = lambda prompt: True, draw: Draw = ANY) -> list[Prompt]:
        """Returns `count` prompts of the stream for which `fits` returns True. A prompt that does not fit is replaced
        by the next prompt of the same source. A source is omitted until the end of the call if a curriculum skips all
        of its problems. Raises NothingLeft if no source is left, and DataError if all prompts of a source are too long.
        """
        weights = {name: weight for name, weight in (draw.weights or self._weights).items() if weight > 0}
        prompts: list[Prompt] = []
        while len(prompts) < count:
            name = self._draw(weights)
            try:
                prompts += self._readers[name].take(1, fits, draw)
            except NothingLeft:
                del weights[name]
                if not weights:
                    raise
        return prompts

    def beside(self, name: object, taken: Collection[Prompt], state: Mapping[str, Any]) -> MixedReader:
        """Returns a new reader over the same sources in other random orders (see PromptReader.beside)."""
        readers = {
            source: reader.beside(name, [p for p in taken if source_of(p) == source], state["sources"][source])
            for source, reader in self._readers.items()
        }
        return MixedReader(readers, self._weights, seed=f"{self._seed}/{name}")

    def first(self, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of each source. The position of this reader is not changed."""
        return [prompt for reader in self._readers.values() for prompt in reader.first(count)]

    @property
    def questions(self) -> list[str]:
        """Returns `PromptReader.questions` of all sources."""
        return [question for reader in self._readers.values() for question in reader.questions]

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest prompt that was measured (see PromptReader.lengths)."""
        return max(reader.longest for reader in self._readers.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of draws and the position in each source as JSON values."""
        return {"draws": self._draws, "sources": {name: reader.state_dict() for name, reader in self._readers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved position. A source that the saved position does not have begins with its first epoch."""
        self._draws = state.get("draws", 0)
        for name, reader in self._readers.items():
            reader.load_state_dict(state.get("sources", {}).get(name, {}))

    def _draw(self, weights: Mapping[str, float]) -> str:
        """Returns the name of the next source, so that each source's share of any draws in a row is near its weight."""
        place = (self._start + self._draws * GOLDEN) % SIZE / SIZE * sum(weights.values())
        self._draws += 1
        for name, weight in weights.items():
            place -= weight
            if place < 0:
                return name
        return list(weights)[-1]  # rounding left a rest of 1e-16
