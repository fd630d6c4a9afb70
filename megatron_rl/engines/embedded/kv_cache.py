"""The KV cache of the rows that one decoder processes. Rows are stored in slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_rl.engines.embedded.decoder import Decoder

GROWTH = 64  # default number of columns (tokens) by which the cache grows


class Cache:
    """The KV cache of one batch for one decoder: one slot per row (sequence), one column per token.

    `growth`: number of columns by which the cache grows.
    """

    def __init__(self, decoder: Decoder, slots: int, *, growth: int = GROWTH) -> None:
        self._decoder, self._growth, self.width = decoder, growth, 0
        # One tensor per layer, in the format of `Decoder.new_layer_cache`: for example [2, slots, KV, columns, d].
        self.layers = [decoder.new_layer_cache(slots, 0) for _ in decoder.weights.layers]

    def reserve(self, width: int, *, used: int, slots: int) -> None:
        """Makes the cache at least `width` columns wide. If the cache must grow, it is reallocated with `slots` slots,
        and the contents of the first `used` slots are kept.
        """
        if width <= self.width:
            return
        columns = -(-width // self._growth) * self._growth
        # reallocates layer by layer, so that only one layer is in memory twice
        for number, held in enumerate(self.layers):
            grown = self._decoder.new_layer_cache(slots, columns)
            grown[:, :used, :, : self.width] = held[:, :used]
            self.layers[number] = grown
        self.width = columns

    def put(self, part: slice, fresh: Sequence[Tensor], source: Tensor) -> None:
        """Fills slots with the KV cache that a prefill of P prompts returned. `part`: the B slots to fill. `fresh`: the
        cache of the prefill, one tensor [2, P, KV, columns, d] per layer. `source`: [B], index of each slot's prompt in
        the prefill.
        """
        for held, made in zip(self.layers, fresh, strict=True):
            held[:, part, :, : made.shape[3]] = made[:, source]

    def move(self, origin: Tensor, to: Tensor) -> None:
        """Copies the contents of M slots to other slots. `origin`, `to`: [M], indices of the slots."""
        for held in self.layers:
            held[:, to] = held[:, origin]
