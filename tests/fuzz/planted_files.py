"""Links, FIFOs, sockets and directories in place of files of a run: no reader waits, nothing is written elsewhere."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from damaged_runs import make_run
from fuzzing import Tally, tally
from planted import FILES, KINDS, plant, use, uses

SECRET = '{"secret": "not of this run"}\n'


def fuzz(seed: int, count: int) -> Tally:
    """Plants one to three things in a run, and uses the run in three ways, in any order."""
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        whole, elsewhere, run = make_run(base / "whole"), base / "elsewhere", base / "run"

        def one(rng: random.Random) -> str:
            elsewhere.write_text(SECRET)
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(whole, run)
            for name in rng.sample(FILES, k=rng.choice([1, 1, 2, 3])):
                plant(run / name, rng.choice(KINDS), elsewhere)
            calls = uses(run)
            if rng.random() < 0.9:
                del calls["report"]  # it takes a second
            outcomes = [use(calls[name]) for name in rng.sample(sorted(calls), k=3)]
            assert elsewhere.read_text() == SECRET, "it was written through a link"
            assert not elsewhere.with_name("not_there").exists(), "it was written through a broken link"
            return "refused" if any(outcome != "done" for outcome in outcomes) else "done"

        return tally(seed, count, one, timed=False)
