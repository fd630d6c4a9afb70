"""Replaces files of a run directory by links, FIFOs and directories, and uses the directory as a run and its readers
do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from damaged_runs import CONFIG, ITERATION, JOB, say
from rich.console import Console

from megatron_rl.cluster import job_slices
from megatron_rl.config.schema import ConfigError, Run
from megatron_rl.engines.server_process import make_token
from megatron_rl.engines.server_registry import Listing, ServerRegistry
from megatron_rl.jobs import status
from megatron_rl.lib.regular_files import UntrustedFile
from megatron_rl.report.pages import write_report
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.console import RunConsole
from megatron_rl.run.input_digests import InputRecord
from megatron_rl.run.json_lines import DiskError
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import RunDirectory, only_one, open_run
from megatron_rl.session.run_record import RunRecord
from megatron_rl.training.store import IterationStore

KINDS = ("link", "FIFO", "directory", "socket", "broken link")
LIMIT_S = 120  # seconds; a call takes one at most
FILES = (  # files of a run that a run or its readers open, below the run directory
    *("config.yaml", "metrics.jsonl", "refits.jsonl", "timeline.jsonl", "summary.json", "inputs.json", "lock"),
    *(
        "environment.json",
        "slices.jsonl",
        "stop",
        "sweep.json",
        "engines/token",
        "engines/solver-0.json",
        "jobs/submitted.jsonl",
    ),
    *("logs/run.log", "checkpoints/iteration_000002/COMPLETE.json", "checkpoints/iteration_000002/state.json"),
    *("rollouts/iteration_000000.parquet", ".summary.json.tmp", ".config.yaml.tmp", ".inputs.json.tmp"),
)


class Waiting(BaseException):
    """Raised when a call takes longer than LIMIT_S."""


def plant(place: Path, kind: str, target: Path) -> None:
    """Replaces the file `place` by something of a kind. `target`: the file that a link leads to."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    match kind:
        case "link":
            place.symlink_to(target)
        case "broken link":
            place.symlink_to(target.with_name("not_there"))
        case "FIFO":
            os.mkfifo(place)
        case "directory":
            place.mkdir()
        case "socket":
            with contextlib.chdir(place.parent), socket.socket(socket.AF_UNIX) as listening:
                listening.bind(place.name)


def uses(run: Path) -> dict[str, Callable[[], object]]:
    """Returns {name: function} of all uses of a run directory by a run, its servers and its readers."""
    directory, record = RunDirectory(run), RunRecord(run)
    listing = Listing(role="solver", replica=0, url="http://h:1", incarnation="i", log="")

    def lock() -> None:
        with only_one(run):
            pass

    def write_log() -> None:
        with RunConsole(run / "logs/run.log", 4):
            pass

    def start() -> None:
        open_run(Run(dir=str(run.parent), name=run.name), CONFIG)

    return {
        "report": lambda: write_report(run),
        "status": lambda: status.show(status.read(run, look_s=0, jobs=[]), Console(file=open(os.devnull, "w"))),
        "damage": record.look,
        "evaluations": record.evaluations,
        "start": start,
        "lock": lock,
        "log": write_log,
        "metrics": lambda: Tracker(directory.metrics).log(9, "solver", {"loss": 1.0}, iteration=9),
        "truncate": lambda: Tracker(directory.metrics).truncate(2),
        "summary": lambda: directory.update_summary({"planned": 4}),
        "inputs": lambda: InputRecord(run / "inputs.json", done="1 iteration", accept=True).compare("files", {}),
        "slices": lambda: job_slices.begin(run, JOB, "n0", 3),
        "checkpoints": lambda: [
            checkpoint.read_state() for checkpoint in [Checkpoints(run / "checkpoints").newest()] if checkpoint
        ],
        "rollouts": lambda: IterationStore(run / "rollouts", decode=say).get(ITERATION),
        "token": lambda: make_token(run / "engines/token"),
        "registry": lambda: ServerRegistry(run / "engines").write(listing),
        "registered": ServerRegistry(run / "engines").all,
        "stop": lambda: status.stop(run, now=False),
    }


def use(call: Callable[[], Any]) -> str:
    """Calls one of the `uses`. Returns "done" or the name of the refusal. Any other error, and a call that waits, is a
    defect."""
    with _limited():
        try:
            call()
            return "done"
        except (ConfigError, DiskError, UntrustedFile) as error:
            return type(error).__name__


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Waiting(f"it waits for more than {LIMIT_S} s")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
