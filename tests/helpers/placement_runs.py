"""Tango runs whose roles have ranks of their own: ranks that nap before every command, and one that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import durable_runs
from conftest import program
from safetensors.numpy import load_file

from megatron_rl.messages.commands import Commands
from megatron_rl.recipes.tango import Tango

NAPS, KILL = "PLACEMENT_NAPS", "PLACEMENT_KILL"  # seed of the naps; RANK:NUMBER of the command before which it dies
_handler = Commands._handler
_numbers: dict[int, int] = {}  # {rank: commands so far}, in a process of a run


def _napping(commands: Commands, name: str) -> Callable[[Any], Any]:
    handler, seed = _handler(commands, name), os.environ.get(NAPS)
    if seed is None:
        return handler

    def run(argument: Any) -> Any:
        number = _numbers[commands.rank] = _numbers.get(commands.rank, 0) + 1
        if os.environ.get(KILL) == f"{commands.rank}:{number}":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.Random(f"{seed} {commands.rank} {number}").choice((0.0, 0.0, 0.02, 0.2)))
        return handler(argument)

    return run


@dataclass(kw_only=True)
class NappingTango(Tango):
    """Tango in a process whose ranks nap, if the environment says so."""

    def __post_init__(self) -> None:
        Commands._handler = _napping  # type: ignore[method-assign]
        super().__post_init__()


def tango(
    base: Path, name: str, ranks: int, sets: Mapping[str, str], *, urls: Mapping[str, Sequence[str]] | None = None,
    **rollouts: Any,
) -> Path:  # fmt: skip
    """Writes the config of a run of `ranks` ranks. `sets`: {role: its ranks}. `urls`: {role: addresses of its servers};
    None: the embedded engine."""
    settings = durable_runs.tango(base, name)
    settings["recipe"]["target"] = "placement_runs:NappingTango"
    settings["launch"] = {"nproc": ranks}
    servers = {"kind": "vllm", "urls": urls, "start": False, "token_file": f"{base}/token"}
    settings["engine"] = {"kind": "embedded"} if urls is None else servers
    settings["rollouts"] = rollouts
    settings["run"] |= {"save_every": 2}
    for role, own in sets.items():
        settings["roles"][role]["ranks"] = own
    file = base / f"{name}.json"
    file.write_text(json.dumps(settings))
    return file


def train(file: Path, *, check: bool = True) -> str:
    """Runs a config. Returns what it printed."""
    done = program("train", str(file), check=check)
    return done.stdout + done.stderr


def weights(base: Path, name: str) -> dict[str, bytes]:
    """Returns {role and parameter: bytes} of the models that a run exported."""
    files = sorted((base / "runs" / name / "models").glob("*/*.safetensors"))
    return {f"{file.parent.name} {key}": array.tobytes() for file in files for key, array in load_file(file).items()}


def overlaps(run: Path, one: str, other: str) -> list[tuple[int, int]]:
    """Returns the pairs of iterations of which the first updates the role `one` while the second updates the role
    `other`, by the intervals that a run of one start has recorded. `run`: its directory."""
    lines = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    updates = [interval for line in lines for interval in line["intervals"] if interval[2] == "training"]
    return [
        (first[0], second[0])
        for first in updates
        for second in updates
        if (first[1], second[1]) == (one, other) and max(first[3], second[3]) < min(first[4], second[4])
    ]


def rows(base: Path, name: str) -> list[dict[str, Any]]:
    """Returns the run's metrics without those that measure time."""
    lines = [json.loads(line) for line in (base / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    timed = ("speed/", "seconds/", "time")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]
