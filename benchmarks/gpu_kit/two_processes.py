"""A trainer in this process and an engine in another one on the same GPU, between which weights go by CUDA IPC."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.config.schema import RefitConfig
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.refit.engine_side import EngineSide
from megatron_rl.refit.refit_store import Address, RefitStore
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.weights.rank_layouts import EngineLayout

if TYPE_CHECKING:  # the engine's process does not import Megatron-core
    from megatron_rl.megatron.policy import MegatronPolicy

START = ["spawn"]  # how the other process starts: a fork of one that has used a GPU could not use it
JOIN_S = 120.0  # for the other process to import its libraries and to join


class Pair:
    """The trainer's side of refits to one engine process, which can be ended and started again."""

    def __init__(self, policy: MegatronPolicy, folder: Path, *, verify: str, texts: list[list[int]]) -> None:
        """Starts the engine. `folder`: an empty directory for what both processes tell each other. `texts`: what the
        engine scores after every refit."""
        self._folder, dtype = folder, policy.role.model.dtype
        topology = Topology(
            sizes=policy.arch,
            trainer=policy.export.trainer_layout,
            engines=EngineLayout(replicas=1, whole=True),
            dtype=dtype,
        )
        settings: Any = RefitConfig(verify=verify)  # type: ignore[arg-type]
        self._side = TrainerSide(topology, settings, policy.export.shards(), group=policy.groups.control)
        (folder / "setup.json").write_text(
            json.dumps(
                {"model": str(policy.role.model.path), "dtype": dtype, "address": self._side.address, "texts": texts}
            )
        )
        self._started = 0
        self._process = self._start()

    def refit(self, version: int) -> dict[str, float]:
        """Brings the engine to the policy's weights. Returns the refit's figures."""
        return self._side(version)

    def scores(self, version: int) -> list[np.ndarray]:
        """Returns the engine's log-probs of the texts by a version's weights."""
        file = self._folder / f"scores{version}.json"
        self._await(file)
        return [np.array(row, np.float32) for row in json.loads(file.read_text())]

    @property
    def kinds(self) -> list[str]:
        """Returns the names of the transports of the last refit."""
        return [] if self._side._wiring is None else self._side._wiring.kinds

    def await_engine(self) -> None:
        """Waits until the process that was started last has joined."""
        self._await(self._folder / f"joined{self._started}")

    def kill(self) -> None:
        """Kills the engine's process, and starts another one."""
        self._process.kill()
        self._process.join()
        self._process = self._start()

    def close(self) -> None:
        """Ends the engine's process and the trainer's side."""
        (self._folder / "end").touch()
        self._process.join(JOIN_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._side.close()

    def _start(self) -> BaseProcess:
        self._started += 1
        process = multiprocessing.get_context(START[0]).Process(
            target=serve, args=(str(self._folder), self._started), daemon=True
        )
        process.start()
        return process

    def _await(self, file: Path) -> None:
        """Waits for a file of the engine's. Raises RuntimeError when its process has ended, or is too late."""
        end = time.monotonic() + JOIN_S
        while not file.exists():
            if self._process.exitcode is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"the engine's process (exit code {self._process.exitcode}) did not write {file.name}"
                )
            time.sleep(0.02)


@contextlib.contextmanager
def pair(policy: MegatronPolicy, folder: Path, *, verify: str, texts: list[list[int]]) -> Iterator[Pair]:
    """Opens a Pair for the block."""
    folder.mkdir(parents=True)
    both = Pair(policy, folder, verify=verify, texts=texts)
    try:
        yield both
    finally:
        both.close()


def serve(folder: str, number: int) -> None:
    """Is the engine's process: takes part in refits, and scores the texts after each, until it is told to end."""
    place = Path(folder)
    setup = json.loads((place / "setup.json").read_text())
    torch.cuda.set_device(0)
    engine = EmbeddedEngine(setup["model"], dtype=getattr(torch, setup["dtype"]))
    side = EngineSide(RefitStore.join(Address(*setup["address"])), 0, engine, torch.device("cuda:0"))
    (place / f"joined{number}").touch()
    while not (place / "end").exists():
        version = side.take_part(0.1)
        if version is not None and setup["texts"]:
            scores = [row.tolist() for row in engine.score(setup["texts"])]
            (place / f"scores{version}.part").write_text(json.dumps(scores))
            (place / f"scores{version}.part").rename(place / f"scores{version}.json")
    side.close()
