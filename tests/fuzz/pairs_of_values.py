"""Pairs of a known answer and a response of any kinds of values: no grader raises an error or takes long."""

from __future__ import annotations

import random

from fuzzing import Tally, tally
from value_kinds import GRADERS, KINDS, grade_pair, respond


def fuzz(seed: int, count: int) -> Tally:
    """Tries random pairs of kinds with a random grader, half of the time with the grader of mathematics."""

    def one(rng: random.Random) -> str:
        grader = rng.choice([*GRADERS, *["math"] * len(GRADERS)])
        known, response = KINDS[rng.choice([*KINDS])](rng), respond(rng, rng.choice([*KINDS]))
        return f"{grader} {grade_pair(grader, response, known)}"

    return tally(seed, count, one, timed=False)
