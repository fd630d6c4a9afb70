"""Tandem RL, in which two models generate one text: determines which model generates the next token of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.tandem_authors import Pen
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.batched_session import Row
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.protocol import TandemSampling


def pens_of(rows: Sequence[Row], tandem: TandemSampling, boundaries: frozenset[int]) -> list[Pen]:
    """Returns one pen for each of the [R] rows. A pen decides whether the senior (trained) or the junior (frozen) model
    generates the row's next token.
    """
    pens = []
    for row in rows:
        own = sampling_seeds.request_seed(row.sampling.seed, row.key) + row.sample
        written = row.tokens[-tandem.written :] if tandem.written else ()
        pens.append(Pen(tandem.rule, boundaries, own if tandem.seed is None else tandem.seed, written))
    return pens


class Writers:
    """Chooses between the senior and the junior model in every row of a batch. Holds the decoders of both models, and
    one pen per row. A pen determines which model generates the next token of the row.
    """

    def __init__(self, decoders: tuple[Decoder, Decoder], pens: Sequence[Pen]) -> None:
        self._decoders, self._pens = decoders, pens

    def logits(self, states: Sequence[Tensor], places: np.ndarray) -> Tensor:
        """Computes logits [B, V] from both decoders' hidden states [B, h]. The logits of a row come from the model
        that generates the next token of the row.
        """
        senior = torch.tensor([self._pens[place].senior for place in places.tolist()], device=states[0].device)
        shape = (len(senior), self._decoders[0].arch.vocab)
        logits = torch.empty(shape, dtype=states[0].dtype, device=states[0].device)
        for decoder, state, own in zip(self._decoders, states, (senior, ~senior), strict=True):
            logits[own] = decoder.logits(state[own])
        return logits

    def write(self, places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Records one new token for each of B rows. `places`: [B], indices of the rows. `tokens`: [B], the new tokens.
        Returns [B] bool: True where the senior generated the token.
        """
        written = zip(places.tolist(), tokens.tolist(), strict=True)
        return np.fromiter((self._pens[place].write(token) for place, token in written), bool, len(places))
