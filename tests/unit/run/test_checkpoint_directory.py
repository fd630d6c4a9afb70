"""Checkpoint directories are complete or not there, whatever happens while they are written."""

import json
import logging
import os
import signal
import subprocess
import sys

import pytest

from megatron_rl.run.checkpoint import MANIFEST, CheckpointError, Checkpoints, damage, read_json, write_json


def save(content):
    def into(path):
        (path / "generator").mkdir()
        (path / "generator" / "shard_0.bin").write_bytes(content)
        write_json(path / "state.json", {"iteration": len(content)})

    return into


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_write_and_read_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest() is None
    written = checkpoints.write(12, save(b"weights"))
    assert written == checkpoints.newest()
    assert (written.number, written.path.name) == (12, "iteration_000012")
    assert written.read_state() == {"iteration": 7}
    manifest = read_json(written.path / MANIFEST)
    assert manifest | {"digests": None} == {
        "number": 12,
        "files": {"generator/shard_0.bin": 7, "state.json": (written.path / "state.json").stat().st_size},
        "digests": None,
    }
    assert manifest["digests"].keys() == manifest["files"].keys()


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2, 10, 9):  # by number, not by name or time
        checkpoints.write(number, save(b"x"))
    assert names(tmp_path) == ["iteration_000009", "iteration_000010"]


def test_what_was_just_written_is_never_removed(tmp_path):
    for number in (5, 7):
        Checkpoints(tmp_path, keep=2).write(number, save(b"x"))
    assert Checkpoints(tmp_path, keep=1).write(3, save(b"x")).path.exists()
    assert names(tmp_path) == ["iteration_000003", "iteration_000007"]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: (path / MANIFEST).unlink(), "no COMPLETE.json"),
        (lambda path: (path / MANIFEST).write_text('{"files": '), "cannot be read"),
        (lambda path: (path / MANIFEST).write_text("[]"), "cannot be read"),
        (lambda path: (path / "generator" / "shard_0.bin").write_bytes(b"weig"), "shard_0.bin has 4 bytes, not 7"),
        (lambda path: (path / "generator" / "shard_0.bin").unlink(), "shard_0.bin is missing"),
    ],
)
def test_a_damaged_one_is_skipped_and_named(tmp_path, caplog, harm, reason):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, save(b"older"))
    harm(checkpoints.write(2, save(b"weights")).path)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest().number == 1
    assert "iteration_000002" in caplog.text and reason in caplog.text


def test_damaged_ones_never_push_out_a_complete_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(1, save(b"good"))
    for number in (2, 3):
        path = checkpoints.path(number)
        path.mkdir()
        (path / "part").write_text("x")
    checkpoints.prune(99)
    assert checkpoints.newest().number == 1


def test_leftovers_are_removed_at_the_next_begin(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, save(b"x"))
    (checkpoints.begin(2) / "half").write_text("half")
    assert checkpoints.newest().number == 1
    checkpoints.begin(3)
    assert names(tmp_path) == [".iteration_000003.tmp", "iteration_000001"]


def test_commit_without_begin_or_without_files_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="call begin"):
        checkpoints.commit(4)
    checkpoints.begin(4)
    with pytest.raises(CheckpointError, match="save into it on every rank"):
        checkpoints.commit(4)
    assert checkpoints.newest() is None


def test_writing_the_same_number_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(4, save(b"first"))
    again = checkpoints.write(4, save(b"second"))
    assert (again.path / "generator" / "shard_0.bin").read_bytes() == b"second"
    assert names(tmp_path) == ["iteration_000004"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(4, save(b"first"))
    # as a kill inside the replacement leaves it
    os.rename(tmp_path / "iteration_000004", tmp_path / ".iteration_000004.old")
    assert checkpoints.newest().read_state() == {"iteration": 5}
    checkpoints.begin(5)
    assert checkpoints.newest().number == 4
    checkpoints.write(4, save(b"second"))
    checkpoints.begin(5)
    assert names(tmp_path) == [".iteration_000005.tmp", "iteration_000004"]


WRITER = """
import sys
from pathlib import Path
from megatron_rl.run.checkpoint import Checkpoints, write_json
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
def save(path):
    for part in range(4):
        (path / f"part_{part}.bin").write_bytes(bytes([number % 251]) * 50_000)
    write_json(path / "state.json", {"number": number})
start = checkpoints.newest()
number = start.number if start else 0
print("ready", flush=True)
while True:
    number += 1
    checkpoints.write(number, save)
    print(number, flush=True)
"""


def test_resume_after_sigkill_at_any_point_finds_a_whole_checkpoint(tmp_path):
    """A process is killed while it writes. The newest checkpoint is whole, and at least the last one announced."""
    reached = 0
    for lines in (1, 2, 5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        for _ in range(lines):
            reached = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        newest = Checkpoints(tmp_path).newest()
        assert newest.number >= reached
        assert damage(newest.path) is None
        assert newest.read_state() == {"number": newest.number}
        assert set((newest.path / "part_3.bin").read_bytes()) == {newest.number % 251}
    assert len([name for name in names(tmp_path) if name.startswith("step_")]) <= 3  # two, and one not yet pruned


def test_json_is_replaced_whole(tmp_path):
    write_json(tmp_path / "a.json", {"x": [1.5, None]})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1.5, None]}
    assert names(tmp_path) == ["a.json"]


def test_protected_checkpoints_stay_and_are_not_counted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for number in range(1, 6):
        checkpoints.write(number, lambda directory: (directory / "part").write_text("x") and None)
        if number == 2:
            checkpoints.protected = frozenset({0, 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_000002", "iteration_000005"]
    assert checkpoints.newest().number == 5
    checkpoints.protected = frozenset()
    checkpoints.prune()
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000005"]


def test_checkpoints_that_hold_a_reference_stay_as_long_as_one_that_needs_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.reference_every = (4,)
    kept = []
    for number in range(1, 12):
        checkpoints.write(number, save(b"x"))
        kept.append(sorted(int(path.name[-6:]) for path in tmp_path.glob("iteration_*")))
    wanted = [[3, 4], [3, 4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8], [4, 7, 8, 9], [8, 9, 10], [8, 10, 11]]
    assert kept[3:] == wanted, "7 needs 4 as its reference; a reference is not counted"
