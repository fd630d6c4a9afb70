"""The checkpoints of a run on the driver: what the run reserves for one before the end of its job."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace

from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.session.run_checkpoints import RunCheckpoints


def test_the_first_checkpoint_measures_all_policies_and_the_commit(tmp_path, monkeypatch):
    """Policies on the same ranks are saved one after the other, and the files are flushed at the end."""
    checkpoints, measured = Checkpoints(tmp_path / "checkpoints", keep=2), []
    commit = checkpoints.commit
    monkeypatch.setattr(checkpoints, "commit", lambda number: (time.sleep(0.2), commit(number)))

    def call(name, policy, number, behind, *, bulk):
        (checkpoints.pending(number) / policy / "__0_0.distcp").write_bytes(b"weights")
        answer = Future()
        answer.set_result({"generator": 2.0, "verifier": 3.0}[policy])
        return answer

    fleet = SimpleNamespace(serve=lambda name, handler: None, call=call, engines=SimpleNamespace(clear=lambda: None))
    driver = SimpleNamespace(checkpoints=checkpoints, leave=SimpleNamespace(saved=measured.append))
    policies, export = ["generator", "verifier"], lambda place: None
    run = RunCheckpoints(fleet, {}, policies, driver, None, export, background=True)  # type: ignore[arg-type]
    assert run.save(1, {}) == 1
    [seconds] = measured
    assert seconds >= 5.2
