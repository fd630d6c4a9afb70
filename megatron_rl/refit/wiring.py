"""Which transport a message takes between two ranks, and the groups and slots that this needs."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_rl.config.schema import ConfigError, RefitConfig
from megatron_rl.refit.base import Transport
from megatron_rl.refit.board import Board
from megatron_rl.refit.point_to_point import PointToPoint
from megatron_rl.refit.slots import CudaIpc, Disk, SharedMemory, Slots
from megatron_rl.refit.tcp import Tcp
from megatron_rl.weights.reshard import Places


class Seat(NamedTuple):
    """Where a rank runs."""

    host: str
    process: str  # of a process's whole life; its number comes back in another container
    device: str  # "cpu", or the GPU's UUID

    @classmethod
    def new(cls, device: torch.device) -> Seat:
        """For this process, to be made once."""
        name = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
        return cls(socket.gethostname(), uuid.uuid4().hex, name)

    @property
    def place(self) -> tuple[str, str]:
        """Ranks of one place copy without a link: of one GPU, or, without one, of one process."""
        return self.host, self.device if self.device != "cpu" else self.process


@dataclass(frozen=True)
class Seating:
    """Trainer ranks by number, and the engine ranks that take part."""

    trainer: Sequence[Seat]
    engines: dict[int, Seat]

    def places(self, engine_world: int) -> tuple[Places, Places]:
        """For the planner. Engine ranks that take no part are nowhere."""
        seats = [*self.trainer, *self.engines.values()]
        hosts = {host: i for i, host in enumerate(dict.fromkeys(s.host for s in seats))}
        devices = {place: i for i, place in enumerate(dict.fromkeys(s.place for s in seats))}
        trainer = Places([hosts[s.host] for s in self.trainer], [devices[s.place] for s in self.trainer])
        own = [self.engines.get(r) for r in range(engine_world)]
        return trainer, Places([hosts[s.host] if s else -1 for s in own], [devices[s.place] if s else -1 for s in own])

    @property
    def members(self) -> list[Seat]:
        """Every process once, trainer first."""
        return [*dict.fromkeys((*self.trainer, *self.engines.values()))]


class Wiring:
    """The transports of one process among the members. Raises TransportError when not all of them come in time."""

    def __init__(self, board: Board, seating: Seating, here: Seat, settings: RefitConfig) -> None:
        self._seating, self._here, self._settings = seating, here, settings
        members = seating.members
        self._numbers = {seat: i for i, seat in enumerate(members)}
        self.kinds = sorted({self._kind(a, b) for a in seating.trainer for b in seating.engines.values() if a != b})
        self._transports: dict[str, Transport] = {}
        for kind in self.kinds:
            own, number = board.under(kind), self._numbers[here]
            if kind in ("gloo", "nccl"):
                made = PointToPoint(own, number, len(members), backend=kind, settings=settings)
            elif kind == "tcp":
                made = Tcp(own, number, settings)
            else:
                made = Slots(own, number, _medium(kind, settings))
            self._transports[kind] = made

    def route(self, source: int, destination: int) -> tuple[Transport, int]:
        """Implements exchange.Route for messages of this process."""
        trainer, engine = self._seating.trainer[source], self._seating.engines[destination]
        other = engine if trainer == self._here else trainer
        return self._transports[self._kind(trainer, engine)], self._numbers[other]

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _kind(self, trainer: Seat, engine: Seat) -> str:
        if self._settings.transport != "auto":
            return self._settings.transport
        if "cpu" in (trainer.device, engine.device):
            return "shared_memory" if trainer.host == engine.host else "tcp"
        return "cuda_ipc" if trainer.place == engine.place else "nccl"


def _medium(kind: str, settings: RefitConfig) -> SharedMemory | Disk | CudaIpc:
    if kind == "shared_memory":
        return SharedMemory()
    if kind == "cuda_ipc":
        return CudaIpc()
    if settings.directory is None:
        raise ConfigError("refit.transport = disk: set refit.directory to a directory that trainer and engines see")
    return Disk(Path(settings.directory))
