"""Starts the ranks of a run as child processes, or reads this process's rank from the environment that torchrun or srun
set."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from megatron_rl.cluster.host_address import address_among_ranks, free_port, loopback_interface
from megatron_rl.cluster.slurm_job import SlurmJob, job_from
from megatron_rl.devices.allocator import give_caches_back, started_without_thread_caches
from megatron_rl.run.parent_death import end_with_parent

LOCAL = "127.0.0.1"
GRACE_S = 30.0  # after a rank has failed: seconds between SIGTERM and SIGKILL to the other ranks
LOOK_S = 1.0  # maximum number of seconds until the launcher notices that a rank has ended
FIRST_RANK_S = 2.0  # seconds to wait for rank 0 to exit after another rank has failed


@dataclass(frozen=True)
class Place:
    """The rank of this process in the run, and the address at which the ranks of the run meet."""

    rank: int
    world_size: int
    local_rank: int
    address: str  # address of the host of rank 0; if `port` is None, address of this host
    # Port number that only serves to identify this start of the ranks; None: the Slurm step identifies the start.
    # Rank 0 listens on another port that is free, and writes its number to a file that all ranks can read.
    port: int | None
    job: SlurmJob | None = None

    @property
    def session(self) -> str:
        """Returns a name for this start of the run's ranks. The name is identical on all ranks."""
        if self.job is not None and self.port is None:
            return f"{self.job.name}.{self.job.step}"
        # the hostname is included because a run on another host may have been started with the same port
        host = f"{socket.gethostname()}." if self.address == LOCAL else ""
        return f"{host}port{self.port}"


def place_from(environment: Mapping[str, str]) -> Place | None:
    """Returns the rank of this process and the address of rank 0, as set by torchrun or srun. Returns None if neither
    torchrun nor srun started this process.

    Ranks find rank 0 through a file in the run directory. MASTER_PORT is part of the file's name. Rank 0 listens at
    MASTER_ADDR if it is set, and otherwise at the address of rank 0's host. Raises ValueError if torchrun's environment
    lacks MASTER_ADDR or MASTER_PORT, or if only one of the two is set.
    """
    job = job_from(environment)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif job is not None and job.step is not None and int(environment.get("SLURM_NTASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return None
    rank, world, local = (int(environment.get(n, "0")) for n in names)
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment]
    if not given and names[0] != "RANK":
        return Place(rank, world, local, address_among_ranks(environment), None, job)
    if len(given) < 2:
        raise ValueError(
            "ranks were started without MASTER_ADDR and MASTER_PORT: export both (first host and a free port) before"
        )
    return Place(rank, world, local, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), job)


def ranks_on_host(place: Place | None, nproc: int, environment: Mapping[str, str]) -> int:
    """Returns the number of ranks that are known to run on this host, read from the variables of torchrun or srun.

    `place`: the rank of this process, or None if no launcher started this process. In this case the command itself
    starts `nproc` ranks on this host, and the result is `nproc`.
    """
    if place is None:
        return nproc
    said = environment.get("LOCAL_WORLD_SIZE", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    # In SLURM_STEP_TASKS_PER_NODE, such as 8(x4),2, the first number is the rank count on the node of rank 0.
    found = re.match(r"\d+", said)
    own = int(found[0]) if found is not None and place.rank == place.local_rank else 0
    return min(place.world_size, max(own, place.local_rank + 1))


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES lists, or None if the variable is not set. The list ends before the
    first name that is no GPU, as for CUDA: `-1` and Slurm's `NoDevFiles` list no GPU."""
    if (listed := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return None
    return list(itertools.takewhile(re.compile(r"\d|GPU-|MIG-").match, map(str.strip, listed.split(","))))


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Returns whether this host has GPUs that a process with the environment variables `environment` may use."""
    return visible_gpus(environment) != [] and shutil.which("nvidia-smi") is not None


def start_ranks(rank: Callable[[], int], nproc: int, *, fork: bool) -> int:
    """Runs `rank` in `nproc` child processes, the ranks of one run, and waits for them.

    Returns 0, or the exit status of a failed rank. `fork`: if True, the children inherit the modules that this process
    has imported; use False if this process may have initialized a GPU. If False, each child imports its modules itself,
    and `rank` must be picklable.

    If one rank fails, the other ranks receive SIGTERM, and SIGKILL after GRACE_S. If this process is killed, all ranks
    receive SIGTERM; they save a checkpoint, and the same command resumes the run. This process forwards SIGINT, SIGTERM
    and SIGUSR1 to the ranks. A rank receives Ctrl-C twice, from the terminal and from this process, and counts it once
    (`run.run_directory.Interrupts`).
    """
    port = str(free_port(LOCAL))
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    children: list[BaseProcess] = []
    for number in range(nproc):
        variables = {
            "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": LOCAL,
            "MASTER_PORT": port,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
        }
        if (loopback := loopback_interface()) is not None:
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", loopback)
        children.append(context.Process(target=_run_rank, args=(rank, variables, os.getpid()), name=f"rank {number}"))
    gc.freeze()  # garbage collection in forked ranks skips existing objects, so that their memory pages stay shared
    with started_without_thread_caches():
        for child in children:
            child.start()
    with _forwarded(children):
        return _wait(children)


def _run_rank(rank: Callable[[], int], variables: Mapping[str, str], launcher: int) -> None:
    end_with_parent(signal.SIGTERM, launcher)
    give_caches_back()
    os.environ.update(variables)
    try:
        sys.exit(rank())
    except KeyboardInterrupt:  # raised by Ctrl-C until the rank sets its own signal handler; exits without a traceback
        sys.exit(128 + signal.SIGINT)


def _wait(children: Sequence[BaseProcess]) -> int:
    """Waits until all ranks have exited or one has failed. Ends the other ranks after a failure.

    Returns 0 if no rank failed. Otherwise returns the exit status of one failed rank: of a rank that was killed by a
    signal if there is one, otherwise of rank 0 if it failed, otherwise of any failed rank. Rank 0 takes precedence,
    because an error of rank 0 makes the other ranks fail with a different status."""
    while (running := [c for c in children if c.exitcode is None]) and not any(c.exitcode for c in children):
        # The wait has a timeout: a process that a dead rank left behind may keep the rank's sentinel (a pipe) open.
        connection.wait([child.sentinel for child in running], timeout=LOOK_S)
    if any((child.exitcode or 0) > 0 for child in children):
        children[0].join(FIRST_RANK_S)
    statuses = [child.exitcode for child in children if child.exitcode]
    failed = next((status for status in statuses if status < 0), statuses[0] if statuses else 0)
    if failed < 0:
        name = next(child.name for child in children if child.exitcode == failed)
        text = (
            f"{name} was killed by {signal.Signals(-failed).name}: the others are ended; start the run again to go on"
        )
        print(text, file=sys.stderr)
    if failed:
        _end(children)
    return failed if failed >= 0 else 128 - failed


def _end(children: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE_S
    for child in children:
        if child.exitcode is None:
            child.terminate()
    for child in children:
        child.join(max(0.1, deadline - time.monotonic()))
        if child.exitcode is None:
            child.kill()
            child.join()


@contextlib.contextmanager
def _forwarded(children: Sequence[BaseProcess]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {n: signal.signal(n, forward) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
