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
from megatron_rl.commands import settings, staleness
from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs
from megatron_rl.config.base import refusing, without_passwords
from megatron_rl.lib.user_code import told
from megatron_rl.run.run_directory import check_start, only_one
from megatron_rl.run.startup_messages import tell
from megatron_rl.session import launch_ranks
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
    """Runs `train`, `drift`, `sft`, `generate` or `eval` and returns the exit status. If this function starts
    ranks as child processes, each rank calls the function again.

    Raises ConfigError for an invalid config before any work begins. Later errors of the types in errors.EXPECTED are
    printed, and are not raised.
    """
    if not args.settings:
        raise configs.ConfigError("give a config: model.path=..., sets=[gsm8k] and where their data is, or a YAML file")
    files, overrides = settings.split(args.settings)
    schema = settings.SCHEMAS["train" if args.command == "drift" else args.command]
    config = config_files.load(schema, files, overrides)
    with refusing(str, ValueError):
        place = launch_ranks.place_from(os.environ)
    if args.command == "eval" and args.skip_done and config.output and Path(config.output).exists():
        print(f"{config.output} is there: nothing to do")
        return 0
    if args.command == "drift":
        # the drift test needs engines, so the setting debug.replay, which trains on saved rollouts, is removed
        config = dataclasses.replace(config, debug=configs.Debug())
    host = None
    if place is None or place.rank == 0:
        host = Host(
            launch_ranks.ranks_on_host(place, config.launch.nproc, os.environ), launch_ranks.has_gpu(os.environ)
        )
    ranks = place.world_size if place else config.launch.nproc
    config = staleness.chosen(config, ranks, say=lambda text: host and tell(args.command, text))
    spec = resolve(config, ranks, host=host)
    if host is not None:
        if isinstance(spec, TrainingSpec):  # checks the run directory now, because later imports take half a minute
            job = job_from(os.environ)
            check_start(spec.run, config_files.dump_tree(spec.settings))
            with only_one(spec.directory, job="" if job is None else job.id, restart=job.restart if job else 0):
                pass
        if "torch" not in sys.modules:  # false in a forked rank, because the parent has imported torch
            tell(args.command, "importing torch, transformers and megatron-core")
    if place is None and config.launch.nproc > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        # with a GPU, ranks are not forked: a GPU driver that is initialized before a fork does not work after the fork
        fork = not has_driver()
        if fork:
            _command(args)  # imports the modules once, before the fork, for all ranks
        tell(args.command, f"starting {config.launch.nproc} ranks")
        return launch_ranks.start_ranks(functools.partial(run, args), config.launch.nproc, fork=fork)
    if isinstance(spec, TrainingSpec) and spec.run.deterministic:
        os.environ.update(DETERMINISTIC)
    place = place or launch_ranks.Place(0, 1, 0, "127.0.0.1", 0, job_from(os.environ))
    return _run_on_rank(args, spec, place)


def has_driver() -> bool:
    """Returns whether this host has NVIDIA's GPU driver, which some libraries initialize when they are imported."""
    return any(driver.exists() for driver in DRIVERS)


def _run_on_rank(args: argparse.Namespace, spec: Spec, place: launch_ranks.Place) -> int:
    command = _command(args)
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


def _command(args: argparse.Namespace) -> Callable[[Any, launch_ranks.Place], int]:
    """Imports the module of the command, which imports torch. Returns the function that runs the command. The
    function's arguments are the resolved config and the rank's Place; it returns the exit status."""
    gc.disable()  # garbage collection would take a sixth of the import time and would free almost nothing
    # Ctrl-C during imports ends the process at once. Without this, a KeyboardInterrupt could be lost, because Python
    # ignores exceptions in destructors.
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        module = importlib.import_module(f"megatron_rl.{MODULES[args.command]}")
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        gc.enable()
    options = {name: value for name, value in vars(args).items() if name in ("fresh", "events", "updates") and value}
    if args.command in ("generate", "eval"):
        options["environment"] = os.environ
    return functools.partial(module.run, **options)
