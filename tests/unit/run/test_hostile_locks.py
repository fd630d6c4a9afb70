"""Locks on a file system without flock. The kernel itself says so here, by a filter of system calls (seccomp)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import struct
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_rl.config.schema import ConfigError
from megatron_rl.jobs.doctor import _files
from megatron_rl.refit.shared_memory_transport import SharedMemory
from megatron_rl.run import directory_lock
from megatron_rl.run.run_directory import RunBusy, only_one
from megatron_rl.session.output_directory import fresh

FLOCK = (73, 32)  # its number on x86-64 and aarch64


def without_flock(number: int) -> None:
    """Has the kernel answer flock with this error from now on, in this process and its children."""
    call = FLOCK[os.uname().machine != "x86_64"]
    # load the number of the call; if it is flock's, return the error; else allow the call
    lines = ((0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | number), (0x06, 0, 0, 0x7FFF0000))
    program = b"".join(struct.pack("=HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, struct.pack("@HP", len(lines), ctypes.addressof(buffer)), 0, 0) == 0  # PR_SET_SECCOMP


class Child:
    """A fork of this process in which there is no flock. It runs `function(say, *arguments)`."""

    def __init__(self, function, *arguments, number: int = errno.ENOLCK) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                without_flock(number)
                function(lambda text: os.write(write, f"{text}\n".encode()), *arguments)
                status = 0
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(status)
        os.close(write)

    def hear(self) -> str:
        """Returns the next line that the child says."""
        out = b""
        while not out.endswith(b"\n") and (byte := os.read(self._read, 1)):
            out += byte
        return out.decode().strip()

    def end(self, number: int = 0) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        os.close(self._read)
        return os.waitpid(self.pid, 0)[1]


def stay(say, directory):
    with only_one(directory):
        say("in")
        signal.pause()


def visit(say, directory, **job):
    with only_one(directory, **job):
        say("in")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_hostile_file_system_without_flock_has_one_trainer_too(tmp_path, number):
    """ENOLCK was an error of the run; a holder that is killed leaves nothing that is in the way."""
    first = Child(stay, tmp_path, number=number)
    assert first.hear() == "in"
    held = tmp_path / "lock.held"
    second = Child(visit, tmp_path, number=number)
    said = second.hear()
    assert said.startswith(f"RunBusy: {tmp_path} is being run by process {first.pid} on "), said
    assert f"when that process is gone, remove {held}" in said
    second.end()
    first.end(signal.SIGKILL)
    assert held.exists()
    third = Child(visit, tmp_path, number=number)
    assert third.hear() == "in" and third.end() == 0 and not held.exists()


def test_hostile_errors_of_flock_that_mean_something_else_are_told(tmp_path):
    child = Child(visit, tmp_path, number=errno.EIO)
    assert child.hear().startswith("OSError: [Errno 5]") and child.end() != 0


def held_by(directory: Path, **changes) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "lock.held"
    path.write_text(json.dumps(asdict(replace(directory_lock.own_name(), **changes))))
    return path


@pytest.mark.parametrize(
    ("changes", "job", "is_in"),
    [
        ({"pid": 1 << 22, "start": 5}, {}, True),  # no such process
        ({"start": 5}, {}, True),  # its number is another's now
        ({"host": "elsewhere", "start": 5}, {}, False),  # nobody here can know
        ({"boot": "another", "start": 5}, {}, False),  # a host of the same name
        ({"space": "pid:[1]", "start": 5}, {}, False),  # a container
        ({"host": "elsewhere", "job": "17", "restart": 0}, {"job": "17", "restart": 1}, True),  # Slurm ended it
        ({"host": "elsewhere", "job": "17", "restart": 1}, {"job": "17", "restart": 1}, False),
        ({"host": "elsewhere", "job": "16", "restart": 0}, {"job": "17", "restart": 1}, False),
        ({}, {}, False),  # this process lives
    ],
)
def test_hostile_leftover_of_a_lock_is_taken_over_only_from_one_that_is_gone(tmp_path, changes, job, is_in):
    path = held_by(tmp_path, **changes)
    child = Child(lambda say: visit(say, tmp_path, **job))
    said = child.hear()
    assert (said == "in") is is_in and child.end() == (0 if is_in else 256), said
    assert path.exists() is not is_in
    assert is_in or "RunBusy" in said


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"host": "a", "boot": "", "space": "", "pid": "x"}'])
def test_hostile_damaged_lock_is_not_taken_over(tmp_path, monkeypatch, text):
    (tmp_path / "lock.held").write_text(text)
    monkeypatch.setattr(directory_lock, "UNREAD_S", 0.1)
    child = Child(visit, tmp_path)
    assert "is being run by a process that is not known: end that first, or, when" in child.hear()
    child.end()


def test_hostile_rush_for_a_leftover_lock_lets_one_in_at_a_time(tmp_path):
    """Of several that find the lock of one that is gone, each gets it in its turn, and no two have it at once."""

    def take(say):
        entered = tmp_path / "entered"
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                with only_one(tmp_path):
                    file = os.open(entered, os.O_CREAT | os.O_EXCL)  # fails when another is in
                    time.sleep(0.02)
                    entered.unlink()
                    os.close(file)
                say("in")
                return
            except RunBusy:
                time.sleep(0.001)
        say("late")

    held_by(tmp_path, pid=1 << 22)
    children = [Child(take) for _ in range(6)]
    assert [child.hear() for child in children] == ["in"] * 6
    assert [child.end() for child in children] == [0] * 6


def test_hostile_file_system_without_flock_takes_conversions_one_at_a_time(tmp_path):
    def convert(say):
        with fresh(tmp_path / "out", wanted_bytes=0) as folder:
            (folder / "file").touch()
            try:
                with fresh(tmp_path / "out", wanted_bytes=0):
                    say("twice")
            except ConfigError as error:
                say(error)

    child = Child(convert)
    assert f"process {child.pid} on" in (said := child.hear()) and "is writing" in said and child.end() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out/file").exists()


def test_hostile_file_system_without_flock_is_noted_by_doctor_and_stops_no_refit(tmp_path):
    def look(say):
        check = next(_files(tmp_path, quick=True))
        say(f"{check.verdict} {check.finding} {check.cure}")
        memory = SharedMemory()
        address, slot = memory.allocate(1 << 16, None)
        slot[0] = 1
        memory.free(address)
        say("freed")

    child = Child(look)
    said = child.hear()
    assert said.startswith("note ") and "has no flock" in said and "-o flock" in said
    assert child.hear() == "freed" and child.end() == 0
