"""Ranks that start while strangers are at rank 0's port: nobody takes a rank's place, and the run goes on."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from limits import RUN_S
from ranks import run_ranks

from megatron_rl.key_value_store.store_client import KeyValueClient, KeyValueStranger

WORKER = Path(__file__).parents[1] / "helpers" / "security_worker.py"


class Planted:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return exec, (f"open({str(self.file)!r}, 'w').close()",)


def come(shared: Path, said: list[str]) -> None:
    """Does at rank 0's port what a stranger can, before the other ranks come."""
    end = time.monotonic() + RUN_S
    while not (files := [*shared.glob("ranks.*.json")]):
        assert time.monotonic() < end
        time.sleep(0.02)
    place = "127.0.0.1", json.loads(files[0].read_text())["port"]  # a scan of ports finds it too
    said.append(oct(files[0].stat().st_mode & 0o777))
    silent = [socket.create_connection(place) for _ in range(20)]
    try:
        store = dist.TCPStore(*place, None, False, timedelta(seconds=1), wait_for_workers=False)
        store.set("0//cpu//0/1", pickle.dumps(Planted(shared / "planted")))
        said.append("a stranger's key was taken")
    except (RuntimeError, ValueError):
        said.append("no store for strangers")
    try:
        KeyValueClient(*place, bytes(32), 5.0)
    except KeyValueStranger:
        said.append("no guess is taken")
    (shared / "strangers_were_there").touch()
    time.sleep(1.0)
    for each in silent:
        each.close()


@pytest.mark.multi
def test_security_strangers_at_the_ranks_port_neither_join_nor_stop_the_run(tmp_path):
    """A stranger who joined before rank 1 became it, and ran code in rank 0."""
    shared, said = tmp_path / "run", list[str]()
    strangers = threading.Thread(target=come, args=(shared, said))
    strangers.start()
    found = run_ranks(WORKER, 3, tmp_path, str(shared))
    strangers.join()
    assert said == ["0o600", "no store for strangers", "no guess is taken"]
    assert found == [{"answers": [[0, 0], [1, 2], [2, 4]], "sum": 6.0, "recorded": 0}] * 3, (
        "recorded by torch for nobody"
    )
    assert not (shared / "planted").exists() and not [*shared.glob("*ranks.*")], "the secret's file is gone"
