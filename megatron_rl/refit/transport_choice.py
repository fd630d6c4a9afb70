"""Chooses the transport between two ranks, and opens the transports that a process needs."""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl

from megatron_rl.config.schema import ConfigError, RefitConfig
from megatron_rl.refit.process_group_transport import PointToPoint
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.shared_memory_transport import CudaIpc, Disk, SharedMemory, Slots
from megatron_rl.refit.tcp_transport import Tcp
from megatron_rl.refit.transport import Transport
from megatron_rl.weights.refit_plan import RankPlacement

_log = logging.getLogger(__name__)


class RankLocation(NamedTuple):
    """The place where a rank runs."""

    host: str
    process: str  # a name for the life of this process; a process number would come back in another container
    device: str  # "cpu", or the GPU's UUID
    nccl: str = ""  # the version of NCCL that this process would use; empty without a GPU, or without NCCL

    @classmethod
    def new(cls, device: torch.device) -> RankLocation:
        """Returns the location of this process. Each call names another process, so call it once."""
        process = uuid.uuid4().hex
        if device.type == "cpu":
            return cls(socket.gethostname(), process, "cpu")
        name = str(torch.cuda.get_device_properties(device).uuid)
        version = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else ""
        return cls(socket.gethostname(), process, name, version)

    @property
    def place(self) -> tuple[str, str]:
        """Returns the memory that the rank shares: its GPU, or without one its process.

        Ranks of one place copy without a link.
        """
        return self.host, self.device if self.device != "cpu" else self.process


@dataclass(frozen=True)
class RankLocations:
    """The locations of all trainer ranks (by number), and of the engine ranks that take part in a refit."""

    trainer: Sequence[RankLocation]
    engines: dict[int, RankLocation]

    def placements(self, engine_world: int) -> tuple[RankPlacement, RankPlacement]:
        """Returns (trainer ranks, engine ranks) for the planner.

        An engine rank that does not take part is on node and device -1.
        """
        locations = [*self.trainer, *self.engines.values()]
        hosts = {host: i for i, host in enumerate(dict.fromkeys(s.host for s in locations))}
        devices = {place: i for i, place in enumerate(dict.fromkeys(s.place for s in locations))}
        trainer = RankPlacement([hosts[s.host] for s in self.trainer], [devices[s.place] for s in self.trainer])
        own = [self.engines.get(r) for r in range(engine_world)]
        return trainer, RankPlacement(
            [hosts[s.host] if s else -1 for s in own], [devices[s.place] if s else -1 for s in own]
        )

    @property
    def members(self) -> list[RankLocation]:
        """Returns every process once, trainer first."""
        return [*dict.fromkeys((*self.trainer, *self.engines.values()))]


class Wiring:
    """The transports of one process to the other members of a locations."""

    def __init__(self, store: RefitStore, locations: RankLocations, here: RankLocation, settings: RefitConfig) -> None:
        """Opens the transports that this locations needs. Raises TransportError when not all members come in time."""
        self._locations, self._here, self._settings = locations, here, settings
        _check_nccl(locations, settings)
        members = locations.members
        self._numbers = {location: i for i, location in enumerate(members)}
        self.kinds = sorted({self._kind(a, b) for a in locations.trainer for b in locations.engines.values() if a != b})
        self._transports: dict[str, Transport] = {}
        for kind in self.kinds:
            own, number = store.under(kind), self._numbers[here]
            if kind in ("gloo", "nccl"):
                made = PointToPoint(own, number, len(members), backend=kind, settings=settings)
            elif kind == "tcp":
                made = Tcp(own, number, settings)
            else:
                made = Slots(own, number, _medium(kind, settings))
            self._transports[kind] = made

    def route(self, source: int, destination: int) -> tuple[Transport, int]:
        """Returns (transport, number of the other side in it) for a message. Implements exchange.Route."""
        trainer, engine = self._locations.trainer[source], self._locations.engines[destination]
        other = engine if trainer == self._here else trainer
        return self._transports[self._kind(trainer, engine)], self._numbers[other]

    def close(self) -> None:
        """Closes all transports."""
        for transport in self._transports.values():
            transport.close()

    def _kind(self, trainer: RankLocation, engine: RankLocation) -> str:
        """Returns the name of the transport between two locations."""
        if self._settings.transport != "auto":
            return self._settings.transport
        if "cpu" in (trainer.device, engine.device):
            return "shared_memory" if trainer.host == engine.host else "tcp"
        if trainer.place == engine.place:
            return "cuda_ipc"
        return "nccl" if trainer.nccl and trainer.nccl == engine.nccl else "tcp"


def _check_nccl(locations: RankLocations, settings: RefitConfig) -> None:
    """Says when weights go over TCP because the versions of NCCL differ: NCCL does not connect them.

    Raises ConfigError where NCCL is asked for.
    """
    pairs = [
        (trainer.nccl or "none", engine.nccl or "none")
        for trainer in locations.trainer
        for engine in locations.engines.values()
        if "cpu" not in (trainer.device, engine.device) and trainer.place != engine.place
    ]
    different = next((pair for pair in pairs if len({*pair}) > 1), None)
    if different is None:
        return
    what = "trainer and engine have NCCL {} and {}, which cannot be connected".format(*different)
    if settings.transport == "nccl":
        raise ConfigError(f"refit.transport = nccl: {what}; use auto, or the same torch on both sides")
    _log.warning("%s: weights go over TCP. The same torch on both sides makes refits faster", what)


def _medium(kind: str, settings: RefitConfig) -> SharedMemory | Disk | CudaIpc:
    """Returns where the slots of a transport of this name lie. Raises ConfigError when a setting is missing."""
    if kind == "shared_memory":
        return SharedMemory()
    if kind == "cuda_ipc":
        return CudaIpc()
    if settings.directory is None:
        raise ConfigError("refit.transport = disk: set refit.directory to a directory that trainer and engines see")
    return Disk(Path(settings.directory))
