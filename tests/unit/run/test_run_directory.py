"""Who may start in a run directory, what is written to it, and leaving on a signal."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from limits import PROCESS_S

from megatron_rl.config.schema import Run
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import (
    Interrupts,
    RunDirectory,
    RunError,
    config_changes,
    only_one,
    open_run,
)

CONFIG = "run: {seed: 0, resume: auto, keep: 2}\nroles:\n  generator: {optimizer: {lr: 1.0e-06}}\n"


def run_at(tmp_path, resume="auto"):
    return Run(dir=str(tmp_path), name="demo", resume=resume)


def save_something(path):
    (path / "x").write_text("x")


def test_a_new_directory_has_its_config_and_its_places(tmp_path):
    directory = open_run(run_at(tmp_path), CONFIG)
    assert directory.path == tmp_path / "demo"
    assert sorted(path.name for path in directory.path.iterdir()) == ["checkpoints", "config.yaml", "logs", "rollouts"]
    assert directory.config.read_text() == CONFIG


def test_auto_goes_on_under_the_same_config_and_ignores_what_changes_nothing(tmp_path):
    open_run(run_at(tmp_path), CONFIG)
    changed = CONFIG.replace("keep: 2", "keep: 5").replace("resume: auto", "resume: must, dir: elsewhere")
    assert open_run(run_at(tmp_path), changed).config.read_text() == changed


def test_another_config_is_refused_with_both_values_and_the_cure(tmp_path):
    Checkpoints(open_run(run_at(tmp_path), CONFIG).checkpoints).write(3, save_something)
    changed = CONFIG.replace("seed: 0", "seed: 1").replace("optimizer: {lr: 1.0e-06}", "sleep: true")
    with pytest.raises(RunError) as error:
        open_run(run_at(tmp_path), changed)
    assert "run.seed: 0 -> 1" in str(error.value)
    assert "roles.generator.optimizer.lr: 1e-06 -> (not set)" in str(error.value)
    assert "roles.generator.sleep: (not set) -> True" in str(error.value)
    assert "run.resume=must" in str(error.value) and "run.name" in str(error.value)
    assert (tmp_path / "demo" / "config.yaml").read_text() == CONFIG


def test_never_refuses_a_used_directory(tmp_path):
    open_run(run_at(tmp_path, "never"), CONFIG)
    with pytest.raises(RunError, match="run.resume=never"):
        open_run(run_at(tmp_path, "never"), CONFIG)


def test_must_needs_a_complete_checkpoint_and_keeps_the_old_config(tmp_path):
    with pytest.raises(RunError, match="no complete checkpoint"):
        open_run(run_at(tmp_path, "must"), CONFIG)
    assert not (tmp_path / "demo").exists()
    directory = open_run(run_at(tmp_path), CONFIG)
    Checkpoints(directory.checkpoints).write(3, save_something)
    changed = CONFIG.replace("seed: 0", "seed: 1")
    open_run(run_at(tmp_path, "must"), changed)
    assert directory.config.read_text() == changed
    assert (directory.path / "config.1.yaml").read_text() == CONFIG


def test_a_run_that_failed_before_it_began_does_not_hold_its_name(tmp_path):
    open_run(run_at(tmp_path), CONFIG)
    changed = CONFIG.replace("seed: 0", "seed: 1")
    assert open_run(run_at(tmp_path), changed).config.read_text() == changed


def test_metrics_without_a_config_are_not_written_over(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="no config.yaml"):
        open_run(run_at(tmp_path), CONFIG)


def test_changes_see_lists_and_emptied_mappings():
    assert config_changes("a: {b: [1, 2]}", "a: {b: [1, 3]}") == ["a.b: [1, 2] -> [1, 3]"]
    assert config_changes("a: {b: {}}", "a: {b: {c: 1}}") == ["a.b: {} -> (not set)", "a.b.c: (not set) -> 1"]
    assert config_changes("sinks: {tensorboard: false}", "sinks: {tensorboard: true}") == []


def test_summary_is_merged_key_by_key(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_summary() == {}
    directory.update_summary({"updates": 1, "seconds": {"wall": 1.0}})
    assert directory.update_summary({"updates": 2, "end": {"f1": 0.5}}) == {
        "updates": 2,
        "seconds": {"wall": 1.0},
        "end": {"f1": 0.5},
    }
    assert json.loads(directory.summary.read_text()) == directory.read_summary()


@pytest.mark.parametrize("number", Interrupts.SIGNALS)
def test_the_first_signal_asks_to_leave_and_handlers_come_back(number, capfd):
    before = [signal.getsignal(each) for each in Interrupts.SIGNALS]
    with Interrupts() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signal_name == signal.Signals(number).name
    assert [signal.getsignal(each) for each in Interrupts.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "saving and leaving" in capfd.readouterr().err


WAITER = """
import ctypes, signal, sys
from megatron_rl.run.run_directory import Interrupts
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
with Interrupts():
    print("ready", flush=True)
    while True:
        libc.pthread_mutex_lock(mutex) if sys.argv[1] == "deaf" else signal.pause()
"""


@pytest.fixture
def waiter():
    started = []

    def start(how):
        process = subprocess.Popen(
            [sys.executable, "-c", WAITER, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_interrupt_leaves_at_once_with_130(waiter):
    process = waiter("listening")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("SIGINT: saving and leaving")
    process.send_signal(signal.SIGTERM)  # what a launcher adds is no second interrupt
    process.send_signal(signal.SIGINT)  # nor is the launcher's copy of the same key press
    time.sleep(2 * Interrupts.SAME_PRESS_S)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(PROCESS_S) == 130


def test_interrupts_end_a_main_thread_that_never_returns_to_python(waiter):
    """It waits for a lock in C, as inside a collective: no Python handler runs. (Signals sent too fast are one, so a
    few are sent.)
    """
    process = waiter("deaf")
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(0.1) == 130
            return
        except subprocess.TimeoutExpired:
            continue
    pytest.fail("still there after 100 interrupts")


def test_a_forked_worker_has_its_own_signals_again():
    """Otherwise a worker would shrug off terminate(), and its share of one Ctrl-C would count as the second of ours."""
    with Interrupts(announce=False) as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
        assert not stop.requested


def test_a_run_directory_has_one_trainer_at_a_time(tmp_path):
    code = (
        "from pathlib import Path\nfrom megatron_rl.run.run_directory import only_one\n"
        f"with only_one(Path({str(tmp_path)!r})): print('in')"
    )
    with only_one(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "is being run by process" in other.stderr and other.stdout == ""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "in\n"


def test_a_run_waits_for_one_that_was_killed_a_moment_ago(tmp_path):
    """The same command, right after a kill, was refused: a process of half a gigabyte takes a while to end."""
    holder = "import sys, time; from pathlib import Path; from megatron_rl.run.run_directory import only_one\n"
    holder += "with only_one(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(0.5)\n"
    child = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "held\n"
    with only_one(tmp_path / "run"):
        assert child.wait(PROCESS_S) == 0
