"""Starts ranks and other processes of a test as forks of a server that has imported what they need: in milliseconds,
not seconds. Where NVIDIA's driver is, each of them begins anew instead.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_rl.cluster.host_address import free_port
from megatron_rl.commands.ranks import has_driver
from megatron_rl.main import main

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # number of a prctl option of Linux
IMPORTED = [
    "refit_worker",
    "actor_worker",
    "megatron_rl.main",
    "megatron_rl.session.train",
    "megatron_rl.session.drift",
    "megatron_rl.commands.sft",
    "megatron_rl.commands.generate",
    "megatron_rl.commands.evaluate",
    "frozen_imports",  # the last
]


def environment() -> dict[str, str]:
    """Returns this process's environment with what a process of the tests needs beside it."""
    search_path = os.environ.get("PYTHONPATH")  # packages may lie outside of the environment (tools/gpu_kit/lease.sh)
    folders = [str(ROOT), str(ROOT / "tests/helpers"), *([search_path] if search_path else [])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}


def start(log: Path, function: Callable[..., Any], *arguments: Any, **variables: str) -> BaseProcess:
    """Runs `function` (of a module) in a process of its own, under these environment variables; its output goes to
    `log`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    return begin(_run, log, variables, function, arguments)


def program(words: Sequence[str], directory: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs `megatron-rl *words` from the repository's root in a process of its own, with this process's environment.
    Its output goes to files of the directory. Raises TimeoutExpired, as subprocess does."""
    printed, errors = directory / "stdout", directory / "stderr"
    process = begin(_program, words, environment(), str(printed), str(errors))
    process.join(timeout_s)
    late = process.exitcode is None
    if late:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(list(words), timeout_s, printed.read_bytes(), errors.read_bytes())
    return subprocess.CompletedProcess(words, process.exitcode, printed.read_text(), errors.read_text())


def begin(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Starts a process that runs `target`, and ends with this one. Call it in the main thread: a process that begins
    anew ends with the thread that started it."""
    with mock.patch.dict(os.environ, environment()):  # for its imports
        process = _context().Process(target=target, args=arguments)
        process.start()
    atexit.register(process.kill)  # a daemon could not start processes of its own, as saving does
    return process


def _context() -> Any:
    """Returns what starts processes: as forks of the server, which it starts first, or anew.

    What the server imports asks torch whether there is a GPU. Where NVIDIA's driver is, this initializes CUDA, and
    torch refuses to use CUDA in forks of such a process.
    """
    if has_driver():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context


def _program(words: Sequence[str], variables: dict[str, str], printed: str, errors: str) -> None:
    _end_with_parent()
    _write_to(printed, errors)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.argv[:] = ["megatron-rl", *words]
    sys.path.insert(0, str(ROOT))  # where `python -m` finds a user's modules
    sys.exit(main(words))


def start_ranks(function: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> list[BaseProcess]:
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
        file = folder / f"rank{rank}.json"
        processes.append(start(folder / f"rank{rank}.log", _answer, function, file, *arguments, **variables))
    return processes


def answers(ranks: Sequence[BaseProcess], folder: Path, timeout_s: float) -> list[Any]:
    """Returns what `function` returned on each rank.

    Fails with the output of those that failed, and kills the others.
    """
    end = time.monotonic() + timeout_s
    while (running := [r for r in ranks if r.exitcode is None]) and time.monotonic() < end:
        if any(r.exitcode for r in ranks):
            break
        connection.wait([r.sentinel for r in running], max(0.0, end - time.monotonic()))
    failed = [i for i, r in enumerate(ranks) if r.exitcode] or [i for i, r in enumerate(ranks) if r.exitcode is None]
    for rank in ranks:  # when one rank fails the others would wait for it
        rank.kill()
        rank.join()
    assert not failed, "\n".join(
        f"rank {r} of {len(ranks)}:\n" + (folder / f"rank{r}.log").read_text()[-3000:] for r in failed
    )
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(len(ranks))]


def _answer(function: Callable[..., Any], file: Path, *arguments: Any) -> None:
    answer = function(file, *arguments)
    if answer is not None or not file.exists():
        file.write_text(json.dumps(answer))


def _run(log: Path, variables: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    _end_with_parent()
    _write_to(str(log), None)
    os.environ.update(variables)
    function(*arguments)


def _end_with_parent() -> None:
    if sys.platform == "linux":  # the server of forks ends with the tests' process, and its forks with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_to(printed: str, errors: str | None) -> None:
    """Has this process write its output, and errors, to files; without a file for them both go to one."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        if errors is None:
            os.dup2(file.fileno(), 2)
    if errors is not None:
        with open(errors, "w") as file:
            os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
