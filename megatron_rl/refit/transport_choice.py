"""Selects the transport between each pair of ranks, and opens the transports of a process."""

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
from megatron_rl.refit.nccl_transport import Nccl
from megatron_rl.refit.nixl_transport import Nixl
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.shared_memory_transport import CudaIpc, Disk, SharedMemory, Slots
from megatron_rl.refit.tcp_transport import Tcp
from megatron_rl.refit.transport import Transport
from megatron_rl.weights.refit_plan import RankPlacement

_log = logging.getLogger(__name__)


class RankLocation(NamedTuple):
    """The host, process and device of a rank."""

    host: str
    process: str  # random id of the process; process ids are not unique across containers
    device: str  # "cpu", or the UUID of the GPU
    nccl: str = ""  # NCCL version of the process; empty without a GPU or without NCCL

    @classmethod
    def new(cls, device: torch.device) -> RankLocation:
        """Returns the location of this process. Each call creates a new process id, so call it once per process."""
        process = uuid.uuid4().hex
        if device.type == "cpu":
            return cls(socket.gethostname(), process, "cpu")
        name = str(torch.cuda.get_device_properties(device).uuid)
        version = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else ""
        return cls(socket.gethostname(), process, name, version)

    @property
    def place(self) -> tuple[str, str]:
        """Returns an id of the memory that holds the rank's weights: (host, GPU), or (host, process) for a rank on a
        CPU.

        Between two ranks with the same id, weights are copied without a network link.
        """
        return self.host, self.device if self.device != "cpu" else self.process


@dataclass(frozen=True)
class RankLocations:
    """The locations of all trainer ranks (indexed by rank), and of the engine ranks that take part in a refit."""

    trainer: Sequence[RankLocation]
    engines: dict[int, RankLocation]

    def placements(self, engine_world: int) -> tuple[RankPlacement, RankPlacement]:
        """Returns the placements of (all trainer ranks, all `engine_world` engine ranks) in the form that
        `refit_plan.plan` takes.

        Node and device are -1 for an engine rank that does not take part.
        """
        locations = [*self.trainer, *self.engines.values()]
        hosts = {host: i for i, host in enumerate(dict.fromkeys(s.host for s in locations))}
        devices = {place: i for i, place in enumerate(dict.fromkeys(s.place for s in locations))}
        trainer = RankPlacement([hosts[s.host] for s in self.trainer], [devices[s.place] for s in self.trainer])
        engine_ranks = [self.engines.get(r) for r in range(engine_world)]
        return trainer, RankPlacement(
            [hosts[s.host] if s else -1 for s in engine_ranks], [devices[s.place] if s else -1 for s in engine_ranks]
        )

    @property
    def members(self) -> list[RankLocation]:
        """Returns the locations without duplicates: first those of the trainer processes, then those of the engines."""
        return [*dict.fromkeys((*self.trainer, *self.engines.values()))]


class Wiring:
    """The open transports between this process and the other processes of a refit."""

    def __init__(self, store: RefitStore, locations: RankLocations, local: RankLocation, settings: RefitConfig) -> None:
        """Opens the transports that the pairs of ranks in `locations` need. `local`: the location of this process.

        Raises TransportError when a process of `locations` does not connect in time, and ConfigError if the configured
        transport cannot be used.
        """
        self._locations, self._local, self._settings = locations, local, settings
        _check_nccl(locations, settings)
        members = locations.members
        self._numbers = {location: i for i, location in enumerate(members)}
        self.kinds = sorted({self._kind(a, b) for a in locations.trainer for b in locations.engines.values() if a != b})
        self._transports: dict[str, Transport] = {}
        for kind in self.kinds:
            kind_store, number = store.under(kind), self._numbers[local]
            if kind == "nccl":
                transport = Nccl(kind_store, number, len(members), settings)
            elif kind == "tcp":
                transport = Tcp(kind_store, number, settings)
            elif kind == "nixl":
                transport = Nixl(kind_store, number)
            elif kind == "disk":
                assert settings.directory is not None, "checked by the config"
                transport = Slots(kind_store, number, Disk(Path(settings.directory)))
            else:
                transport = Slots(kind_store, number, SharedMemory() if kind == "shared_memory" else CudaIpc())
            self._transports[kind] = transport

    def route(self, source: int, destination: int) -> tuple[Transport, int]:
        """Returns (transport, index of the other side in the transport) for a message. Implements exchange.Route."""
        trainer, engine = self._locations.trainer[source], self._locations.engines[destination]
        peer = engine if trainer == self._local else trainer
        return self._transports[self._kind(trainer, engine)], self._numbers[peer]

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _kind(self, trainer: RankLocation, engine: RankLocation) -> str:
        """Returns the name of the transport to use between a trainer rank and an engine rank, e.g. "tcp"."""
        if self._settings.transport != "auto":
            return self._settings.transport
        if "cpu" in (trainer.device, engine.device):
            return "shared_memory" if trainer.host == engine.host else "tcp"
        if trainer.place == engine.place:
            return "cuda_ipc"
        return "nccl" if trainer.nccl and trainer.nccl == engine.nccl else "tcp"


def _check_nccl(locations: RankLocations, settings: RefitConfig) -> None:
    """Logs a warning if weights are sent over TCP because the NCCL versions of trainer and engine differ.

    NCCL cannot connect processes with different versions. Raises ConfigError instead if the versions differ and the
    config requires NCCL.
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
