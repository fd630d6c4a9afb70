"""Ranks on two hosts that share nothing but a cable and a directory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import two_hosts
from conftest import ROOT, environment, tango_settings

pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.fixture
def on_both():
    if why := two_hosts.missing():
        pytest.skip(f"no network namespaces: {why}")

    def run(*arguments: str) -> None:
        words = [sys.executable, "tests/two_hosts.py", sys.executable, "-m", "megatron_rl.main", *arguments]
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    return run


def test_embedded_engines_on_two_hosts_get_each_the_other_hosts_shards(on_both, last_letter, tmp_path):
    """The model is cut over the hosts; every engine is whole. The gate compares their log-probs with the trainer's."""
    cut = [f"roles.{role}.layout.tp=2" for role in ("generator", "verifier")]
    on_both("train", *tango_settings(last_letter, tmp_path, "run"), *cut)
    refits = [json.loads(line) for line in (tmp_path / "run/refits.jsonl").read_text().splitlines()]
    assert {row["role"] for row in refits} == {"generator", "verifier"} and all(row["refit/gigabytes"] > 0 for row in refits)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [value for row in rows for name, value in row["metrics"].items() if "gap" in name]
    assert gaps and max(gaps) < 1e-4
