"""`megatron-rl train` with real servers in processes of their own: rollouts ahead of training, a killed trainer,
servers that live on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, environment, program, tango_settings
from limits import RUN_S
from test_engines_vllm import PYTHON

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
ROLES = ("generator", "verifier")


@pytest.fixture(scope="module")
def run(last_letter, tmp_path_factory):
    """A run of seven iterations whose trainer is killed with SIGKILL after the third, and started again; its servers
    are started once.
    """
    out = tmp_path_factory.mktemp("served")
    arguments = [
        *tango_settings(last_letter, out, "run"), "engine.kind=vllm", f"engine.python={PYTHON}", "engine.start=false",
        "rollouts.max_staleness=2", "run.save_every=2", "evaluation.every=0",
    ]  # fmt: skip
    servers = [
        subprocess.Popen(
            command("serve", *arguments, f"--role={role}"), cwd=ROOT, env=environment(), start_new_session=True
        )
        for role in ROLES
    ]
    first = start(arguments, out / "first.log")
    try:
        wait_for(lambda: iterations(out / "run") >= 3, first, out / "first.log")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        kept = sorted(p.name for p in (out / "run/rollouts").glob("iteration_*.parquet"))
        before = {p.name: p.stat().st_mtime_ns for p in (out / "run/rollouts").glob("iteration_*.parquet")}
        program("train", *arguments)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(RUN_S)
    return out / "run", kept, before


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "megatron_rl.main", *words]


def start(arguments, log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(
            command("train", *arguments),
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def iterations(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return sum(json.loads(line)["scope"] in ROLES for line in path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition, process: subprocess.Popen, log: Path, timeout_s: float = RUN_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_rollouts_ahead_are_never_staler_than_allowed_and_some_are_stale(run):
    ages = [row["metrics"]["staleness"] for row in rows(run[0]) if row["scope"] in ROLES]
    assert len(ages) == 7 and 1.0 <= max(ages) <= 2.0, (
        "the verifier's warm-up, five of the generator, one of the verifier in between"
    )


def test_a_killed_trainer_did_not_play_again_what_was_played(run):
    directory, kept, before = run
    assert kept and {name: (directory / "rollouts" / name).stat().st_mtime_ns for name in kept} == before
    assert [row["iteration"] for row in rows(directory) if row["scope"] in ROLES] == list(range(7))


def test_both_engines_and_trainers_agree_to_the_end(run):
    gaps = [
        row["metrics"]["engine_gap"]
        for row in rows(run[0])
        if row["scope"] in ROLES and row["metrics"]["staleness"] == 0
    ]
    assert gaps and max(gaps) < 1e-3
    refits = [json.loads(line) for line in (run[0] / "refits.jsonl").read_text().splitlines()]
    assert {r["role"] for r in refits} == set(ROLES)


def test_no_server_is_left(run):
    assert not list((run[0] / "engines").glob("*.json"))


def test_eval_gives_the_same_by_a_server_as_by_the_embedded_engine(last_letter, tmp_path):
    shared = [
        f"model.path={last_letter}/generator/model",
        f"sets=[{{path: {last_letter}/task/test.jsonl, settings: last_letter}}]",
        "template=examples/miniatures/last_letter/prompts/generator.txt",
        "sampling.max_tokens=40",
        "reward.target=megatron_rl.contrib.last_letter:grade",
    ]  # fmt: skip
    rows = {}
    for name, engine in (("embedded", []), ("vllm", ["engine.kind=vllm", f"engine.python={PYTHON}"])):
        text = program("eval", *shared, *engine, f"output={tmp_path}/{name}.json").stdout
        rows[name] = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert "accuracy" in text and len(rows[name]) == 32 and (tmp_path / f"{name}.html").exists()
    assert rows["vllm"] == rows["embedded"] and any(row["score"] for row in rows["vllm"])
