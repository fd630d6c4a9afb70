"""Stores the experts that a model chose for the tokens of a batch's rows, until the completions are built.

R rows of a call   B rows of a step   L layers   k experts of one token
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class ExpertChoices:
    """Stores which experts the router chose for every token that the model processed: prompt tokens and sampled tokens.

    The model does not process the last token of a completion, so this token has no expert choices.
    """

    def __init__(self, rows: int) -> None:
        self._prompts: list[np.ndarray | None] = [None] * rows  # [P, L, k] int16 each
        # One entry per decoding step: rows [B], token indices [B] in the completions, choices [B, L, k].
        self._drawn: list[tuple[np.ndarray, np.ndarray, Tensor]] = []

    def read_prompts(self, chosen: Sequence[Tensor], width: int, places: Sequence[tuple[int, int, int]]) -> None:
        """Stores the expert choices of a prefill. `chosen`: [prompts * width, k] for each layer, where every prompt is
        padded to `width` tokens.

        `places`: one tuple per row: index of the row in the batch, index of the row's prompt in the prefill, length of
        the prompt in tokens.
        """
        told = _stacked(chosen).cpu().numpy()
        told = told.reshape(-1, width, *told.shape[1:])
        for place, number, length in places:
            self._prompts[place] = told[number, :length]

    def read_drawn(self, chosen: Sequence[Tensor], places: np.ndarray, offsets: np.ndarray) -> None:
        """Stores the expert choices of a decoding step, which processed one token of each of B rows. `chosen`: [B, k]
        for each layer. `places`: [B], indices of the rows. `offsets`: [B], index of each processed token in the
        completion of its row. Rows that have already ended may be included.
        """
        self._drawn.append((places, offsets, _stacked(chosen)))

    def of_rows(self, lengths: np.ndarray) -> list[np.ndarray | None]:
        """Returns the expert choices of every row: [prompt + T - 1, L, k] int16 for a completion of T tokens, or None
        if T is 0.

        `lengths`: [R], the lengths of the completions.
        """
        read = np.maximum(lengths - 1, 0)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(read)])
        first = next((prompt for prompt in self._prompts if prompt is not None), np.zeros((0, 0, 0), np.int16))
        drawn = np.zeros((starts[-1], *first.shape[1:]), np.int16)
        if starts[-1]:
            places = np.concatenate([places for places, _, _ in self._drawn])
            offsets = np.concatenate([offsets for _, offsets, _ in self._drawn])
            kept = offsets < read[places]
            told = torch.cat([chosen for _, _, chosen in self._drawn]).cpu().numpy()
            drawn[starts[places[kept]] + offsets[kept]] = told[kept]
        return [
            None if prompt is None else np.concatenate([prompt, drawn[start : start + count]])
            for prompt, start, count in zip(self._prompts, starts[:-1].tolist(), read.tolist(), strict=True)
        ]


def _stacked(chosen: Sequence[Tensor]) -> Tensor:
    """Stacks the expert choices of all L layers. L tensors [N, k] -> [N, L, k] int16."""
    return torch.stack(list(chosen), dim=1).short()
