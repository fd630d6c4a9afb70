"""Sandboxes that cannot be built or are lost, and the tool that runs the code of models in a sandbox."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sandbox_runs
from sandbox_runs import marked, run

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.environments.episode_types import EnvironmentFailure
from megatron_rl.environments.python_tool import PythonTool
from megatron_rl.main import main
from megatron_rl.rewards import sandbox, sandbox_walls
from megatron_rl.rewards.sandbox import SandboxFailure, SandboxSettings

ROOT = Path(__file__).parents[3]
built, mark = sandbox_runs.built, sandbox_runs.mark  # fixtures

# The sandbox's own fault


def test_a_sandbox_that_is_lost_is_not_the_codes_fault(built, mark):
    found = []

    def end_all():
        deadline = time.monotonic() + 20
        while len(found) < 3 and time.monotonic() < deadline:
            found[:] = sorted(marked(mark))  # the outermost first
            time.sleep(0.02)
        for process in found:
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=end_all)
    killer.start()
    with pytest.raises(SandboxFailure, match="was lost"):
        run("import time\ntime.sleep(60)", timeout_s=30.0)
    killer.join()
    assert len(found) >= 3


def test_nothing_outlives_a_trainer_that_is_killed(built, mark):
    code = (
        "from megatron_rl.rewards import sandbox, sandbox\n"
        f"sandbox.ENVIRONMENT['MARK'] = {mark!r}\n"
        "settings = sandbox.SandboxSettings(timeout_s=100)\n"
        "sandbox.run_program('import time; time.sleep(100)', settings=settings)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        assert within(20, lambda: len(marked(mark)) >= 3)
    finally:
        trainer.kill()
        trainer.wait()
    assert within(20, lambda: not marked(mark))


def within(seconds, holds):
    """Waits until something holds. Returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_sandbox_that_does_not_start_is_not_the_codes_fault(built, monkeypatch):
    monkeypatch.setattr(sandbox_walls, "RUNNER", "raise OSError('no such thing')")
    with pytest.raises(SandboxFailure, match="no such thing"):
        run("print(1)")
    monkeypatch.setattr(sandbox_walls, "command", lambda *given: ["/no/such/program"])
    with pytest.raises(SandboxFailure, match="no process could be started"):
        run("print(1)")


def as_another(*command):
    """Runs a command of util-linux and returns what it prints. The kernel must let this test make a user namespace."""
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("unshare and setpriv of util-linux are not installed")
    done = subprocess.run(["unshare", "--user", *command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    if "unshare: " in done.stderr or "setpriv: " in done.stderr:
        pytest.skip(f"the test itself can make no namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


ASK = """
from megatron_rl.rewards import sandbox
try: print(sandbox.run_program("print(6 * 7)").output.strip())
except sandbox.SandboxFailure as error: print(error)
"""


def test_a_kernel_without_namespaces_is_refused_with_the_cure(built):
    none = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    plain = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", ASK)
    [refused] = as_another("--map-root-user", "sh", "-c", none, "sh", *plain).splitlines()
    assert "this machine can build no sandbox" in refused and "package `bubblewrap`" in refused
    assert "`sysctl -w user.max_user_namespaces=15000`" in refused


def test_a_machine_without_bubblewrap_is_refused_with_the_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox.require.cache_clear()
    with pytest.raises(SandboxFailure, match="the program bwrap is not installed.*package `bubblewrap` of Debian"):
        run("print(1)")
    with pytest.raises(ConfigError, match="package `bubblewrap` of Debian"):
        PythonTool().load()


def test_check_refuses_code_of_models_on_a_machine_without_bubblewrap(monkeypatch, tmp_path, capsys):
    example = tmp_path / "python.yaml"
    reward = "reward: {target: megatron_rl.rewards.code_cases:grade}"
    example.write_text(f"base: {ROOT}/examples/miniatures/python/python.yaml\n{reward}\n")
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["check", str(example)]) == 2
    told = capsys.readouterr().err
    for target in ("megatron_rl.environments.python_tool:PythonTool", "megatron_rl.rewards.code_cases:grade"):
        assert f"{target} runs code of models, and the program bwrap is not installed here" in told


def test_a_user_without_rights_gets_a_sandbox(built):
    assert as_another("--map-user=1000", "--map-group=1000", sys.executable, "-c", ASK) == "42\n"


@pytest.mark.parametrize(
    ("file", "value", "cure"),
    [
        ("proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0"),
        ("proc/sys/user/max_user_namespaces", "63000", "--security-opt seccomp=unconfined"),
    ],
)
def test_the_cure_depends_on_what_forbids(tmp_path, file, value, cure):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"{value}\n")
    assert cure in sandbox_walls.refusal("not there", tmp_path)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="timeout_s = 0: give a number above 0"):
        SandboxSettings(timeout_s=0)


# The tool


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("print(1)\n2", "1"),
        ("None", "(the code printed nothing)"),
        ("x = 1", "(the code printed nothing)"),
        ("```python\n'a' + 'b'\n```", "'ab'"),
        ("print('before')\n1 / 0", "before\nZeroDivisionError: division by zero"),
        ("for", "SyntaxError: invalid syntax"),
        ("while True: pass", "error: the code did not end within 0.7 s"),
        ("print('x' * 1000)", "x" * 60 + "\n... (only the first 60 characters are shown)"),
        ("print('ä' * 100000)", "ä" * 60 + "\n... (only the first 60 characters are shown)"),
        ("", "error: give a program as text in the argument code"),
    ],
)
def test_what_the_python_tool_tells(built, code, told):
    tool = PythonTool(timeout_s=0.7 if "while" in code else 8.0, max_characters=60)
    assert tool.run({"code": code}) == told


def test_the_python_tool_keeps_nothing_between_calls(built):
    tool = PythonTool()
    assert tool.run({"code": "x = 1\nopen('/tmp/x', 'w').write('1')"}) == "1"
    assert tool.run({"code": "import os; os.listdir('/tmp')"}) == "[]"
    assert tool.run({"code": "x"}) == "NameError: name 'x' is not defined"
    assert tool.run({"program": "x"}).startswith("error: give a program")


def test_a_lost_sandbox_is_a_tool_that_broke_at_once(monkeypatch):
    asked = []

    def lost(code, **settings):
        asked.append(code)
        raise SandboxFailure("lost")

    monkeypatch.setattr(sandbox, "run_program", lost)
    with pytest.raises(EnvironmentFailure, match="the tool python: lost"):
        PythonTool().run({"code": "1 + 1"})
    assert asked == ["1 + 1"], "who calls the tool tries again: test_environments_tasks.py"


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"memory_mib": -1}, {"max_characters": 0}])
def test_the_python_tools_settings_are_checked(settings):
    [(name, value)] = settings.items()
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        plugins.build(Use(target="megatron_rl.environments.python_tool:PythonTool", args=settings))
