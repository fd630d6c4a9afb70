"""Runs code in a sandbox, and finds the processes of the sandboxes of a test."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import SandboxFailure, SandboxSettings


@pytest.fixture
def mark(monkeypatch):
    """Returns a text that stands in the environment of every process of the sandboxes of this test."""
    text = uuid.uuid4().hex
    monkeypatch.setitem(sandbox.ENVIRONMENT, "MARK", text)
    return text


@pytest.fixture
def built(mark):
    """Skips where no sandbox can be built, and checks afterwards that no process of a sandbox is left."""
    try:
        sandbox.require()
    except SandboxFailure as error:
        pytest.skip(str(error))
    yield
    assert not marked(mark), "processes of the sandbox are left"


def marked(mark):
    """Returns the processes of this machine in whose environment the mark stands."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                pids.append(int(place.name))
        except (OSError, ProcessLookupError):
            continue  # it ended, or it is somebody else's
    return pids


def run(code, stdin="", *, arguments=(), show_value=False, **settings):
    sandbox_settings = SandboxSettings(**{"timeout_s": 8.0} | settings)
    return sandbox.run_program(code, stdin, arguments=arguments, show_value=show_value, settings=sandbox_settings)
