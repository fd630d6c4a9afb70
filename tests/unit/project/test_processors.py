"""Numbers do not depend on the processor's instructions: `make test-more ONLY=processors` runs more of this."""

from __future__ import annotations

import subprocess
import sys

import pytest
from forks import environment
from processors import as_on
from ranks import ROOT

SHOW = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_supported())"


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.matrix
def test_losses_hold_without_avx512(monkeypatch):
    as_on(monkeypatch, "avx2")
    assert run("-c", SHOW).split() == ["AVX2", "False"]
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/algorithms/test_policy_loss.py")
