"""The KV cache of the rows that one decoder processes. Rows are stored in slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_rl.engines.embedded.decoder import Decoder

GROWTH = 64  # number of columns that are added at once


class Cache:
    """The KV cache of one batch for one decoder: one slot per row, one column per token."""

    def __init__(self, decoder: Decoder, slots: int) -> None:
        self._decoder, self.width = decoder, 0
        # One [2, slots, KV, columns, d] per layer, or the decoder's latents.
        self.layers = [decoder.new_layer_cache(slots, 0) for _ in decoder.weights.layers]

    def reserve(self, width: int, *, used: int, slots: int) -> None:
        """Makes the cache at least `width` columns wide. If it grows, it keeps the contents of the first `used` slots,
        and is reallocated with `slots` slots.
        """
        if width <= self.width:
            return
        columns = -(-width // GROWTH) * GROWTH
        for number, held in enumerate(self.layers):  # layer by layer, so that only one layer is in memory twice
            grown = self._decoder.new_layer_cache(slots, columns)
            grown[:, :used, :, : self.width] = held[:, :used]
            self.layers[number] = grown
        self.width = columns

    def put(self, part: slice, fresh: Sequence[Tensor], source: Tensor) -> None:
        """Fills the slots `part` with rows `source` [B] of a prefill's keys and values, one [2, P, KV, columns, d] per
        layer.
        """
        for held, made in zip(self.layers, fresh, strict=True):
            held[:, part, :, : made.shape[3]] = made[:, source]

    def move(self, origin: Tensor, to: Tensor) -> None:
        """Copies slots `origin` [M] to slots `to` [M]."""
        for held in self.layers:
            held[:, to] = held[:, origin]
