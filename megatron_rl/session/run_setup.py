"""Setup shared by the commands: the process group, the run directory on the driver, and checkpoints of all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from megatron_rl.cluster.host_address import address_of_first_rank
from megatron_rl.cluster.rendezvous import meet
from megatron_rl.cluster.slurm_job import Leave
from megatron_rl.cluster.watchdog import Watchdog
from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs
from megatron_rl.config.base import without_passwords
from megatron_rl.devices.allocator import limit_arenas
from megatron_rl.engines.protocol import Sampling
from megatron_rl.lib.user_code import told, traceback_of
from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World
from megatron_rl.run import file_checksums, input_digests, json_lines
from megatron_rl.run.checkpoint import (
    Checkpoint,
    Checkpoints,
    known_digests,
)
from megatron_rl.run.console import RunConsole
from megatron_rl.run.environment_record import record_start
from megatron_rl.run.input_digests import InputRecord
from megatron_rl.run.metric_sinks import configured_sinks
from megatron_rl.run.metrics import Stopwatch, Tracker
from megatron_rl.run.run_directory import FAILED, RunDirectory, only_one, open_run
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.run_record import RunRecord
from megatron_rl.spec.model_gate import check_models, loaded_models
from megatron_rl.spec.run_spec import Spec, TrainingSpec

# Timeout of a collective operation. It is long, because all other ranks wait while rank 0 computes rewards.
TIMEOUT = timedelta(hours=2)
CHANGED = "changed since the newest checkpoint, and used from here on:"
MEET = timedelta(minutes=10)  # timeout for all ranks to start


@dataclass
class Driver:
    """A rank's access to the run directory, the metrics and the console of the run.

    `tracker` and `console` are None on all ranks but rank 0. The methods that use `tracker` or `console` are no-ops on
    these ranks.
    """

    directory: RunDirectory
    checkpoints: Checkpoints
    resumed: Checkpoint | None  # checkpoint to resume from; None for a new run
    record: InputRecord  # record of the files that the run reads, used on rank 0
    finished: bool  # whether an earlier start of the run has finished the run and recorded this in summary.json
    watch: Stopwatch
    leave: Leave  # decides whether the run should save and exit; called on rank 0
    watchdog: Watchdog
    tracker: Tracker | None = None
    console: RunConsole | None = None

    def log(self, cycle: int, scope: str, metrics: Mapping[str, float], *, iteration: int) -> None:
        times = self.watch.take()
        if self.tracker is not None:
            self.tracker.log(cycle, scope, {**metrics, **times}, iteration=iteration)

    def compare(self, models: Mapping[str, configs.Model], rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Compares the data sets and the models from the hub with the run's record of its inputs, prints the changes,
        and records the environment in which the run was started now.

        Called on the driver (rank 0) after the data sets are read. `rows`: path, row count and sha256 of each data set,
        keyed by name. Raises RunError if an input has changed since the run trained on it, unless run.resume = must.
        """
        for change in self.record.compare(input_digests.LATER, {**input_digests.read_revisions(models), **rows}):
            self.say(f"{CHANGED} {change}")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.cuda.get_device_name(i) for i in range(count)]
        # Runs in a thread, because reading the versions of all packages takes half a second.
        threading.Thread(target=record_start, args=(self.directory, dict(self.record.inputs), devices)).start()

    def refitted(self, metrics: Mapping[str, Any]) -> None:
        """Appends the metrics of a weight sync (refit) to refits.jsonl, such as the transferred bytes and the duration.

        The metrics are not in metrics.jsonl, because the content of metrics.jsonl must not depend on interruptions of
        the run. Raises json_lines.DiskError if the line cannot be written.
        """
        if self.tracker is not None:
            json_lines.append(self.directory.refits, json.dumps(metrics).encode())

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.message(text)

    def done(self, text: str) -> None:
        """Prints a message for each damaged file in the run directory, and then the message that the run is done.
        `text`: the result of the run, which is part of the last message."""
        if self.console is not None:
            for sentence in RunRecord(self.directory.path).look():
                self.say(f"damage: {sentence}")
        self.say(f"done: {text}")

    def summary(self, values: Mapping[str, Any]) -> None:
        if self.tracker is not None:
            self.directory.update_summary(values)


@contextlib.contextmanager
def open_world(place: Place, shared: Path, *, deterministic: bool = False) -> Iterator[World]:
    """Context manager that initializes torch's process group: NCCL and gloo with GPUs, gloo only without GPUs.

    Reduces the log output of libraries. Without GPUs, sets one torch thread per process. `shared`: directory that all
    ranks can access; rank 0 writes its address to a file in this directory. `deterministic`: if True, torch uses
    deterministic kernels, and warns about operations that have none.
    """
    limit_arenas()
    # Called only if the setting changes, because the call imports torch's compiler, which takes seconds.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(
        level=logging.WARNING if place.rank == 0 else logging.ERROR, format="%(levelname)s: %(message)s"
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        # Disables cuDNN attention, which needs tens of milliseconds for each new shape: packed batches have new shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
        # Disables torch's flight recorder, which is not used with gloo and fragments the heap by one or two megabytes.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        backend = "gloo"
    # makes gloo read the addresses of all ranks from the store in one query instead of one query per rank
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "True")
    file = shared / f"ranks.{place.session}.json"
    if place.world_size == 1:
        store = dist.HashStore()
    else:
        own = address_of_first_rank(place.address, os.environ) if place.rank == 0 else place.address
        store = meet(file, rank=place.rank, address=own, timeout=MEET)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)
    world = World()
    world.barrier()
    if place.rank == 0:
        file.unlink(missing_ok=True)
    try:
        yield world
    except BaseException:
        # Does not destroy the group of several ranks, because a failed rank would have to wait for the other ranks.
        if world.size == 1:
            dist.destroy_process_group()
        raise
    world.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def open_world_for(spec: Spec, place: Place) -> Iterator[World]:
    """Context manager that initializes the process group as `open_world` does, and checks the models that the command
    loads.

    Raises ConfigError on the driver (rank 0) for a model that cannot be used.
    """
    deterministic = isinstance(spec, TrainingSpec) and spec.run.deterministic
    with open_world(place, spec.directory, deterministic=deterministic) as world:
        world.from_leader(lambda: check_models(loaded_models(spec)))
        yield world


@contextlib.contextmanager
def open_driver(
    spec: TrainingSpec, world: World, place: Place, *, total_iterations: int | None
) -> Iterator[Driver]:  # fmt: skip
    """Context manager that opens a new or existing run directory and selects the checkpoint to resume from.

    Inside the block, a watchdog ends this rank if the run makes no progress for run.hang_after_s seconds. Collective.
    """
    with contextlib.ExitStack() as stack:
        own = spec.directory
        job, restart = ("", 0) if place.job is None else (place.job.id, place.job.restart)
        world.from_leader(lambda: stack.enter_context(only_one(own, job=job, restart=restart)))
        path = Path(world.from_leader(lambda: str(open_run(spec.run, config_files.dump_tree(spec.settings)).path)))
        watchdog = Watchdog(path, place.session, world.rank, spec.run.hang_after_s)
        stack.enter_context(watchdog.watching())
        with _opened(spec, world, RunDirectory(path), total_iterations, watchdog, place) as driver:
            yield driver


@contextlib.contextmanager
def _opened(
    spec: TrainingSpec, world: World, directory: RunDirectory, total_iterations: int | None, watchdog: Watchdog,
    place: Place,
) -> Iterator[Driver]:  # fmt: skip
    checkpoints = Checkpoints(directory.checkpoints, spec.run.keep)
    newest = _newest(world, Commands(world), checkpoints) if spec.run.resume != "never" else None
    done = newest.number if newest else 0
    summary = world.from_leader(directory.read_summary)
    # With resume = must, a run that stopped early goes on, for example after early_stop.patience was raised.
    ends = (total_iterations, None if spec.run.resume == "must" else summary.get("stopped_early"))
    finished = done in ends and bool(summary.get("finished"))
    watch, leave = Stopwatch(watchdog.beat), Leave(directory.path, place.job, lambda text: driver.say(text))
    record = InputRecord(
        directory.path / input_digests.FILE,
        done=f"{done} iterations" if done else None,
        accept=spec.run.resume == "must",
    )
    changes = world.from_leader(lambda: record.compare(input_digests.FILES, input_digests.read_files(spec.settings)))
    driver = Driver(directory, checkpoints, newest, record, finished, watch, leave, watchdog)
    if world.rank != 0:
        yield driver
        return
    with RunConsole(
        directory.logs / "driver.log", total_iterations, first_iteration=done, stream=sys.stdout
    ) as console:
        chosen = configured_sinks(
            spec.sinks, directory.logs, run_name=spec.run.name, config=spec.settings, first_iteration=done,
            say=console.message,
        )  # fmt: skip
        with Tracker(directory.metrics, [console, *chosen]) as tracker:
            driver.tracker, driver.console = tracker, console
            for change in changes:
                console.message(f"{CHANGED} {change}")
            if finished:
                console.message(f"{directory.path} is finished: all {done} iterations are done")
                yield driver
                return
            tracker.truncate(done)
            if newest is not None:
                console.message(f"going on from {newest.path} ({done} iterations done)")
            try:
                with _noting_failure(directory, console):
                    yield driver
            finally:
                leave.done()


@contextlib.contextmanager
def _noting_failure(directory: RunDirectory, console: RunConsole) -> Iterator[None]:
    """Context manager that records an error raised in its block.

    Writes the message to `failed` in summary.json, which `megatron-rl status` shows, and the traceback to driver.log.
    Converts SystemExit, which only user code raises here, to RuntimeError. Otherwise, user code could end the run with
    a misleading exit status, such as success."""
    directory.update_summary({FAILED: None})
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # if the error is a full disk, it cannot be written either
            directory.update_summary({FAILED: without_passwords(told(error))})
            console.note(without_passwords(traceback_of(error)))
        if isinstance(error, SystemExit):
            raise RuntimeError(told(error)) from error
        raise


def _newest(world: World, commands: Commands, checkpoints: Checkpoints) -> Checkpoint | None:
    """Returns the newest checkpoint whose files match their checksums, or None if there is no such checkpoint.
    Collective: each rank reads and checks a part of the files."""

    def wrong_here(path: str) -> list[str]:
        return file_checksums.wrong(Path(path), known_digests(Path(path)), part=(world.rank, world.size))

    def wrong_anywhere(path: Path) -> list[str]:
        found = commands.each("checksums", [str(path)] * world.size)
        return [sentence for own in found for sentence in own]

    commands.serve("checksums", wrong_here)
    return commands.drive(lambda: checkpoints.newest(wrong_anywhere))


def sampling_of(settings: configs.SamplingConfig, *, n: int = 1, seed: int = 0) -> Sampling:
    """Returns the engine's sampling parameters for the section `sampling` of a config. `n`: number of samples per
    prompt."""
    return Sampling(**dataclasses.asdict(settings), n=n, seed=seed)
