"""Runs on two hosts that share nothing but a cable and a directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import two_hosts
from conftest import ROOT, environment, tango_settings
from limits import RUN_S
from test_engines_vllm import PYTHON

PROGRAM = [sys.executable, "-m", "megatron_rl.main"]
CUT = [f"roles.{role}.layout.tp=2" for role in ("generator", "verifier")]
pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.fixture
def hosts():
    if why := two_hosts.missing():
        pytest.skip(f"no network namespaces: {why}")

    def run(*words: str) -> None:
        command = [sys.executable, "tests/helpers/two_hosts.py", *words]
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, said = started.communicate(timeout=RUN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
        assert started.returncode == 0, said[-4000:]

    return run


def check(run: Path, *roles: str) -> None:
    """Weights crossed over, and engines and trainer agree on what those are."""
    refits = [json.loads(line) for line in (run / "refits.jsonl").read_text().splitlines()]
    assert {row["role"] for row in refits} == {*roles} and all(row["refit/gigabytes"] > 0 for row in refits)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [value for row in rows for name, value in row["metrics"].items() if "gap" in name]
    assert gaps and max(gaps) < 1e-4


def test_embedded_engines_on_two_hosts_get_each_the_other_hosts_shards(hosts, last_letter, tmp_path):
    """The models are cut over the hosts; every engine is whole."""
    hosts(*PROGRAM, "train", *tango_settings(last_letter, tmp_path, "run"), *CUT)
    check(tmp_path / "run", "generator", "verifier")


@pytest.mark.servers
@pytest.mark.matrix  # make test-more ONLY=hosts
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it")
def test_servers_on_another_host_than_the_trainer_get_its_weights(hosts, last_letter, tmp_path):
    settings = [
        "examples/miniatures/last_letter/grpo.yaml", f"roles.generator.model.path={last_letter}/generator/model",
        f"data.path={last_letter}/task/train.jsonl",
        f"evaluation.sets=[{{path: {last_letter}/task/test.jsonl, settings: last_letter}}]",
        "evaluation.limit=32", "recipe.args.updates=2", "run.prompts_per_iteration=8", f"run.dir={tmp_path}",
        "run.name=run", CUT[0], "engine.kind=vllm", f"engine.python={PYTHON}", "engine.start=false",
    ]  # fmt: skip
    serve = [*PROGRAM, "serve", *settings, "engine.host=cable1", "--role=generator"]
    hosts(*PROGRAM, "train", *settings, "engine.host=cable0", "launch.nproc=2", two_hosts.AND, *serve)
    check(tmp_path / "run", "generator")
