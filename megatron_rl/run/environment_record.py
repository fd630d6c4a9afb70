"""Records package versions, git commits and input digests of each start of a run in RUN/environment.json."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from megatron_rl.config.base import without_passwords
from megatron_rl.lib.regular_files import read_bytes
from megatron_rl.run.checkpoint import read_json, write_json
from megatron_rl.run.json_lines import UNREADABLE
from megatron_rl.run.run_directory import RunDirectory

FILE = "environment.json"
GIT_S = 10.0  # time limit of a git command in seconds
OF_ONE_START = ("started", "host", "command")  # entries that are ignored when two starts are compared


def packages() -> dict[str, str]:
    """Returns {package: version} of this environment. Package names are in lower case with hyphens.

    If a package is installed in several folders of sys.path, the version in the first folder counts, which Python
    imports.
    """
    dists = reversed([*metadata.distributions()])
    return {canonicalize_name(dist.metadata["Name"]): dist.version for dist in dists if dist.metadata["Name"]}


def commit_of(directory: Path) -> str | None:
    """Returns the hash of the git commit that is checked out in a directory, followed by `, with changes` if tracked
    files were edited. Returns None if git tracks no file of the directory, or is not installed."""
    outputs = []
    status = ["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]  # takes no lock of the checkout
    for words in (["ls-files", "--error-unmatch", "."], ["rev-parse", "HEAD"], status):
        try:
            done = subprocess.run(["git", "-C", directory, *words], capture_output=True, text=True, timeout=GIT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        outputs.append(done.stdout.strip())
    return outputs[1] + (", with changes" if outputs[2] else "")


def record_start(directory: RunDirectory, inputs: Mapping[str, Mapping[str, Any]], devices: Sequence[str]) -> None:
    """Adds this start to environment.json, unless the environment equals that of the newest start in the file.

    `inputs`: the inputs of the run with their digests (see InputRecord.inputs). `devices`: names of the GPUs.
    """
    places = {"megatron_rl": Path(__file__).parent, "working directory": Path.cwd()}
    now = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "command": without_passwords(" ".join(sys.argv)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [*devices],
        "commits": {name: commit_of(place) for name, place in places.items()},
        "config": hashlib.sha256(read_bytes(directory.config)).hexdigest(),
        "inputs": {name: facts.get("sha256", facts.get("revision")) for name, facts in inputs.items()},
        "packages": dict(sorted(packages().items())),
    }
    file, starts = directory.path / FILE, list[dict[str, Any]]()
    with contextlib.suppress(OSError, *UNREADABLE):  # the file is not there, or damaged
        starts = [start for start in read_json(file) if isinstance(start, dict)]
    if not starts or any(starts[-1].get(name) != now[name] for name in now.keys() - OF_ONE_START):
        with contextlib.suppress(OSError):  # e.g. a full disk, which other writes report
            write_json(file, [*starts, now])
