"""Counts what hostile inputs lead to, for the areas in tests/fuzz."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

SHOWN = 5  # defects of an area whose tracebacks are kept


@dataclass
class Tally:
    """The outcomes of an area's inputs, by name, and the defects with the seeds that give the same input again."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: int = 0
    shown: list[str] = field(default_factory=list)  # the first defects: seed and traceback

    @property
    def inputs(self) -> int:
        """Returns the number of inputs that were tried."""
        return self.outcomes.total() + self.defects


def tally(seed: int, count: int, one: Callable[[random.Random], str]) -> Tally:
    """Tries `count` inputs. `one` makes an input from the generator it is given, tries it, and returns the name of the
    outcome; whatever it raises is a defect. Input i is the same in every call with the same seed.
    """
    found = Tally()
    for i in range(count):
        try:
            found.outcomes[one(random.Random(f"{seed}/{i}"))] += 1
        except Exception:
            found.defects += 1
            if len(found.shown) < SHOWN:
                found.shown.append(f"input {i} of seed {seed}:\n{traceback.format_exc()}")
    return found
