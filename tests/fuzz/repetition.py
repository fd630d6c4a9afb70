"""Texts of a model that repeat delimiters, up to 1 MB: every parser reads each in a time that grows with its length."""

from __future__ import annotations

import random

from fuzzing import Tally, tally
from parsers import PARSERS, PIECES

MOST, MOST_MATHEMATICS = 1_000_000, 20_000  # characters; a grader in a worker process has a limit of its own


def fuzz(seed: int, count: int) -> Tally:
    """Repeats one to three pieces, behind another one and in front of another one."""

    def one(rng: random.Random) -> str:
        name = rng.choice(sorted(PARSERS))
        most = MOST_MATHEMATICS if name.startswith("mathematics") else MOST
        piece = "".join(rng.choices(PIECES, k=rng.randint(1, 3)))
        text = rng.choice(PIECES) + piece * int(rng.uniform(1, most) / len(piece)) + rng.choice(PIECES)
        PARSERS[name](text)
        return name

    return tally(seed, count, one)
