"""Attacks on the sandbox as root and as an ordinary user.

The attacks are those by which an audit hook of Python is no wall: it is changed from inside, files are emptied by flags
that it does not see, processes are signalled by descriptors, and the answer is forged.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import ordinary_user
import pytest
import sandbox_attacks
from limits import PROCESS_S, RUN_S

from megatron_rl.rewards import sandbox_walls

SCRIPT = Path(sandbox_attacks.__file__)


def attacked(user: str) -> str | dict[str, str]:
    """Returns what the attacks found, as this user."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("this is not root")
    identity = ordinary_user.identity() if user == "ordinary" else {}
    with ordinary_user.package(SCRIPT) as place:
        own = place / "own"
        if user == "root":
            os.chown(own, 0, 0)
        words = [ordinary_user.python(), str(place / SCRIPT.name), str(own)]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=RUN_S, cwd=place,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(place)}, **identity,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["root", "ordinary"])
def found(request):
    return attacked(request.param)


@pytest.mark.parametrize("attack", sandbox_attacks.ATTACKS)
def test_hostile_code_reaches_nothing(found, attack):
    if isinstance(found, str):
        pytest.skip(found)
    assert found[attack] == ""


def test_hostile_code_of_an_ordinary_user_gets_walls_where_the_kernel_has_them():
    """The tests above say nothing where they are skipped: here the sandbox must work, or the machine must forbid it."""
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap (package bubblewrap) is not installed")
    forbidden = [
        path for file, forbids, _ in sandbox_walls.SYSCTLS
        if (path := Path("/") / file).exists() and path.read_text().strip() == forbids
    ]  # fmt: skip
    code = (
        "from megatron_rl.rewards import sandbox\n"
        "try: print(sandbox.run_program('print(6 * 7)').output)\n"
        "except sandbox.SandboxFailure as error: print(error)\n"
    )
    with ordinary_user.package() as place:
        done = subprocess.run(
            [ordinary_user.python(), "-c", code], capture_output=True, text=True, timeout=PROCESS_S, cwd=place,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(place)}, **ordinary_user.identity(),
        )  # fmt: skip
    refused = "this machine can build no sandbox" in done.stdout and "package `bubblewrap`" in done.stdout
    assert done.stdout.strip() == "42" or (forbidden and refused), done
