"""Starts real ranks for a test: one process per rank, gloo, and one JSON answer per rank."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import forks
from forks import ROOT
from limits import RUN_S


def run_ranks(script: Path, world: int, folder: Path, *arguments: str, timeout_s: float = RUN_S) -> list[Any]:
    """Runs `script OUT/rank{r}.json *arguments` on `world` ranks.

    Returns what each wrote; fails with the failed ranks' output.
    """
    paths = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests/multi"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return forks.answers(
        forks.start_ranks(_run, world, folder, str(script), environment, *arguments), folder, timeout_s
    )


def _run(file: Path, script: str, environment: dict[str, str], *arguments: str) -> None:
    """Runs a script in this process as Python runs one. It writes `file`."""
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv[:] = [script, str(file), *arguments]
    sys.path[:0] = [str(Path(script).parent), str(ROOT / "tests/multi")]
    runpy.run_path(script, run_name="__main__")
