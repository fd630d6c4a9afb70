"""A transport through NIXL: the receiver reads a message from the sender's registered memory. Through UCX, NIXL uses
RDMA between hosts with RDMA hardware, TCP between other hosts, and shared memory or CUDA IPC within a host.
"""

from __future__ import annotations

import importlib
import logging
import time
import uuid
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import ConfigError
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.shared_memory_transport import Medium, Slots
from megatron_rl.refit.transport import Deadline, TransportError

POLL_S = 5e-5  # interval in seconds at which a reader checks whether its read has ended


class Nixl(Slots):
    """A transport in which the receiver reads each message from the sender's memory. The sender runs no Python code
    during the read. Implements transport.Transport. `store` and `rank`: see Slots.
    """

    def __init__(self, store: RefitStore, rank: int) -> None:
        self._memory = RegisteredMemory()
        super().__init__(store, rank, self._memory)

    def close(self) -> None:
        self._memory.stop()  # comes first, because until then a receiver that timed out may still read the slots
        super().close()


class RegisteredMemory(Medium):
    """A medium whose slots are memory that is registered with a NIXL agent of this process. Implements
    shared_memory_transport.Medium.
    """

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(
                f"refit.transport = nixl: {error}; install NIXL in the environments of the trainer and of the engines "
                "(pip install 'nixl[cu13]'), or choose another transport"
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # NIXL logs each agent to stdout
        members = vars(self._api.nixlBind).values()
        self._errors = tuple(member for member in members if isinstance(member, type) and issubclass(member, Exception))
        settings = self._api.nixl_agent_config(backends=["UCX"])
        self._agent: Any = self._api.nixl_agent(uuid.uuid4().hex, settings)
        self._registered: dict[int, Any] = {}  # address of a slot's first byte -> the slot's registration with NIXL
        self._landing: Tensor | None = None  # memory into which NIXL writes the messages that this process receives
        self._peers: dict[str, tuple[str, str]] = {}  # name of a peer's agent -> its last loaded metadata
        self._unfinished: list[Any] = []  # for each failed or running read: (the read, the memory that NIXL writes)

    def allocate(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._registered[memory.data_ptr()] = self._agent.register_memory(memory)
        return memory.data_ptr(), memory

    def publish(self, address: Any, message: Tensor) -> Any:
        if message.is_cuda:
            torch.cuda.current_stream(message.device).synchronize()
        place = [address, len(message), max(0, message.get_device())]
        return [self._agent.name, self._agent.get_agent_metadata().hex(), "VRAM" if message.is_cuda else "DRAM", place]

    def open(self, address: Any, device: torch.device, deadline: Deadline) -> Tensor:
        name, metadata, kind, (first, size, number) = address
        landing = self._landing
        if landing is None or len(landing) < size or landing.device != device:
            if landing is not None:
                self.free(landing.data_ptr())
            _, landing = self.allocate(size, device)
        self._landing = None  # stays None if the read fails, because NIXL may still write to the memory
        try:
            if self._peers.get(name) != metadata:  # the agent is new, or its slots have changed since the last read
                if name in self._peers:
                    self._agent.remove_remote_agent(name)
                self._agent.add_remote_agent(bytes.fromhex(metadata))
                self._peers[name] = metadata
            local = self._agent.get_xfer_descs(landing[:size])
            remote = self._agent.get_xfer_descs([(first, size, number)], kind)
            read = self._agent.initialize_xfer("READ", local, remote, name)
            self._unfinished.append((read, landing))
            self._agent.transfer(read)
            failure = deadline.until(lambda seconds: self._has_ended(read, seconds))
            if failure is None and self._agent.check_xfer_state(read) == "ERR":
                failure = "NIXL could not read it"
        except self._errors as error:
            failure = f"NIXL: {error}"
        if failure is not None:
            raise TransportError(failure)
        self._unfinished.pop()
        self._landing = landing
        return landing

    def free(self, address: Any) -> None:
        if self._agent is not None:
            self._agent.deregister_memory(self._registered.pop(address))

    def stop(self) -> None:
        """Ends this process's NIXL agent. From then on no other process can read the memory of this process."""
        memory = [landing for _, landing in self._unfinished]
        self._unfinished.clear()
        self._agent = None
        del memory  # freed only now: NIXL may write into this memory until NIXL's reads and agent are deleted

    def _has_ended(self, read: Any, seconds: float) -> bool:
        """Waits up to `seconds` seconds for the end of a read. Returns whether the read has ended or failed."""
        end = time.monotonic() + seconds
        while (under_way := self._agent.check_xfer_state(read) == "PROC") and time.monotonic() < end:
            time.sleep(POLL_S)
        return not under_way
