"""Whole runs of roles on ranks of their own: the same weights, bit for bit, as on shared ranks of the same number, and
whatever the ranks' pace and a kill.
"""

from __future__ import annotations

import contextlib
import random
import re

import cut_runs
import placement_runs
import pytest

pytestmark = [pytest.mark.multi, pytest.mark.slow]
KILLS = 20
APART = {"generator": "1-2", "verifier": "3-3"}  # rank 0, which drives the run, is in no set


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with the models and data of the runs."""
    folder = tmp_path_factory.mktemp("placement_runs")
    cut_runs.write_players(folder)
    cut_runs.write_data(folder, [])
    return folder


def test_placement_of_roles_apart_gives_the_weights_of_shared_ranks(base):
    placement_runs.train(placement_runs.tango(base, "shared", 2, {}))
    both = {"generator": "1-2", "verifier": "3-4"}
    placement_runs.train(placement_runs.tango(base, "apart", 5, both))
    shared = placement_runs.weights(base, "shared")
    assert shared and placement_runs.weights(base, "apart") == shared


def test_placement_with_rollouts_ahead_depends_neither_on_pace_nor_on_a_kill(base, monkeypatch):
    for name, seed in (("quick", "1"), ("slow", "2")):
        monkeypatch.setenv(placement_runs.NAPS, seed)
        placement_runs.train(placement_runs.tango(base, name, 4, APART, max_staleness=2))
    found = placement_runs.weights(base, "quick")
    assert found and placement_runs.weights(base, "slow") == found
    file = placement_runs.tango(base, "killed", 4, APART, max_staleness=2)
    monkeypatch.setenv(placement_runs.KILL, "3:9")
    said = placement_runs.train(file, check=False)
    assert re.search(r"rank 3 (\(verifier\) )?(has )?ended", said), said[-3000:]
    monkeypatch.delenv(placement_runs.KILL)
    placement_runs.train(file)
    assert placement_runs.weights(base, "killed") == found


@pytest.mark.matrix
@pytest.mark.parametrize(("engine", "k"), [("embedded", 0), ("embedded", 2), ("servers", 0)])
def test_placement_twenty_kills_at_random_moments_change_no_bit(base, monkeypatch, engine, k):
    """Ranks of both sets, and rank 0 in none, end before a random command; each run is resumed until it is done."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.closing(server)) for server in cut_runs.start_servers()[:2]]
        urls = {role: [server.url] for role, server in zip(APART, servers, strict=True)}
        own = {} if engine == "embedded" else {"urls": urls}
        whole = f"{engine}_{k}_whole"
        placement_runs.train(placement_runs.tango(base, whole, 4, APART, max_staleness=k, **own))
        chance, kills, ended, name = random.Random(f"{engine} {k}"), 0, 0, ""
        monkeypatch.setenv(placement_runs.NAPS, "3")
        while kills < KILLS:
            name = name or f"{engine}_{k}_killed_{ended}"
            file = placement_runs.tango(base, name, 4, APART, max_staleness=k, **own)
            monkeypatch.setenv(placement_runs.KILL, f"{chance.randrange(4)}:{chance.randrange(2, 30)}")
            if "ended" in placement_runs.train(file, check=False):
                kills += 1
            else:  # it ended before the command
                assert placement_runs.weights(base, name) == placement_runs.weights(base, whole) != {}
                name, ended = "", ended + 1
        monkeypatch.delenv(placement_runs.KILL)
        if name:
            placement_runs.train(placement_runs.tango(base, name, 4, APART, max_staleness=k, **own))
            assert placement_runs.weights(base, name) == placement_runs.weights(base, whole) != {}
