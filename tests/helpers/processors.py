"""Has programs that a test starts compute as they would on another processor."""

from __future__ import annotations

import os

import pytest
from ranks import ROOT


def as_on(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """Sets what tests/processors/sitecustomize.py reads. Programs that are forked from this process, or from the server
    of forks, have started already: for them nothing changes, for a server that they start it does.
    """
    monkeypatch.setenv("MEGATRON_RL_TEST_PROCESSOR", processor)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/processors"), prepend=os.pathsep)
