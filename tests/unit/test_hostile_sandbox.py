"""Attacks on the sandbox as root and as an ordinary user, in every way that this machine allows.

The attacks are those by which an audit hook of Python is no wall: it is changed from inside, files are emptied by flags
that it does not see, processes are signalled by descriptors, and the answer is forged.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import ordinary_user
import pytest
import sandbox_attacks
from limits import PROCESS_S, RUN_S
from ordinary_user import ROOT

from megatron_rl.rewards import sandbox_calls, sandbox_ways
from megatron_rl.rewards.sandbox_kernel import LIBC

SCRIPT = Path(sandbox_attacks.__file__)
WAYS = (*sandbox_ways.ISOLATED, "audit")


def attacked(user: str) -> dict[str, str | dict[str, str]]:
    """Returns what the attacks found, as this user, by way."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("this is not root")
    identity = ordinary_user.identity() if user == "ordinary" else {}
    with ordinary_user.package(SCRIPT) as place:
        own = place / "own"
        if user == "root":
            os.chown(own, 0, 0)
        words = [ordinary_user.python(), str(place / SCRIPT.name), str(own), *WAYS]
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
@pytest.mark.parametrize("way", WAYS)
def test_hostile_code_reaches_nothing(found, way, attack):
    if isinstance(found[way], str):
        pytest.skip(f"{way} does not work here: {found[way]}")
    if way == "audit" and attack == "reading" and LIBC.syscall(sandbox_calls.CREATE_RULES, None, 0, 1) < 1:
        pytest.skip("this kernel has no Landlock")
    assert found[way][attack] == ""


def test_hostile_code_of_an_ordinary_user_gets_walls_where_the_kernel_has_them():
    """The tests above say nothing where every way is skipped: here one must work, or the kernel must forbid it."""
    forbidden = [
        path for file, forbids, _ in sandbox_ways.SYSCTLS
        if (path := Path("/") / file).exists() and path.read_text().strip() == forbids
    ]  # fmt: skip
    code = (
        "from megatron_rl.rewards import sandbox\n"
        "try: print(sandbox.run_program('print(6 * 7)').isolation)\n"
        "except sandbox.SandboxFailure as error: print(error)\n"
    )
    with ordinary_user.package() as place:
        done = subprocess.run(
            [ordinary_user.python(), "-c", code], capture_output=True, text=True, timeout=PROCESS_S, cwd=place,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(place)}, **ordinary_user.identity(),
        )  # fmt: skip
    refused = "this machine can build no sandbox" in done.stdout and "accept_no_wall: true" in done.stdout
    assert done.stdout.strip() in sandbox_ways.ISOLATED or (forbidden and refused), done


def test_hostile_code_finds_the_same_walls_in_all_that_bubblewrap_shows():
    """What the code's process imports stands on the list of files that bubblewrap shows."""
    for name in sandbox_ways.OWN_FILES:
        assert (ROOT / "megatron_rl" / name).is_file(), name
