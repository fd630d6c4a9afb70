"""Starting servers and ending them, the job's token, the guard in front of a server, and `megatron-rl serve`, with a
fake engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import environment
from fake_servers import until
from fake_vllm import SAID
from limits import PROCESS_S
from ranks import ROOT
from tiny_models import make_model

from megatron_rl import main
from megatron_rl.engines import server_process
from megatron_rl.engines.auth_middleware import HEADER, TOKEN_FILE, Guard
from megatron_rl.engines.server_process import Command, ServerProcess, StartError, make_token
from megatron_rl.engines.server_registry import Listing, ServerRegistry
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.session import run_server as serve
from megatron_rl.session.server_connection import connect
from megatron_rl.session.server_supervisors import Supervisor, end_supervisors, hopeless

FAKE = [sys.executable, str(ROOT / "tests/helpers/fake_vllm.py"), "--host", "127.0.0.1", "--port", "0"]
CONFIG = """
roles: {{generator: {{model: {{path: {base}}}}}}}
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {base}/python, replicas: 3, restarts: 1}}
run: {{dir: {base}, name: run}}
"""
WITH = "--with-parent"


def gone(pid: int) -> bool:
    try:
        return "Z (zombie)" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def start(tmp_path: Path, words: list[str], **variables: str) -> ServerProcess:
    return ServerProcess(
        Command(words, variables), tmp_path / "logs/engine.log", os.environ, imports=tmp_path / "imports"
    )


def never() -> bool:
    return False


def test_a_program_that_is_missing(tmp_path):
    with pytest.raises(StartError, match=r"cannot start /nowhere/python: .*No such file.*; set engine.python"):
        start(tmp_path, ["/nowhere/python", "-m", "vllm"])


def test_a_server_that_dies_at_its_start_is_known_by_its_last_words_and_their_cause(tmp_path):
    """The first error stands before what the other processes say of it; the message ended in "See root cause above"."""
    process, begin = start(tmp_path, FAKE, FAKE="dies"), time.monotonic()
    with pytest.raises(
        StartError, match=r"(?s)ended with status 3 while it started; the end of .*engine.log:\n.*  line 39\n"
    ) as info:
        process.wait_until(never, 600)
    assert time.monotonic() - begin < 20 and "line 10\n" not in str(info.value)
    assert str(info.value).endswith(f"\nthe first error there:\n  {SAID}\n  at /vllm/amx_mla.py:303")


def test_a_server_that_never_answers_is_ended(tmp_path):
    process = start(tmp_path, FAKE, FAKE="silent")
    with pytest.raises(StartError, match=r"did not answer within 0.3 s; the end of (?s:.*)the fake starts|it is empty"):
        process.wait_until(never, 0.3)
    assert process.ended() is not None


def test_waiting_for_a_server_may_be_left(tmp_path):
    process = start(tmp_path, FAKE, FAKE="silent")
    assert process.wait_until(never, 600, stop=lambda: True) is False and process.ended() is None
    process.stop()


def test_another_server_at_a_dead_servers_port_is_not_taken_for_it(tmp_path):
    """It was announced: whoever had taken the port answered the health check."""
    process = start(tmp_path, FAKE, FAKE="dies")
    until("its end", lambda: process.ended() is not None)
    with pytest.raises(StartError, match="ended with status 3"):
        process.wait_until(lambda: True, 600)


def test_stop_ends_the_whole_group(tmp_path):
    """Also a child that does not mind SIGTERM, and a group whose leader is gone."""
    child = tmp_path / "child"
    for leader_first in (False, True):
        process = start(
            tmp_path, FAKE, FAKE="brood", FAKE_CHILD=str(child), **{TOKEN_FILE: str(make_token_file(tmp_path))}
        )
        until("the child", lambda: child.exists() and child.read_text())
        pid = int(child.read_text())
        assert not gone(pid) and os.getpgid(pid) == process.pid
        if leader_first:
            os.kill(process.pid, signal.SIGKILL)
            until("the leader's end", lambda: process.ended() is not None)  # noqa: B023
        process.stop()
        until("the child's end", lambda: gone(pid))  # noqa: B023
        process.stop()
        child.unlink()


def start_and_wait(tmp_path: Path) -> None:
    process = start(tmp_path, FAKE, FAKE="silent")
    (tmp_path / "pid").write_text(str(process.pid))
    signal.pause()


def test_a_server_leaves_when_its_supervisor_is_killed(tmp_path):
    """It stayed behind, with its memory and its port, after the run had ended."""
    supervisor = multiprocessing.get_context("fork").Process(target=start_and_wait, args=(tmp_path,))
    supervisor.start()
    until("the server", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid)
    supervisor.kill()
    supervisor.join()
    until("its end", lambda: gone(pid))


def make_token_file(directory: Path) -> Path:
    make_token(directory / "token")
    return directory / "token"


def test_a_stopped_server_is_never_signalled_again(tmp_path, monkeypatch):
    """The number of its group may be another's by then."""
    process = start(tmp_path, FAKE, FAKE="silent")
    process.stop()
    monkeypatch.setattr(server_process.os, "killpg", lambda *_: pytest.fail("a signal"))
    process.stop()


def test_a_servers_environment(tmp_path):
    """TORCHELASTIC_USE_AGENT_STORE made its ranks wait for torchrun's store; the packages beside this one hid its own
    torch.
    """
    (tmp_path / "engine.py").write_text(
        "import megatron_rl.engines.auth_middleware, os\nroot = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
        "print(sorted(os.listdir(root)), megatron_rl.__file__.startswith(root), [k for k in os.environ if 'ELASTIC' "
        "in k or 'RANK' in k])"
    )
    plain = (
        "['megatron_rl', 'megatron_rl_plugin-0.dist-info'] True []"  # the package, and what names its plug-in to vLLM
    )
    command = Command([sys.executable, str(tmp_path / "engine.py")], {})
    inherited = {
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "ROLE_RANK": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": "/elsewhere",
    }
    for _ in range(2):
        process = ServerProcess(command, tmp_path / "log", inherited, imports=tmp_path / "imports")
        until("its end", lambda: process.ended() is not None)  # noqa: B023
        assert (tmp_path / "log").read_text().splitlines()[-1] == plain, (tmp_path / "log").read_text()
    (tmp_path / "imports/megatron_rl").unlink()
    (tmp_path / "imports/megatron_rl").symlink_to("/moved/away")
    assert server_process._only_this_package(tmp_path / "imports", "") == tmp_path / "imports"
    assert (tmp_path / "imports/megatron_rl").resolve() == ROOT / "megatron_rl"


def test_one_token_for_a_job_whoever_makes_it(tmp_path):
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(6), context.Queue()

    def make() -> None:
        gate.wait(30)
        answers.put(make_token(tmp_path / "engines/token"))

    makers = [context.Process(target=make) for _ in range(6)]
    for maker in makers:
        maker.start()
    found = {answers.get(timeout=30) for _ in makers}
    for maker in makers:
        maker.join()
    [token] = found
    assert len(token) == 64 and [p.name for p in (tmp_path / "engines").iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "engines/token").stat().st_mode) == 0o600
    assert make_token(tmp_path / "engines/token") == token


async def answer_of(guard: Guard, scope: dict) -> list[dict]:
    sent: list[dict] = []

    async def send(message) -> None:
        sent.append(dict(message))

    async def receive():
        return {"type": "http.request"}

    await guard(scope, receive, send)
    return sent


async def behind(scope, receive, send) -> None:
    await send({"type": "reached"})


def test_the_guard_lets_nobody_in_without_the_token(tmp_path, monkeypatch):
    token = make_token(tmp_path / "token")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    guard = Guard(behind)

    def ask(path: str, *given: str, kind: str = "http") -> list[dict]:
        return asyncio.run(
            answer_of(guard, {"type": kind, "path": path, "headers": [(HEADER.encode(), g.encode()) for g in given]})
        )

    reached = [{"type": "reached"}]
    assert ask("/v1/models", token) == ask("/health") == ask("/ping") == ask("", kind="lifespan") == reached
    for path, given in (
        ("/v1/models", []),
        ("/v1/models", ["x" * 64]),
        ("/v1/models", [token, token]),
        ("/health/x", []),
        ("//health", []),
    ):
        first, second = ask(path, *given)
        assert first["status"] == 401 and token.encode() not in second["body"], (path, given)
    assert ask("/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask("/v1/realtime", token, kind="websocket") == reached


def test_the_guard_is_never_open_by_mistake(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    with pytest.raises(KeyError):
        Guard(behind)
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    with pytest.raises(FileNotFoundError):
        Guard(behind)
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        Guard(behind)


@pytest.fixture
def config(tmp_path):
    """A run with a tiny model whose engine.python is the fake."""
    make_model(tmp_path, num_hidden_layers=1)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/helpers/fake_vllm.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tmp_path))
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["engine={kind: embedded}"], "engine.kind = 'embedded' runs inside the trainer"),
        (["--role=verifier"], "--role verifier: the roles with servers are generator"),
        (["--replica=3"], "--replica 3: engine.replicas = 3, so it is 0 to 2"),
        (["--replica=-1"], "--replica -1:"),
        (
            ["engine.python=/nowhere/python"],
            "engine.python = /nowhere/python: there is no such program; `make engines` makes .venv-vllm",
        ),
        (
            ["engine={kind: sglang, python: /nowhere}"],
            "engine.python = /nowhere: there is no such program; `make engines-sglang` makes",
        ),
        (["engine.gpus=[0]", "--replica=1"], "engine.gpus = [0]: 3 are needed"),
        (["engine.gpus=[0, 1, 0]"], "engine.gpus = [0, 1, 0]: [0] stand there twice"),
        (["engine.host=192.0.2.1"], "engine.host = 192.0.2.1: this machine cannot listen there"),
        (["roles.generator.router_replay=true"], "router_replay without a GPU"),
        (
            ["roles.generator.model.path=/nowhere/model"],
            "roles.generator.model.path: no model directory /nowhere/model",
        ),
    ],
)
def test_serve_refuses_with_the_value_and_the_cure(config, capsys, words, says):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        status = main.main(["serve", str(config), "--role=generator", *words])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    out, error = capsys.readouterr()
    assert status == 2 and says in error and len(error.splitlines()) == 1 and not out


class Serving:
    """`megatron-rl serve` as a process of its own."""

    def __init__(self, config: Path, *words: str, replica: int = 0, **variables: str) -> None:
        self.base, self.replica, self.out = config.parent, replica, config.parent / f"serve{replica}.log"
        command = [
            sys.executable,
            "-m",
            "megatron_rl.main",
            "serve",
            str(config),
            "--role=generator",
            f"--replica={replica}",
            *words,
        ]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment() | variables,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.engines: set[int] = set()

    def listing(self, *, other_than: str = "") -> Listing:
        """Once there is one with a beat; of another incarnation, if told."""

        def found() -> list[Listing]:
            listings = ServerRegistry(self.base / "run/engines").read("generator")
            return [x for x in listings if x.replica == self.replica and x.incarnation != other_than and x.beat > 0]

        until(f"a listing; {self.out.read_text()}", lambda: found() or self.process.poll() is not None, PROCESS_S)
        assert self.process.poll() is None, self.out.read_text()
        self.engines.add(self.engine())
        return found()[0]

    def engine(self) -> int:
        """The process of the engine that serves now."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "status").read_text().split("PPid:\t")[1].split()[0] == str(
                    self.process.pid
                ):
                    return int(entry.name)
        raise AssertionError(f"no engine: {self.out.read_text()}")

    def end(self) -> int:
        status = self.process.wait(PROCESS_S)
        for pid in self.engines:
            until("the engine's end", lambda: gone(pid))  # noqa: B023
        assert not (self.base / f"run/engines/generator-{self.replica}.json").exists()
        return status

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        for pid in {self.process.pid, *self.engines}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def test_serve_announces_starts_again_and_gives_up(config):
    """engine.restarts = 1: the second death is the last. It said then that it started once more."""
    with Serving(config) as serving:
        first = serving.listing()
        token = (config.parent / "run/engines/token").read_text()
        client = connect(Vllm(), token, 5.0)(first)
        assert client.ready() and client.version() == -1
        client.close()
        assert Path(first.log).is_absolute() and "the fake starts" in Path(first.log).read_text()
        os.kill(serving.engine(), signal.SIGKILL)
        second = serving.listing(other_than=first.incarnation)
        for pid in (serving.process.pid, serving.engine()):
            assert token not in Path(f"/proc/{pid}/cmdline").read_text()
            assert token not in Path(f"/proc/{pid}/environ").read_text()
        os.kill(serving.engine(), signal.SIGKILL)
        assert serving.end() == 1
    text = serving.out.read_text()
    assert [line for line in text.splitlines() if "generator-0" in line] == [
        f"generator-0 serves at {first.url}",
        "generator-0 ended; starting it again (1 of 1)",
        f"generator-0 serves at {second.url}",
        "generator-0 died 2 times in a row (engine.restarts = 1; the count begins anew when it has answered for "
        f"3600 s): see {first.log}",
    ]
    assert token not in text and token not in Path(first.log).read_text()


def test_serve_leaves_when_it_is_told_to(config):
    """It leaves by a signal, also while its parent's pipe is open (the interpreter then aborted at its end), and at the
    end of that pipe.
    """
    with contextlib.ExitStack() as stack:
        told, child, held = (
            stack.enter_context(Serving(config, *words, replica=i)) for i, words in enumerate([[], [WITH], [WITH]])
        )
        assert len({serving.listing().url for serving in (told, child, held)}) == 3
        assert child.process.stdin is not None
        os.kill(told.process.pid, signal.SIGTERM)
        child.process.stdin.close()
        os.kill(held.process.pid, signal.SIGHUP)
        assert [serving.end() for serving in (told, child, held)] == [0, 0, 0], held.out.read_text()
    assert not list((config.parent / "run/engines").glob("*.json"))


def test_serve_leaves_while_its_server_starts(config):
    with Serving(config, FAKE="silent") as serving:
        until("the engine's start", lambda: (config.parent / "run/logs/engine_generator_0.log").exists(), PROCESS_S)
        until(
            "the engine", lambda: "the fake starts" in (config.parent / "run/logs/engine_generator_0.log").read_text()
        )
        serving.engines.add(serving.engine())
        os.kill(serving.process.pid, signal.SIGTERM)
        assert serving.end() == 0


def test_serve_fails_with_the_last_words_of_a_server_that_does_not_start(config, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "dies")
    monkeypatch.setattr(serve, "_asked_to_leave", lambda with_parent, over: threading.Event())
    assert main.main(["serve", str(config), "--role=generator"]) == 1
    error = capsys.readouterr().err
    assert (
        error.count("ended with status 3 while it started") == error.count(SAID) == 2
        and "line 39" in error
        and "starting it again (1 of 1)" in error
    )


def test_serve_ends_a_server_that_lives_and_does_not_answer(config, monkeypatch, capsys):
    """It was left to itself, lost for the run, for as long as its process lived."""
    monkeypatch.setenv("FAKE", "sick")
    monkeypatch.setattr(serve, "_asked_to_leave", lambda with_parent, over: threading.Event())
    words = ["serve", str(config), "--role=generator", "engine.restarts=0", "engine.lost_after_s=0.2"]
    assert main.main(words) == 1
    error = capsys.readouterr().err
    assert "generator-0 lives, but has not answered for" in error and "generator-0 died 1 times in a row" in error


def test_a_run_ends_its_supervisors_and_knows_when_all_have_given_up(config):
    """It waited `engine.wait_s` for servers that nobody started any more."""
    run = config.parent / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config.read_text())
    both = [Supervisor(run, "generator", replica) for replica in (0, 1)]
    assert os.getpgid(both[0]._process.pid) != os.getpgid(0), (
        "Ctrl-C is for the run, which needs its servers until the iteration's end"
    )
    until(
        "both",
        lambda: len(ServerRegistry(run / "engines").read("generator")) == 2 or any(s.ended() for s in both),
        PROCESS_S,
    )
    stay = lambda: False  # noqa: E731
    assert (
        hopeless(both, stay) is None
        and hopeless([], stay) is None
        and "asked to leave" in (hopeless(both, lambda: True) or "")
    )
    end_supervisors(both)
    assert [s._process.returncode for s in both] == [0, 0] and not list((run / "engines").glob("*.json"))
    assert "and none is started again" in (hopeless(both, stay) or "") and "generator-0 serves at" in (
        hopeless(both, stay) or ""
    )


def test_a_run_tells_why_its_servers_did_not_start(config, monkeypatch):
    """The supervisor's log has the message, whose end has the cause."""
    monkeypatch.setenv("FAKE", "dies")
    run = config.parent / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config.read_text().replace("restarts: 1", "restarts: 0"))
    supervisor = Supervisor(run, "generator", 0)
    until("its end", supervisor.ended, PROCESS_S)
    said = hopeless([supervisor], lambda: False) or ""
    assert said.count(SAID) == 1 and said.endswith("at /vllm/amx_mla.py:303")


def test_a_servers_imports_name_the_plug_in_that_vllm_loads(tmp_path):
    from importlib.metadata import distributions

    from megatron_rl.engines.vllm.kind import PLUGIN

    found = [
        e
        for d in distributions(path=[str(server_process._only_this_package(tmp_path, PLUGIN))])
        for e in d.entry_points
    ]
    assert [(e.group, e.value) for e in found] == [("vllm.general_plugins", "megatron_rl.engines.vllm.tandem:register")]
