"""Damaged run directories: no reader raises, and what is left out is said."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from damaged_runs import flip, look, make_run
from fuzzing import Tally, tally

PAGES = 4  # one report is written in so many inputs


def fuzz(seed: int, count: int) -> Tally:
    """Damages one file of a run, or two, and reads the whole with everything that reads run directories."""
    with tempfile.TemporaryDirectory() as place:
        whole = make_run(Path(place))

        def one(rng: random.Random) -> str:
            with tempfile.TemporaryDirectory(dir=place) as own:
                run = flip(whole, Path(own) / "run", {}, rng=rng)
                return "damage told" if look(run, page=rng.randrange(PAGES) == 0) else "nothing to tell"

        return tally(seed, count, one)
