"""A run that waits for servers is no hung run: the wait has a limit of its own."""

from __future__ import annotations

import json
import time

import cut_runs
import pytest
from conftest import program

pytestmark = [pytest.mark.multi, pytest.mark.slow]
WAIT_S, HANG_S = 14.0, 8.0  # a start of the ranks may take some seconds without a sign


def test_hostile_wait_for_a_server_is_no_hang(tmp_path):
    """All servers of a role were gone for longer than `run.hang_after_s`: each rank wrote its stacks, and the run ended
    with a message about a hang, long before `engine.wait_s` was over."""
    cut_runs.write_players(tmp_path)
    cut_runs.write_data(tmp_path, [])
    settings = cut_runs.dapo(tmp_path, "run")
    settings["engine"] = {"kind": "vllm", "start": False, "wait_s": WAIT_S}
    settings["run"] |= {"hang_after_s": HANG_S, "resume": "never"}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    start = time.monotonic()
    done = program("train", file, check=False)
    said = done.stdout + done.stderr
    assert f"engine for {WAIT_S:g} s (engine.wait_s)" in said and done.returncode == 1, said[-3000:]
    assert "nothing moved for" not in said and not [*(tmp_path / "runs/run/logs").glob("stacks_*")], said[-3000:]
    assert time.monotonic() - start > WAIT_S
