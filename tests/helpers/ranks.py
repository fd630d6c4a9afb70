"""Starts real ranks for a test: one interpreter per rank, gloo, and one JSON answer per rank."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_rl.cluster.address import free_port

ROOT = Path(__file__).parents[2]


def run_ranks(script: Path, world: int, out: Path, *arguments: str, timeout_s: float = 900) -> list[Any]:
    """Runs `script OUT/rank{r}.json *arguments` on `world` ranks.

    Returns what each wrote; fails with the failed ranks' output.
    """
    out.mkdir(parents=True, exist_ok=True)
    port, children = str(free_port("127.0.0.1")), []
    path = os.pathsep.join(
        [
            str(ROOT),
            str(ROOT / "tests/helpers"),
            str(ROOT / "tests/multi"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
        }  # fmt: skip
        log = (out / f"rank{rank}.log").open("w")
        command = [sys.executable, str(script), str(out / f"rank{rank}.json"), *arguments]
        children.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
    failed, deadline = [], time.monotonic() + timeout_s
    while not failed and any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children) if child.poll()]
        if time.monotonic() > deadline:
            failed = [rank for rank, child in enumerate(children) if child.poll() is None]
        select.select([], [], [], 0.05)
    failed = failed or [rank for rank, child in enumerate(children) if child.poll()]
    ends = [child.poll() for child in children]
    for child in children:  # when one rank fails the others would wait for it
        child.kill()
        child.wait()
    assert not failed, "\n".join(
        f"rank {r} of {world} (status {ends[r]}):\n" + (out / f"rank{r}.log").read_text()[-3000:] for r in failed
    )
    return [json.loads((out / f"rank{r}.json").read_text()) for r in range(world)]
