"""Every method, with and without iterations collected ahead of training: a run that was cut in the middle and resumed
is the whole one to the last bit. `make test` has some of these in test_open_centre.py.
"""

from __future__ import annotations

import cut_runs
import pytest

pytestmark = [pytest.mark.multi, pytest.mark.matrix]
CASES = {case: own for case, own in cut_runs.EVERY.items() if case not in cut_runs.FEW}
RUBRIC = [{"criterion": f"Is there {what}?"} for what in ("a beginning", "a middle", "an end")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, by one start of two ranks. -> the directory of the runs."""
    base = tmp_path_factory.mktemp("cut")
    cut_runs.write_data(base, RUBRIC)
    cut_runs.write_players(base)
    servers = cut_runs.start_servers()
    try:
        cut_runs.run_all(base, cut_runs.cases(base, CASES, servers))
    finally:
        for server in servers:
            server.close()
    return base / "runs"


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_any_method_that_was_cut_goes_on_exactly(runs, case):
    cut_runs.assert_same(runs / case, runs / f"{case}_cut")
    cut_runs.assert_telling(runs / case, case, *CASES[case])
