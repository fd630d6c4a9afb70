"""A run whose disk fills while it saves says so in our words, and goes on from the checkpoint before."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment, program, tango_settings

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def figures(run: Path) -> list[dict]:
    """metrics.jsonl without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def test_hostile_full_disk_in_a_checkpoint(last_letter, tmp_path):
    """No file of the second start may grow beyond 200 kB: its metrics fit, and its checkpoints do not. The third start
    does what a run does whose disk was never full. A bit is flipped in between, too: that checkpoint is passed over."""
    program("train", *tango_settings(last_letter, tmp_path, "whole"))
    settings = tango_settings(last_letter, tmp_path, "run")
    first = [*settings, "run.steps=1", "run.keep=3"]
    program("train", *first)
    before = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", "train", *settings, "run.resume=must", "run.keep=3"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    assert "cannot be written to" in done.stderr and " GB are free" in done.stderr, done.stderr[-3000:]
    assert "the same command again" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == before, "no half checkpoint takes space"
    program("train", *settings, "run.resume=must", "run.keep=3")
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    newest = max((tmp_path / "run/checkpoints").glob("step_*"))
    file = next(newest.glob("generator/*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)
    done = program("train", *settings, "run.resume=must", "run.keep=3")
    assert "is not what was written" in done.stdout + done.stderr
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
