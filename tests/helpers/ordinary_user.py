"""Runs a script as an ordinary user, where the tests are root's too: as nobody, by a Python that all may read."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
NEEDED = (
    "__init__.py",
    "lib/__init__.py",
    "lib/processes.py",
    "lib/user_code.py",
    "run/__init__.py",
    "run/parent_death.py",
    "rewards/__init__.py",
    "rewards/reward_functions.py",
    "rewards/reaper.py",
    "rewards/grading_worker.py",
)


@functools.cache
def python() -> str:
    """Returns a Python of this or a later version that nobody may run. Skips the test where there is none."""
    ask = "import ctypes, sys; sys.exit(sys.version_info < (3, 11))"
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):  # it is not there, or not for everybody
            if subprocess.run([path, "-c", ask], capture_output=True, cwd="/", **identity()).returncode == 0:
                return path
    pytest.skip("there is no Python here that an ordinary user may run")


def identity() -> dict[str, Any]:
    """Returns subprocess's arguments that make a child of root an ordinary user's; none where this is one."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


@contextlib.contextmanager
def package(*scripts: Path) -> Iterator[Path]:
    """Yields a directory that everybody may read, with `scripts` and this package's sandbox and keeper, and a directory
    `own` of the ordinary user."""
    with tempfile.TemporaryDirectory(prefix="ordinary-", dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        for path in (*(ROOT / "megatron_rl" / name for name in NEEDED), *ROOT.glob("megatron_rl/rewards/sandbox*.py")):
            copy = place / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        for script in scripts:
            shutil.copyfile(script, place / script.name)
        (place / "own").mkdir()
        if os.geteuid() == 0:
            os.chown(place / "own", NOBODY, NOBODY)
        for path in (place, *place.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield place
