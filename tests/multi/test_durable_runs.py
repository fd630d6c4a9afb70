"""Runs that are killed at random instants (rank 0, another rank, a server, all processes) and started again: no
finished sample is asked for again or written twice; with the embedded engine the run is the one that nobody killed, bit
for bit; with servers, whose answers are never the same twice, its iterations have what was finished before the kills,
and train the same weights again.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import cut_runs
import pytest
from cut_runs import assert_same
from durable_runs import METHODS, WHO, KilledRun, Servers, trained_again

pytestmark = [pytest.mark.multi, pytest.mark.slow]
KILLS = 34  # of a case in `make test-more ONLY=durable`: 204 in all
FEW = [("tango", False), ("agents", True)]
CASES = [(method, served) for method in METHODS for served in (False, True)]
RUBRIC = [{"criterion": "Is there a beginning?"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("durable")
    cut_runs.write_data(base, RUBRIC)
    cut_runs.write_players(base)
    return base


def settings(home: Path, method: str, name: str, servers: Servers | None) -> dict[str, Any]:
    own = METHODS[method](home, name)
    own["run"] |= {"save_every": 2, "save_rollouts_every": 1}
    return own if servers is None else own | {"engine": servers.engine(), "rollouts": {"max_staleness": 1}}


def killed(home: Path, method: str, served: bool, kills: int, seed: int) -> Counter[str]:
    """Kills runs of a method so many times in all, and looks at each of them in the end. Returns who was killed how
    often."""
    print(f"seed {seed}")
    rng, done, case = random.Random(seed), Counter[str](), f"{method}_{'served' if served else 'embedded'}_{kills}"
    servers = Servers(home, [*METHODS[method](home, case)["roles"]]) if served else None
    try:
        if servers is None:
            whole = KilledRun(home, settings(home, method, f"{case}_whole", None))
            whole.finish(disturbed=False)
        while done.total() < kills:
            run = KilledRun(home, settings(home, method, f"{case}_{done.total()}", servers))
            while not run.ended and done.total() + run.kills.total() < kills:
                run.kill(rng.choice([*WHO, "server"] if served else WHO), rng, servers)
            if not run.ended:
                run.finish()
            run.check()
            if servers is None:
                assert_same(whole.directory, run.directory)
            else:
                trained_again(home, run, settings(home, method, f"{run.name}_again", servers))
            if method == "single":  # in which every sample is a rollout by itself
                run.check_used()
            done += run.kills
    finally:
        if servers is not None:
            servers.close()
    return done


@pytest.mark.parametrize("method, served", FEW)
def test_durable_runs_lose_no_finished_sample(home, method, served):
    assert killed(home, method, served, 2, seed=len(method)).total() == 2


@pytest.mark.matrix
@pytest.mark.parametrize("method, served", CASES)
def test_durable_runs_of_all_methods_lose_no_finished_sample_at_any_instant(home, method, served):
    done = killed(home, method, served, KILLS, seed=random.SystemRandom().randrange(1 << 30))
    print(json.dumps(done))
    assert len(done) == (4 if served else 3), "everybody was killed"
