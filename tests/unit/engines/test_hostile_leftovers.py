"""What rewards and servers leave when they are done or killed: processes that left their session, shared memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import bad_rewards
import ordinary_user
import pytest
from fake_servers import until
from limits import PROCESS_S

from megatron_rl.config.schema import Reward
from megatron_rl.engines import shared_memory_cleanup
from megatron_rl.engines.server_process import Command, ServerProcess
from megatron_rl.lib import processes
from megatron_rl.rewards import grading_pool as pool_module
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.types import Outcome

ROOT = Path(__file__).parents[3]
SHARING = ROOT / "tests/helpers/sharing_server.py"
SHM = Path("/dev/shm")


@pytest.fixture
def mark(monkeypatch):
    """Returns a text in the environment of every process that this test starts, and holds that none of them is left."""
    text = uuid.uuid4().hex
    monkeypatch.setenv("MARK_OF_TEST", text)
    yield text
    assert not marked(text)


def marked(text):
    """Returns the living processes with the mark, but for this one."""
    out = []
    for pid in processes.everybody():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if text.encode() in environ and pid != os.getpid() and processes.look(pid) is not None:
                out.append(pid)
    return out


def graded(pool, *responses, **payload):
    return [one.outcome for one in pool.grade(responses, [{"answer": "yes", **payload}] * len(responses))]


def pool_of(**settings):
    return GradePool(Reward(target="bad_rewards:reward", **{"timeout_s": 0.7, "workers": 1} | settings))


@pytest.fixture(params=["as this user", "as an ordinary user"])
def user(request, monkeypatch):
    """Has workers run as this user, or as nobody by a Python that nobody may run."""
    if request.param == "as this user":
        yield
        return
    with ordinary_user.package(Path(bad_rewards.__file__)) as place:
        start = pool_module.START.replace(repr(str(ROOT)), repr(str(place)))
        python = ordinary_user.python()

        def open_process(end):
            words = [python, "-P", "-c", start]
            settings = {"stdin": end, "stdout": end, "start_new_session": True} | ordinary_user.identity()
            return subprocess.Popen(words, cwd=place, **settings)

        monkeypatch.setattr(pool_module, "_open_process", open_process)
        monkeypatch.setattr(sys, "path", [str(place), *ordinary_paths(python)])
        monkeypatch.chdir(place)
        yield


def ordinary_paths(python):
    """Returns the search path of that Python."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True, cwd="/").stdout)


def test_hostile_children_of_a_reward_are_gone_after_the_answer(user, mark):
    """A process that led a session of its own, or had forked twice, lived on after the run."""
    with pool_of(timeout_s=10.0) as pool:
        for response in ("session", "daemon"):
            assert graded(pool, response) == [Outcome.SCORE]
            assert len(marked(mark)) == 2, "the reaper and the worker are left, and no other"
        assert graded(pool, "daemon", "session", "yes") == [Outcome.SCORE] * 3 and len(marked(mark)) == 2


@pytest.mark.parametrize(("response", "outcome"), [("stuck_daemon", Outcome.TIMEOUT), ("dead_daemon", Outcome.ERROR)])
def test_hostile_children_of_a_stuck_or_killed_reward_are_gone(user, mark, response, outcome):
    own = {"timeout_s": 60.0} if outcome is Outcome.ERROR else {}  # a busy machine may take seconds to see the death
    with pool_of(**own) as pool:
        results = pool.grade([response, "yes"], [{"answer": "yes"}] * 2)
        assert [one.outcome for one in results] == [outcome, Outcome.SCORE] and len(marked(mark)) == 2
        if outcome is Outcome.ERROR:
            assert "status -9" in results[0].detail


def test_hostile_children_are_gone_when_the_pool_closes_in_the_middle(user, mark):
    with pool_of(timeout_s=600.0) as pool, pytest.raises(KeyboardInterrupt):
        old = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            pool.grade(["stuck_daemon"], [{"answer": "yes"}])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)


def interrupt(number, frame):
    raise KeyboardInterrupt


def test_hostile_children_are_gone_when_the_run_is_killed(mark, tmp_path):
    code = (
        "import os, threading\nfrom megatron_rl.config.schema import Reward\n"
        "from megatron_rl.rewards.grading_pool import GradePool\n"
        "pool = GradePool(Reward(target='bad_rewards:reward', timeout_s=600.0, workers=1))\n"
        "pool.grade(['yes'], [{'answer': 'yes'}])\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), 9)).start()\n"
        "pool.grade(['stuck_daemon'], [{'answer': 'yes'}])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])}
    assert subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path).returncode == -9
    until("the end of all", lambda: not marked(mark), 10)


def test_security_keeper_spares_what_a_reward_keeps_for_its_next_call(mark):
    with pool_of() as pool:
        assert [one.score for one in pool.grade(["helper"] * 4, [{"answer": "yes"}] * 4)] == [1.0] * 4
        assert len(marked(mark)) == 3


def test_hostile_reward_leaves_no_shared_memory(mark, tmp_path):
    """Python's own process that removes it was killed in the same moment."""
    with pool_of(timeout_s=3.0) as pool:
        assert graded(pool, "shared", name_file=str(tmp_path / "name")) == [Outcome.TIMEOUT]
    assert not (SHM / (tmp_path / "name").read_text()).exists()


def test_hostile_zombie_with_living_threads_counts_as_alive():
    """The first thread of a process may end before the others: its letter is that of a zombie then."""
    code = (
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('started', flush=True)\nctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        until("its letter", lambda: ") Z " in Path(f"/proc/{process.pid}/stat").read_text(), 10)
        assert processes.look(process.pid) is not None and process.poll() is None
        process.kill()
        process.wait()
        assert processes.look(process.pid) is None


# Servers


def started(tmp_path, *words):
    """Starts the server and returns it with the names of what it made."""
    names = tmp_path / "names"
    command = Command([sys.executable, str(SHARING), str(names), *words], {})
    process = ServerProcess(command, tmp_path / "log", os.environ, imports=tmp_path / "imports")
    assert process.wait_until(names.exists, 60)
    found = names.read_text().split()
    assert len(found) >= 2 and all((SHM / name).exists() for name in found), "it shares memory and a semaphore"
    return process, found


def lists():
    return set(SHM.glob(f"{shared_memory_cleanup.LISTS}-{os.getuid()}-*"))


@pytest.mark.parametrize("words", [(), ("deaf",)], ids=["leaves", "is killed"])
def test_hostile_server_leaves_no_shared_memory_when_it_is_stopped(mark, tmp_path, monkeypatch, words):
    monkeypatch.setattr("megatron_rl.engines.server_process.GRACE_S", 0.5)
    before = lists()
    process, names = started(tmp_path, *words)
    assert len(lists() - before) == 1
    process.stop()
    assert not [name for name in names if (SHM / name).exists()] and lists() == before


def test_hostile_server_that_was_killed_with_all_its_processes_leaves_no_shared_memory(mark, tmp_path):
    process, names = started(tmp_path)
    os.killpg(process.pid, signal.SIGKILL)
    until("all ends", lambda: not processes.members(process.pid))
    assert all((SHM / name).exists() for name in names)
    process.stop()
    assert not [name for name in names if (SHM / name).exists()]


OWNER = """
import os, signal, sys
from pathlib import Path
from megatron_rl.engines.server_process import Command, ServerProcess
script, place = sys.argv[1], Path(sys.argv[2])
command = Command([sys.executable, script, str(place / "names")], {})
process = ServerProcess(command, place / "log", os.environ, imports=place / "imports")
assert process.wait_until((place / "names").exists, 60)
print(process.pid, *(place / "names").read_text().split(), flush=True)
signal.pause()
"""


def test_hostile_server_whose_owner_was_killed_is_cleared_by_the_next_one(mark, tmp_path):
    """Nobody knew any more whose the segments were, and they stayed until the machine's next start."""
    words = [sys.executable, "-c", OWNER, str(SHARING), str(tmp_path)]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    server, *names = owner.stdout.readline().split()
    try:
        assert not set(shared_memory_cleanup.clear()) & set(names), "the owner lives"
        owner.kill()
        owner.wait()
        assert not set(shared_memory_cleanup.clear()) & set(names), "the server lives"
        assert all((SHM / name).exists() for name in names)
        os.killpg(int(server), signal.SIGKILL)
        until("its end", lambda: not processes.members(int(server)))
        assert set(names) <= set(shared_memory_cleanup.clear())
        assert not [name for name in names if (SHM / name).exists()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(server), signal.SIGKILL)
        owner.stdout.close()


@pytest.fixture
def shm(tmp_path):
    """A directory in the place of /dev/shm."""
    return tmp_path


def listed(shm, *rows):
    path = shm / f"{shared_memory_cleanup.LISTS}-{os.getuid()}-{uuid.uuid4().hex[:16]}"
    path.write_text(json.dumps(rows))
    return path


def test_security_clearing_touches_nobody_elses_files(shm):
    """Files of other names, others under the name of one that is gone, and what is in use stay."""
    for name in ("psm_11111111", "psm_22222222", "model.safetensors", "sem.mp-abc"):
        (shm / name).write_text(name)
    inode = {path.name: path.lstat().st_ino for path in shm.iterdir()}
    (shm / "psm_33333333").symlink_to(shm / "model.safetensors")
    path = listed(
        shm,
        ["psm_11111111", inode["psm_11111111"]],
        ["psm_22222222", inode["psm_22222222"] + 1],
        ["model.safetensors", inode["model.safetensors"]],
        ["../model.safetensors", inode["model.safetensors"]],
        ["psm_33333333", inode["model.safetensors"]],
    )
    assert shared_memory_cleanup.clear(shm) == ["psm_11111111"] and not path.exists()
    assert {path.name for path in shm.iterdir()} == {*inode, "psm_33333333"} - {"psm_11111111"}


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["psm_1"]]', '[["psm_1", "x"]]', '{"a": 1}', "null"])
def test_hostile_list_of_segments_removes_nothing(shm, text):
    (shm / "psm_1").touch()
    path = listed(shm)
    path.write_text(text)
    assert shared_memory_cleanup.clear(shm) == [] and (shm / "psm_1").exists() and path.exists() is (text == "")


def test_security_list_notes_only_what_the_server_made(monkeypatch):
    """A model in /dev/shm that a server maps is the user's, and so is a segment that was there before the server."""
    names = [f"psm_{uuid.uuid4().hex[:8]}", f"model_{uuid.uuid4().hex[:8]}", f"psm_{uuid.uuid4().hex[:8]}"]
    maps = []
    try:
        (SHM / names[0]).write_bytes(b"x" * 5000)
        monkeypatch.setattr(shared_memory_cleanup, "SPARE_S", 0.05)  # clocks of files are coarse
        time.sleep(0.2)
        noted = shared_memory_cleanup.Segments()
        for name in names[1:]:
            (SHM / name).write_bytes(b"x" * 5000)
        for name in names:
            with (SHM / name).open("r+b") as file:
                maps.append(mmap.mmap(file.fileno(), 5000))
        noted.note([os.getpid()])
        assert {name for name, _ in noted._known} & set(names) == {names[2]}
        noted.remove()
        assert all((SHM / name).exists() for name in names), "this process uses it"
        noted.note([os.getpid()])
        for one in maps:
            one.close()
        noted.remove()
        assert [(SHM / name).exists() for name in names] == [True, True, False]
    finally:
        for name in names:
            (SHM / name).unlink(missing_ok=True)


# The frames between a pool and its worker


def test_security_worker_that_forks_answers_once(mark):
    """A forked copy of the worker read the pool's items, and answered them too."""
    with pool_of(timeout_s=5.0) as pool:
        for _ in range(3):
            assert graded(pool, "twice", "yes", "no", "twice", "yes") == [Outcome.SCORE] * 5


def test_security_keeper_ends_as_its_worker_did(mark):
    for code, status in (("os._exit(3)", 3), ("os.kill(os.getpid(), 11)", -11), ("os.kill(os.getpid(), 9)", -9)):
        imported = "import os; from megatron_rl.rewards import grading_worker, reaper"
        start = f"{imported}; grading_worker.main = lambda k: {code}; "
        process = subprocess.Popen([sys.executable, "-c", f"{start}reaper.main()"], cwd=ROOT, start_new_session=True)
        assert process.wait(PROCESS_S) == status
