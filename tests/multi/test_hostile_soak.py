"""A soak of ten iterations: a run that is killed comes to its end, loses no prompt, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment
from limits import RUN_S

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def test_hostile_soak_of_a_few_iterations(tmp_path):
    """`make soak` has 2,000 iterations, servers that lie, and a calm run whose lines the struck one must have."""
    words = ["--iterations", "20", "--runs", "struck", "--kills", "1", "--fills", "0", "--out", str(tmp_path / "soak")]
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", *words, "--json", str(tmp_path / "soak.json")],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads((tmp_path / "soak.json").read_text())
    struck = json.loads((tmp_path / "soak/struck.json").read_text())
    assert struck["starts"] == 2 and sum(struck["struck"].values()) == 2, struck
    bars = [name for name, limit in told["limits"].items() if limit == 0.0]
    zero = {name: told["metrics"][name] for name in bars}
    assert len(zero) == 6 and not any(zero.values()), (zero, struck["left"], struck["half_written"])
