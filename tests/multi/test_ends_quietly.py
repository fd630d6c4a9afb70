"""Ctrl-C at any time, and a reader that closes the pipe, end the program without a traceback."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl import __version__
from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems

PROGRAM = [sys.executable, "-m", "megatron_rl.main"]
IMPORTING = "importing torch"  # of the line that a rank prints before its slow imports

pytestmark = pytest.mark.multi


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quiet")
    write_tiny_model(folder / "model")
    for split, count in (("train", 8), ("test", 4)):
        write_tiny_problems(folder / f"{split}.jsonl", count, seed=0)
    path = folder / "grpo.yaml"
    words = ["init", "grpo", str(path), "--model", str(folder / "model"), "--data", str(folder / "train.jsonl")]
    subprocess.run([*PROGRAM, *words], check=True, capture_output=True)
    return path


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("after_s", (0.0, 2.0))
def test_ctrl_c_while_a_run_starts(config, tmp_path, ranks, after_s):
    words = ["train", str(config), f"launch.nproc={ranks}", f"run.dir={tmp_path}"]
    run = subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert run.stdout is not None
    said = ""
    while IMPORTING not in said and (line := run.stdout.readline()):
        said += line
    time.sleep(after_s)
    os.killpg(run.pid, signal.SIGINT)  # the terminal sends it to all processes of the run
    said += run.communicate(timeout=120)[0]
    assert IMPORTING in said and "Traceback" not in said, said
    assert run.returncode in (130, -signal.SIGINT), said


def test_a_reader_that_closes_the_pipe():
    words = [*PROGRAM, "settings", "--all"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        fcntl.fcntl(run.stdout, fcntl.F_SETPIPE_SZ, 4096)  # less than the program writes
        assert run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait() == 1


def test_version():
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"megatron-rl {__version__}\n"
