"""The order in which supervised training reads the rows of its data, epoch by epoch."""

from __future__ import annotations

import random


class EpochOrder:
    """The rows of each optimizer step. Every pass over the data (epoch) has each row exactly once. The last step of an
    epoch has the rest of the rows, as in the Trainer of transformers.

    With `shuffle`, every epoch has a different order, which depends only on `seed` and the number of the epoch. The
    order of the current epoch is kept, so that a step costs no more than its rows.
    """

    def __init__(self, num_rows: int, samples_per_step: int, *, seed: int, shuffle: bool) -> None:
        self._rows, self._per_step = num_rows, samples_per_step
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, list[int]()

    def of_step(self, step: int) -> list[int]:
        """Returns the indices of the rows of an optimizer step, counted from 0."""
        order, first = self._at(step)
        return order[first : first + self._per_step]

    def before(self, step: int) -> int:
        """Returns the index of the row before the first row of a step, in the order of the step's epoch. Before the
        first step of an epoch, this is the last row of the epoch.
        """
        order, first = self._at(step)
        return order[first - 1]

    def _at(self, step: int) -> tuple[list[int], int]:
        """Returns the order of a step's epoch, and the position of the step's first row in the order."""
        epoch, index = divmod(step, -(-self._rows // self._per_step))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._rows))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order, index * self._per_step
