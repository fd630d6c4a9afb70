"""Ranks that one command starts on one machine: what they are told, how they end, and what becomes of the others."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from fake_servers import until

from megatron_rl.megatron import checkpoint_writers
from megatron_rl.session import launch_ranks

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def tell(directory: Path) -> int:
    """Writes what this rank was told, and whether it has modules that its starter had imported."""
    found = [os.environ[name] for name in NAMES]
    (directory / os.environ["RANK"]).write_text(" ".join([*found, str("pytest" in sys.modules)]))
    return 0


def end(directory: Path, how: str) -> int:
    """Ends rank 1 in some way, while rank 0 waits to be told to leave."""
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, functools.partial(leave, directory))
        (directory / "ready").touch()
        time.sleep(60)
        return 0
    while not (directory / "ready").exists():
        time.sleep(0.01)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def end_after_the_other(directory: Path) -> int:
    """Ends rank 1, and then rank 0, each with a status of its own."""
    if os.environ["RANK"] == "1":
        (directory / "pid").write_text(str(os.getpid()))
        return 1
    while not (directory / "pid").exists() or not (directory / "pid").read_text():
        time.sleep(0.01)
    rank1 = int((directory / "pid").read_text())
    until("the launcher to wait for rank 1", lambda: not psutil.pid_exists(rank1))
    return 2


def leave(directory: Path, *unused: object) -> None:
    (directory / f"left{os.environ['RANK']}").touch()
    sys.exit(0)


def wait_to_be_told(directory: Path) -> int:
    """Waits for a signal, and says that it came."""
    signal.signal(signal.SIGUSR1, functools.partial(leave, directory))
    (directory / f"ready{os.environ['RANK']}").touch()
    time.sleep(60)
    return 0


@pytest.mark.parametrize("fork", [True, False])
def test_every_rank_is_told_its_place(tmp_path, fork):
    assert launch_ranks.start_ranks(functools.partial(tell, tmp_path), 3, fork=fork) == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [row[:4] for row in told] == [[str(rank), str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({row[4] for row in told}) == 1, "they meet at one port"


def test_the_environment_of_the_starter_stays_as_it_was(tmp_path):
    before = dict(os.environ)
    launch_ranks.start_ranks(functools.partial(tell, tmp_path), 2, fork=True)
    assert dict(os.environ) == before


@pytest.mark.parametrize(("how", "status"), [("fails", 7), ("killed", 128 + signal.SIGKILL)])
def test_when_one_rank_fails_the_others_are_told_to_leave(tmp_path, capfd, how, status):
    assert launch_ranks.start_ranks(functools.partial(end, tmp_path, how), 2, fork=True) == status
    assert (tmp_path / "left0").exists()
    assert ("rank 1 was killed by SIGKILL" in capfd.readouterr().err) == (how == "killed")


def test_the_status_is_that_of_the_first_rank_where_it_fails_too(tmp_path):
    """An error of rank 0 ends the other ranks with a status of their own, and the status was that of whichever came
    first."""
    assert launch_ranks.start_ranks(functools.partial(end_after_the_other, tmp_path), 2, fork=True) == 2


def test_a_signal_is_passed_on_to_all(tmp_path):
    def send() -> None:
        while len(list(tmp_path.glob("ready*"))) < 2 or signal.getsignal(signal.SIGUSR1) == before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    before = signal.getsignal(signal.SIGUSR1)
    sender.start()
    assert launch_ranks.start_ranks(functools.partial(wait_to_be_told, tmp_path), 2, fork=True) == 0
    sender.join()
    assert len(list(tmp_path.glob("left*"))) == 2 and signal.getsignal(signal.SIGUSR1) == before


def start_two(directory: Path) -> None:
    launch_ranks.start_ranks(functools.partial(stay, directory), 2, fork=True)


def stay(directory: Path) -> int:
    """Says which process it is, and waits to be told to leave."""
    signal.signal(signal.SIGTERM, functools.partial(leave, directory))
    (directory / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    (directory / f"ready{os.environ['RANK']}").touch()
    time.sleep(60)
    return 0


def test_ranks_leave_when_their_launcher_is_killed(tmp_path):
    """They went on without it, and the same command was refused because the run was still being run."""
    launcher = multiprocessing.get_context("fork").Process(target=start_two, args=(tmp_path,))
    launcher.start()
    until("two ranks", lambda: len(list(tmp_path.glob("ready*"))) == 2)
    launcher.kill()
    launcher.join()
    until("their end", lambda: len(list(tmp_path.glob("left*"))) == 2)


def manage(directory: Path) -> None:
    """Begins to save as a rank does, and waits."""
    tempfile.tempdir = str(directory / "tmp")
    checkpoint_writers.start_manager()
    [manager] = psutil.Process().children()[-1:]
    (directory / "pid").write_text(str(manager.pid))
    signal.pause()


def test_the_manager_of_writers_leaves_with_its_rank_and_leaves_no_files(tmp_path):
    """It stayed for ever when a rank was killed that had saved, and so did its directory."""
    (tmp_path / "tmp").mkdir()
    rank = multiprocessing.get_context("fork").Process(target=manage, args=(tmp_path,))
    rank.start()
    until("the manager", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    told = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(told["SigBlk"], 16) >> signal.SIGTERM - 1 & 1, (
        "a signal to the whole group ended it, and the save failed"
    )
    rank.kill()
    rank.join()
    until("its end", lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert not list((tmp_path / "tmp").glob("pymp-*"))


def save(directory: Path) -> None:
    """Begins to save as a rank does, with two writers that wait for ever, and waits."""
    with checkpoint_writers.one_save():
        multiprocessing.get_context("fork").Process(target=write, args=(directory, 1)).start()
    signal.pause()


def write(directory: Path, more: int) -> None:
    """Starts `more` writers, one by the other, as a save in the background does."""
    if more:
        multiprocessing.get_context("fork").Process(target=write, args=(directory, more - 1)).start()
    (directory / f"writer{os.getpid()}").touch()
    signal.pause()


def test_writers_of_a_checkpoint_end_with_their_rank(tmp_path):
    """They waited for ever and kept the rank's connections open: the other ranks and the launcher waited too."""
    rank = multiprocessing.get_context("fork").Process(target=save, args=(tmp_path,))
    rank.start()
    until("two writers", lambda: len([*tmp_path.glob("writer*")]) == 2)
    writers = [psutil.Process(int(path.name.removeprefix("writer"))) for path in tmp_path.glob("writer*")]
    rank.kill()
    _, alive = psutil.wait_procs(writers, 60)
    for writer in alive:
        writer.kill()
    rank.join()
    assert not alive


def leave_a_child(directory: Path) -> int:
    if not os.fork():
        (directory / "child").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    until("the child", lambda: (directory / "child").exists() and (directory / "child").read_text())
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_rank_that_is_killed_is_noticed_though_a_process_that_it_started_lives_on(tmp_path):
    begun = time.monotonic()
    assert launch_ranks.start_ranks(functools.partial(leave_a_child, tmp_path), 1, fork=True) == 128 + signal.SIGKILL
    assert time.monotonic() - begun < 50
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
