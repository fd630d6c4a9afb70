"""Processes of the tests are forks of a server; where NVIDIA's driver is they begin anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import conftest
import forks
import pytest

from megatron_rl.commands import ranks


def tell(file: Path) -> list[object]:
    """Returns this rank's number, and whether the process had the modules of the server when it began."""
    return [os.environ["RANK"], "actor_worker" in sys.modules]


@pytest.mark.parametrize("driver", [False, True])
def test_processes_are_no_forks_where_a_driver_was_touched(tmp_path, monkeypatch, driver):
    """On a GPU the tests' models could not be made: the server of forks had initialized CUDA."""
    places = tmp_path / "nvidiactl", tmp_path / "dxg"
    monkeypatch.setattr(ranks, "DRIVERS", places)
    if driver:
        places[0].touch()
    found = forks.answers(forks.start_ranks(tell, 2, tmp_path / "ranks"), tmp_path / "ranks", 60)
    assert found == [["0", not driver], ["1", not driver]]
    assert "--skip-done" in conftest.program("eval", "--help").stdout
