"""Runs `train`, `drift`, `sft`, `generate` or `eval` on this rank, or starts all ranks if there is no launcher."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.cluster.slurm_job import job_from
from megatron_rl.commands import settings
from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs
from megatron_rl.config.base import refusing, without_passwords
from megatron_rl.lib.user_code import told
from megatron_rl.run.run_directory import check_start, only_one
from megatron_rl.run.startup_messages import tell
from megatron_rl.session import launch_ranks
from megatron_rl.spec import automatic
from megatron_rl.spec.resolve import resolve
from megatron_rl.spec.run_spec import Host, Spec, TrainingSpec

LEFT = 130  # exit status of a run that saved and exited because a signal asked it to
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # files of NVIDIA's driver on Linux and on WSL
# {command: module whose function `run` executes it on a rank}
MODULES = {
    "train": "session.train",
    "drift": "session.drift",
    "sft": "commands.sft",
    "generate": "commands.generate",
    "eval": "commands.evaluate",
}
# Environment variables that make cuBLAS, NCCL and Transformer Engine deterministic.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def run(args: argparse.Namespace) -> int:
    """Runs `train`, `drift`, `sft`, `generate` or `eval` and returns the exit status. If there is no launcher, starts
    the ranks as child processes.

    Raises ConfigError for an invalid config before any work begins. Later errors of the types in errors.EXPECTED are
    printed, and are not raised.
    """
    if args.command == "eval" and args.skip_done and (output := read(args).output) and Path(output).exists():
        print(f"{output} is there: nothing to do")
        return 0
    with refusing(str, ValueError):
        place = launch_ranks.place_from(os.environ)
    first = place is None or place.rank == 0
    spec = specify(args, place, say=lambda text: first and tell(args.command, text))
    if first:
        claim(spec)
    if place is None and spec.cluster.launch.nproc > 1:
        return launch(spec, args)
    return run_rank(spec, args, place or launch_ranks.Place(0, 1, 0, launch_ranks.LOCAL, 0, job_from(os.environ)))


def read(args: argparse.Namespace) -> Any:
    """Returns the config that the command's files and settings give. Raises ConfigError if it is invalid."""
    if not args.settings:
        raise configs.ConfigError("give a config: model.path=..., sets=[gsm8k] and where their data is, or a YAML file")
    schema = settings.SCHEMAS["train" if args.command == "drift" else args.command]
    config = config_files.load(schema, *settings.split(args.settings))
    # the drift test needs engines, so the setting debug.replay, which trains on saved rollouts, is removed
    return dataclasses.replace(config, debug=configs.Debug()) if args.command == "drift" else config


def specify(
    args: argparse.Namespace, place: launch_ranks.Place | None, say: Callable[[str], object] = lambda text: None
) -> Spec:
    """Returns the specification of the run, after all checks. Rank 0, or the process that starts the ranks, also checks
    this host. `place`: this process's rank; None if there is no launcher. `say`: gets a
    message about each setting whose value `auto` was replaced."""
    config = read(args)
    nproc, host = config.launch.nproc, None
    if place is None or place.rank == 0:
        host = Host(launch_ranks.ranks_on_host(place, nproc, os.environ), launch_ranks.has_gpu(os.environ))
    ranks = place.world_size if place else nproc
    return resolve(automatic.chosen(config, ranks, say=say), ranks, host=host)


def claim(spec: Spec) -> None:
    """Checks that a training run may start in its directory: now, because later imports take half a minute. Raises
    RunError if another process trains there, and ConfigError if the directory holds a run with other settings."""
    if isinstance(spec, TrainingSpec):
        job = job_from(os.environ)
        check_start(spec.run, config_files.dump_tree(spec.settings))
        with only_one(spec.directory, job="" if job is None else job.id, restart=job.restart if job else 0):
            pass


def launch(spec: Spec, args: argparse.Namespace) -> int:
    """Starts the run's ranks as child processes of this one, and returns their exit status. With a GPU they are not
    forked, as a driver that is initialized before a fork does not work after it: each reads the config again."""
    os.environ["OMP_NUM_THREADS"] = "1"
    fork, nproc = not has_driver(), spec.cluster.launch.nproc
    if fork:
        _command(args, tells=True)  # imports the modules once, before the fork, for all ranks
    tell(args.command, f"starting {nproc} ranks")
    rank = functools.partial(run_rank, spec, args) if fork else functools.partial(_spawned, args)
    return launch_ranks.start_ranks(rank, nproc, fork=fork)


def _spawned(args: argparse.Namespace) -> int:
    return run_rank(specify(args, launch_ranks.place_from(os.environ)), args)


def has_driver() -> bool:
    """Returns whether this host has NVIDIA's GPU driver, which some libraries initialize when they are imported."""
    return any(driver.exists() for driver in DRIVERS)


def run_rank(spec: Spec, args: argparse.Namespace, place: launch_ranks.Place | None = None) -> int:
    """Runs the command on this rank, and returns its exit status. `place`: None if the environment says it."""
    place = place or launch_ranks.place_from(os.environ)
    assert place is not None, "start_ranks sets the rank of a child"
    if isinstance(spec, TrainingSpec) and spec.run.deterministic:
        os.environ.update(DETERMINISTIC)
    command = _command(args, tells=place.rank == 0)
    from megatron_rl import errors

    try:
        status = command(spec, place)
        in_step = place.job is not None and place.job.step is not None
        # In a Slurm step, a run that saved and exited after a signal returns 0 instead of LEFT, so that srun does not
        # kill the other ranks, and job.sh reports no error
        return 0 if status == LEFT and in_step else status
    except errors.EXPECTED as error:
        if place.local_rank == 0 and not isinstance(error, errors.DriverError):
            where = f"rank {place.rank}: " if place.rank else ""
            print(f"megatron-rl {args.command}: {where}{without_passwords(str(error))}", file=sys.stderr)
            _tell(args, error, str(error))
        return 2 if isinstance(error, configs.ConfigError) else 1
    except BaseException as error:  # the error is raised again, and Python prints the traceback
        if place.local_rank == 0:
            print(f"megatron-rl {args.command}: {without_passwords(told(error))}", file=sys.stderr)
            _tell(args, error, told(error))
        raise


def _tell(args: argparse.Namespace, error: BaseException, why: str) -> None:
    """Sends the error that ended the run to the parent program, if there is one (`--events`: socket of the parent).
    `why`: the error message."""
    if args.command != "train" or args.events is None:
        return
    from megatron_rl.session.parent_events import Listener

    with contextlib.suppress(OSError):  # the parent program has exited
        Listener.at(args.events).tell("error", type=type(error).__name__, message=why)


def _command(args: argparse.Namespace, *, tells: bool) -> Callable[[Any, launch_ranks.Place], int]:
    """Imports the module of the command, which imports torch. Returns the function that runs the command. The
    function's arguments are the resolved config and the rank's Place; it returns the exit status. `tells`: print a
    message before slow imports."""
    gc.disable()  # garbage collection would take a sixth of the import time and would free almost nothing
    # Ctrl-C during imports ends the process at once. Without this, a KeyboardInterrupt could be lost, because Python
    # ignores exceptions in destructors.
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if tells and "torch" not in sys.modules:
            tell(args.command, "importing torch, transformers and megatron-core")
        module = importlib.import_module(f"megatron_rl.{MODULES[args.command]}")
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        gc.enable()
    options = {name: value for name, value in vars(args).items() if name in ("fresh", "events", "updates") and value}
    if args.command in ("generate", "eval"):
        options["environment"] = os.environ
    return functools.partial(module.run, **options)
