"""A run that is killed or interrupted and resumed is, but for times, the run that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, environment, program, tango_settings
from limits import RUN_S

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def metrics(run: Path) -> list[dict]:
    """metrics.jsonl without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("time", "speed")} for row in rows]


def start(arguments, log: Path) -> subprocess.Popen:
    """The program in a process group of its own, so that all its ranks can be killed at once."""
    command = [sys.executable, "-m", "megatron_rl.main", "train", *arguments]
    with log.open("w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_for_lines(process: subprocess.Popen, path: Path, count: int, timeout_s: float = RUN_S) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and len(path.read_bytes().splitlines()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(
        f"{path} did not reach {count} lines (status "
        f"{process.poll()}):\n{(path.parent.parent / 'log').read_text()[-3000:]}"
    )


def kill_rank(launcher: subprocess.Popen, rank: int) -> bool:
    """Kills one of the ranks, which are the launcher's forks, in their order. Returns whether it still lived.

    RANK, which they set themselves, is not in the environment that others see: while this asked for it, it killed none.
    """
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # the run may just have ended
        command = psutil.Process(launcher.pid).cmdline()
        forks = [child for child in psutil.Process(launcher.pid).children() if child.cmdline() == command]
        sorted(forks, key=lambda child: (child.create_time(), child.pid))[rank].kill()
        return True
    return False


@pytest.fixture(scope="module")
def uninterrupted(last_letter, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    program("train", *tango_settings(last_letter, out, "run"))
    return out / "run"


def test_resume_after_sigkill_is_bit_for_bit_the_uninterrupted_run(last_letter, uninterrupted, tmp_path):
    arguments = [*tango_settings(last_letter, tmp_path, "run"), "run.async_save=true", "run.deterministic=true"]
    rng = random.Random(os.getpid())
    whole = metrics(uninterrupted)
    for lines, one_rank in zip(sorted(rng.sample(range(3, len(whole)), 2)), rng.sample([True, False], 2), strict=True):
        process = start(arguments, tmp_path / "log")
        try:
            wait_for_lines(process, tmp_path / "run/metrics.jsonl", lines)
            time.sleep(rng.random())
            if one_rank and process.poll() is None:  # the other rank must not wait for it for ever
                killed = kill_rank(process, 1)
                assert process.wait(RUN_S) == (137 if killed else 0)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    program("train", *arguments)
    assert metrics(tmp_path / "run") == whole
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (tmp_path / "run", uninterrupted))
    assert {k: v for k, v in ours.items() if k != "seconds"} == {k: v for k, v in theirs.items() if k != "seconds"}
    for name in ("generator", "verifier"):
        files = [run / "models" / name / "model.safetensors" for run in (tmp_path / "run", uninterrupted)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_both_roles_learned_in_the_resumed_run(uninterrupted):
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["updates"]["generator"] >= 3 and summary["updates"]["verifier"] >= 1
    assert summary["generator_accuracy_end"] >= 0.0


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["launcher", "group"])
def test_resume_after_an_interrupt_and_with_a_half_written_checkpoint(last_letter, uninterrupted, tmp_path, how):
    arguments = tango_settings(last_letter, tmp_path, "run")
    process = start(arguments, tmp_path / "log")
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 3)
    if how == "launcher":
        process.send_signal(signal.SIGINT)  # to it alone: it passes it on
    else:
        os.killpg(process.pid, signal.SIGTERM)  # to all, also to what writes a checkpoint at that moment
    assert process.wait(RUN_S) == 130
    saved = sorted((tmp_path / "run/checkpoints").glob("iteration_*"))
    assert saved, "an interrupted run saves before it leaves"
    damaged = tmp_path / "run/checkpoints/iteration_000099"
    damaged.mkdir()
    (damaged / "state.json").write_text("{")
    done = program("train", *arguments)
    assert "iteration_000099" in done.stdout + done.stderr and "skipped" in done.stdout + done.stderr
    assert metrics(tmp_path / "run") == metrics(uninterrupted)


def test_a_finished_run_started_again_changes_nothing(last_letter, uninterrupted):
    before = metrics(uninterrupted)
    program("train", *tango_settings(last_letter, uninterrupted.parent, "run"))
    assert metrics(uninterrupted) == before
