"""Starts ranks and other processes of a test as forks of a server that has imported what they need: in milliseconds,
not seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_rl.cluster.address import free_port

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # number of a prctl option of Linux
IMPORTED = ["refit_worker", "actor_worker"]


def environment() -> dict[str, str]:
    """Returns this process's environment with what a process of the tests needs beside it."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")]),
    }


def start(log: Path, function: Callable[..., Any], *arguments: Any, **variables: str) -> BaseProcess:
    """Runs `function` (of a module) in a process of its own, under these environment variables; its output goes to
    `log`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, environment()):  # for its imports
        forkserver.ensure_running()
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_run, args=(log, variables, function, arguments))
    process.start()
    atexit.register(process.kill)  # a daemon could not start processes of its own, as saving does
    return process


def start_ranks(function: Callable[..., Any], world: int, out: Path, *arguments: Any) -> list[BaseProcess]:
    """Runs `function(OUT/rank{r}.json, *arguments)` on `world` ranks; see `answers`. What it returns is its answer,
    unless it wrote one itself and returns None."""
    port, processes = str(free_port("127.0.0.1")), []
    for rank in range(world):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        file = out / f"rank{rank}.json"
        processes.append(start(out / f"rank{rank}.log", _answer, function, file, *arguments, **variables))
    return processes


def answers(ranks: Sequence[BaseProcess], out: Path, timeout_s: float) -> list[Any]:
    """Returns what `function` returned on each rank.

    Fails with the output of those that failed, and kills the others.
    """
    end = time.monotonic() + timeout_s
    while any(r.exitcode is None for r in ranks) and not any(r.exitcode for r in ranks) and time.monotonic() < end:
        connection.wait([r.sentinel for r in ranks if r.exitcode is None], max(0.0, end - time.monotonic()))
    failed = [i for i, r in enumerate(ranks) if r.exitcode] or [i for i, r in enumerate(ranks) if r.exitcode is None]
    for rank in ranks:  # when one rank fails the others would wait for it
        rank.kill()
        rank.join()
    assert not failed, "\n".join(
        f"rank {r} of {len(ranks)}:\n" + (out / f"rank{r}.log").read_text()[-3000:] for r in failed
    )
    return [json.loads((out / f"rank{r}.json").read_text()) for r in range(len(ranks))]


def _answer(function: Callable[..., Any], file: Path, *arguments: Any) -> None:
    answer = function(file, *arguments)
    if answer is not None or not file.exists():
        file.write_text(json.dumps(answer))


def _run(log: Path, variables: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    if sys.platform == "linux":  # the server of forks ends with the tests' process, and its forks with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(variables)
    function(*arguments)
