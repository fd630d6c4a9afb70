"""A run whose disk fills, or that is killed, while it saves goes on from the checkpoint before, and says what was
wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, environment, program, tango_settings
from limits import RUN_S
from transformers import AutoModelForCausalLM

from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.run.checkpoint import Checkpoint, Checkpoints, known_digests
from megatron_rl.run.file_checksums import wrong

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def metrics(run: Path) -> list[dict]:
    """metrics.jsonl without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("time", "speed")} for row in rows]


@pytest.fixture(scope="module")
def whole(last_letter, tmp_path_factory) -> list[dict]:
    """The metrics of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    program("train", *tango_settings(last_letter, out, "run"))
    return metrics(out / "run")


@pytest.mark.matrix
def test_hostile_full_disk_in_a_checkpoint(last_letter, whole, tmp_path):
    """No file of the second start may grow beyond 200 kB: its metrics fit, and its checkpoints do not. The third start
    does what a run does whose disk was never full. A bit is flipped in between, too: that checkpoint is passed over."""
    settings = tango_settings(last_letter, tmp_path, "run")
    first = [*settings, "run.iterations=1", "run.keep=3"]
    program("train", *first)
    before = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", "train", *settings, "run.resume=must", "run.keep=3"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_S, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    assert "cannot be written to" in done.stderr and " GB are free" in done.stderr, done.stderr[-3000:]
    assert "the same command again" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == before, "no half checkpoint takes space"
    program("train", *settings, "run.resume=must", "run.keep=3")
    assert metrics(tmp_path / "run") == whole
    newest = max((tmp_path / "run/checkpoints").glob("iteration_*"))
    file = next(newest.glob("generator/*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)
    done = program("train", *settings, "run.resume=must", "run.keep=3")
    assert "is not what was written" in done.stdout + done.stderr
    assert metrics(tmp_path / "run") == whole


@pytest.mark.matrix
def test_hostile_kill_in_the_middle_of_a_background_checkpoint(last_letter, whole, tmp_path):
    """All processes of the run are killed while a writer has begun a checkpoint that is not complete."""
    settings = [*tango_settings(last_letter, tmp_path, "run"), "run.async_save=true"]
    place = tmp_path / "run/checkpoints"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.main", "train", *settings],
            cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + RUN_S
    try:
        while not begun(place):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.001)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    left = begun(place)
    assert left, "a checkpoint that is not complete"
    found = Checkpoints(place).newest(lambda path: wrong(path, known_digests(path)))
    assert isinstance(found, Checkpoint) and found.number >= 1 and f".{found.path.name}.tmp" not in left
    program("train", *settings)
    assert metrics(tmp_path / "run") == whole and not begun(place)


def begun(place: Path) -> list[str]:
    """Returns the names of checkpoints that are being written behind a complete one."""
    return [
        path.name for path in place.glob(".iteration_*.tmp") if [*place.glob("iteration_*")] and [*path.glob("*/*")]
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
def test_faults_a_full_disk_under_the_final_model_is_told_and_the_same_command_writes_it(tmp_path):
    base = write_tiny_model(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    words = [
        "sft", f"model.path={base}", f"data.train={tmp_path}/rows.jsonl", "steps=2", "run.name=run",
        f"run.dir={tmp_path}", "launch.nproc=1",
    ]  # fmt: skip
    small = tmp_path / "run/.model.partial"  # where the export writes before it takes its name
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "tmpfs", str(small)], check=True)
    try:
        done = program(*words, check=False)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    model = tmp_path / "run/model"
    assert f"the trained model cannot be written to {model}" in done.stderr and "last checkpoint" in done.stderr
    program(*words)
    AutoModelForCausalLM.from_pretrained(model)
