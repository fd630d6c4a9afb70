"""The ways in which this machine can keep code apart: which of them works, how it is started, and what is missing."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.rewards import sandbox_process
from megatron_rl.rewards.sandbox_kernel import DEVICES, NOBODY
from megatron_rl.rewards.sandbox_process import SandboxFailure, SandboxSettings, Way

ISOLATED: tuple[Way, ...] = ("bubblewrap", "namespaces")  # in the order in which they are tried
OWN_COUNTS = (5, 14)  # the first Linux whose user namespaces count their own processes
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store")  # where shared libraries lie
PACKAGE = Path(__file__).parents[1]
OWN_FILES = (
    "__init__.py",
    *(f"rewards/{name}.py" for name in ("__init__", "sandbox_calls", "sandbox_inside", "sandbox_kernel")),
)
START = (
    f"import sys; sys.path.append({str(PACKAGE.parent)!r}); from megatron_rl.rewards.sandbox_inside import main; "
    "sys.path.pop(); main()"
)
_log = logging.getLogger(__name__)
PROBE = "import math, random\nprint(math.factorial(5))\n"
# Settings of Linux that keep users from making namespaces: the file, the value that does, and the cure.
SYSCTLS = (
    ("proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


@functools.cache  # remembers what worked; a failure is looked for again
def choose(accept_no_wall: bool) -> Way:
    """Returns the first way that works here; "audit" where none does and that is accepted, else SandboxFailure."""
    troubles = {}
    for way in ISOLATED:
        troubles[way] = trouble(way)
        if not troubles[way]:
            return way
    if accept_no_wall:
        _log.warning("code of models runs without a wall here (accept_no_wall); see docs/tools.md, Without a wall")
        return "audit"
    raise SandboxFailure(refusal(troubles, Path("/")))


def trouble(way: Way) -> str:
    """Tries a way. Returns why it does not work here; empty where it does."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if way == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    settings = SandboxSettings(timeout_s=20.0)
    try:
        ended = sandbox_process.run(command(way, settings), order_of(way, PROBE, settings), b"", settings)
    except SandboxFailure as error:
        return str(error)
    if ended.output != b"120\n":
        return f"Python does not run in it ({ended.how} {ended.status}): {ended.errors.decode('utf-8', 'replace')}"
    return ""


def refusal(troubles: Mapping[Way, str], root: Path) -> str:
    """Returns what is told when no way works, with the cures that the machine's settings (below `root`) call for."""
    cures = []
    for file, forbids, cure in SYSCTLS:
        path = root / file
        if path.exists() and path.read_text().strip() == forbids:
            cures.append(f"`{cure}` (as root, on every node)")
    if not cures:
        cures = ["in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"]
    tried = "; ".join(f"{way}: {why}" for way, why in troubles.items())
    return (
        f"this machine can build no sandbox, and code of models is not run without one ({tried}). Cures: install "
        f"bubblewrap (package `bubblewrap` of Debian, Ubuntu, RHEL), or {', or '.join(cures)}. Or set "
        "accept_no_wall: true, which keeps honest code from harm, but not an attacker (docs/tools.md)"
    )


def order_of(way: Way, code: str, settings: SandboxSettings, **what: Any) -> dict[str, Any]:
    """Returns what sandbox_inside.py is told: the code, the limits, and in `what` how the code shall be run."""
    isolated = way != "audit"
    order: dict[str, Any] = {"way": way, "code": code, "function": None, "show_value": False, "arguments": []}
    order |= {
        "values": [],
        "keywords": {},
        "packages": [os.path.abspath(path) for path in settings.packages],
        "timeout_s": settings.timeout_s,
    }
    order |= {"shown": shown_paths(settings.packages), "scratch_bytes": settings.scratch_mib << 20}
    order |= {"memory_bytes": settings.memory_mib << 20, "cpu_s": math.ceil(settings.timeout_s) + 1}
    order |= {"file_bytes": (settings.scratch_mib << 20) if isolated else 0, "open_files": settings.open_files}
    # The sandbox's own two processes count too. Where all sandboxes of a user are counted as one, code gets no second.
    order |= {"processes": settings.processes + 2 if isolated and _kernel() >= OWN_COUNTS else 0}
    return order | what


def command(way: Way, settings: SandboxSettings) -> list[str]:
    """Returns the command that starts a sandbox; sandbox_process.py puts its arguments behind it."""
    python = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-c", START]
    if way != "bubblewrap":
        return python
    out = ["bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    out += ["--unshare-cgroup-try", "--uid", str(NOBODY), "--gid", str(NOBODY), "--new-session", "--die-with-parent"]
    out += ["--as-pid-1", "--size", str(settings.scratch_mib << 20), "--tmpfs", "/tmp"]
    own = [str(PACKAGE / name) for name in OWN_FILES]
    compiled = [importlib.util.cache_from_source(path) for path in own]
    for path, link in shown_paths((*settings.packages, *own, *compiled)):
        out += ["--symlink", link, path] if link else ["--ro-bind", path, path]
    for path in DEVICES:
        out += ["--dev-bind", path, path]
    return [*out, "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/tmp", "--", *python]


@functools.cache
def _python_paths() -> tuple[str, ...]:
    return (*SYSTEM, sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"))


def shown_paths(more: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the paths that code may read: Python, shared libraries, `more`. Each comes with its target if a link.

    Parents come before what lies in them, which is left out.
    """
    wanted = {}
    for path in (*_python_paths(), *more):
        real = os.path.realpath(path)
        if os.path.exists(real):
            wanted[real] = ""
            if (plain := os.path.abspath(path)) != real:
                wanted[plain] = real
    out: dict[str, str] = {}
    for path in sorted(wanted):
        if not any(str(parent) in out for parent in Path(path).parents):
            out[path] = wanted[path]
    return list(out.items())


def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
