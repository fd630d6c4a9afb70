"""A transport through memory or files that both sides can open.

The media are POSIX shared memory, safetensors files on disk, CUDA IPC between GPUs of one host, and memory that is
registered with NIXL (nixl_transport.py). The sender writes a message into a slot and announces it on the store. The
receiver opens the slot, reads the message, and marks the slot as free.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import uuid
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.transport import Deadline, Handle, TransportError
from megatron_rl.run.json_lines import UNREADABLE

SHARED_MEMORY = Path("/dev/shm")
SMALLEST_SLOT = 1 << 16  # minimum size of a slot in bytes


class Medium(ABC):
    """A kind of memory that holds messages. A slot is memory for one message, and its address is a JSON value."""

    @abstractmethod
    def allocate(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        """Returns the address and the memory of a new slot, uint8 [at least size]."""
        ...

    def publish(self, address: Any, message: Tensor) -> Any:
        """Makes the message in a slot visible to the receiver. Returns the address to pass to the receiver's `open`."""
        return address

    @abstractmethod
    def open(self, address: Any, device: torch.device, deadline: Deadline) -> Tensor:
        """Returns the memory of a slot, or a copy of the memory that is valid until the next call of `open`. Raises
        OSError or RuntimeError if the slot cannot be opened before the deadline, for example because the sender has
        ended.
        """
        ...

    def free(self, address: Any) -> None:  # noqa: B027
        """Frees the memory of a slot that no receiver reads. Does nothing in this base class, which suits media whose
        memory is freed when the slot's tensor is garbage-collected.
        """
        ...


class SharedMemory(Medium):
    """A medium whose slots (memory for one message each) are files in /dev/shm, mapped into memory by both sides.

    A new instance removes the files that dead processes of the same user left behind.
    """

    def __init__(self) -> None:
        self._prefix = f"megatron_rl-{os.getuid()}-"
        self._open: dict[str, Tensor] = {}
        # slot name -> descriptor of the slot's file, which is locked while this process lives
        self._held: dict[str, int] = {}
        for slot_file in SHARED_MEMORY.glob(f"{self._prefix}*"):
            _remove_if_unlocked(slot_file)

    def allocate(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        path = SHARED_MEMORY / f"{self._prefix}{uuid.uuid4().hex[:16]}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        # If the file system does not support flock, files that dead processes left behind are not removed.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._held[path.name] = descriptor
        try:
            # Reserves memory, so that a lack of memory raises an error here instead of a later bus error.
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            self.free([path.name])
            raise TransportError(
                f"no {size / 2**20:.0f} MiB of shared memory are free in {SHARED_MEMORY}: lower refit.bucket_mib, or "
                "choose another refit.transport"
            ) from error
        return [path.name, size], torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def open(self, address: Any, device: torch.device, deadline: Deadline) -> Tensor:
        name, size = address
        if not isinstance(name, str) or "/" in name or not name.startswith(self._prefix):
            raise RuntimeError(f"{name!r} is not a slot of this user")
        if name not in self._open:
            self._open[name] = torch.from_file(str(SHARED_MEMORY / name), shared=True, size=size, dtype=torch.uint8)
        return self._open[name]

    def free(self, address: Any) -> None:
        (SHARED_MEMORY / address[0]).unlink(missing_ok=True)
        os.close(self._held.pop(address[0]))


class Disk(Medium):
    """A medium whose slots (memory for one message each) are safetensors files in a directory that all ranks share.

    Each file is written under a temporary name and then renamed, so that no partial file is read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def allocate(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        return f"{os.getpid()}-{uuid.uuid4().hex[:12]}.safetensors", torch.empty(size, dtype=torch.uint8)

    def publish(self, address: Any, message: Tensor) -> Any:
        partial = self._directory / f".{address}"
        try:
            save_file({"message": message.contiguous()}, partial)
            partial.replace(self._directory / address)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise TransportError(f"{self._directory}: {error}") from error
        return address

    def open(self, address: Any, device: torch.device, deadline: Deadline) -> Tensor:
        if not isinstance(address, str) or "/" in address:
            raise RuntimeError(f"{address!r} is not a file name")
        try:
            return load_file(self._directory / address)["message"]
        except SafetensorError as error:
            raise OSError(f"{self._directory / address}: {error}") from error

    def free(self, address: Any) -> None:
        (self._directory / address).unlink(missing_ok=True)


class CudaIpc(Medium):
    """A medium whose slots (memory for one message each) are in GPU memory. Other processes of the same host open a
    slot by its CUDA IPC handle.

    Slots are not allocated in expandable segments (PYTORCH_CUDA_ALLOC_CONF). To open such a segment, the receiver would
    have to take its file descriptor from the sender, which Linux allows only to processes that may trace the sender.
    """

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}

    def allocate(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        with _without_expandable_segments():
            message = torch.empty(size, dtype=torch.uint8, device=device)
        handle = message.untyped_storage()._share_cuda_()
        return [part.hex() if isinstance(part, bytes) else part for part in handle], message

    def publish(self, address: Any, message: Tensor) -> Any:
        torch.cuda.current_stream(message.device).synchronize()
        return address

    def open(self, address: Any, device: torch.device, deadline: Deadline) -> Tensor:
        key = str(address)
        if key not in self._open:
            parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in address]
            # Use this process's index of the GPU, because the sending process may have another index for it.
            parts[0] = device.index
            storage = torch.UntypedStorage._new_shared_cuda(*parts)
            self._open[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._open[key]


class Slots:
    """A transport that sends a message by copying it into a slot of a medium, such as shared memory, from which the
    receiver reads it. Implements transport.Transport.

    `rank` is the index of this process among the peers. No process other than the peers may use `store`.
    """

    takes_pieces = False  # separate pieces save no copy, because every message is copied into a slot

    def __init__(self, store: RefitStore, rank: int, medium: Medium) -> None:
        self._store, self._rank, self._medium = store, rank, medium
        self._slots: list[_Slot] = []
        self._lost: list[_Slot] = []  # slots that the receiver did not mark as free in time, and may still read
        # _sent: peer -> number of the next message to the peer; _came: peer -> number of the next message from the peer
        self._sent: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        self._came: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)

    def buffer(self, size: int, device: torch.device) -> Tensor:
        free = [s for s in self._slots if not s.in_use]
        slot = next((s for s in free if len(s.memory) >= size), None)
        if slot is None:
            for s in free:
                self._medium.free(s.address)
                self._slots.remove(s)
            # Sizes are rounded up by at most an eighth, to one of eight sizes between two powers of two.
            # The rounding limits the number of different slots that the receiver keeps open.
            step = max(SMALLEST_SLOT, (1 << (size - 1).bit_length()) // 16)
            slot = _Slot(*self._medium.allocate(-(-size // step) * step, device))
        else:
            self._slots.remove(slot)
        self._slots.append(slot)
        return slot.memory[:size]

    def send(self, peer: int, label: str, message: Tensor, *, pieces: Iterable[Tensor] = ()) -> Handle:
        slot = next(s for s in self._slots if s.memory.data_ptr() == message.data_ptr())
        key, slot.in_use = f"{self._rank}-{peer}/{next(self._sent[peer])}", True
        self._store.put(key, [self._medium.publish(slot.address, message), len(message)])

        def wait(deadline: Deadline) -> Tensor:
            failure = _await(self._store, f"{key}/free", deadline)
            if failure is not None:
                self._slots.remove(slot)
                self._lost.append(slot)
                raise TransportError(f"{label} to {peer}: it was not taken, {failure}")
            self._store.remove(key)
            self._store.remove(f"{key}/free")
            slot.in_use = False
            return message

        return Handle(wait)

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> Handle:
        key = f"{peer}-{self._rank}/{next(self._came[peer])}"

        def wait(deadline: Deadline) -> Tensor:
            failure = _await(self._store, key, deadline)
            if failure is not None:
                raise TransportError(f"{label} from {peer}: {failure}")
            try:
                address, size = self._store.get(key, tuple[Any, int], 0.0)
                return self._medium.open(address, device, deadline)[:size]
            except (TransportError, OSError, RuntimeError, IndexError, *UNREADABLE) as error:
                raise TransportError(f"{label} from {peer}: {error}") from error

        return Handle(wait, lambda: self._store.put(f"{key}/free", True))

    def close(self) -> None:
        for slot in (*self._slots, *self._lost):
            self._medium.free(slot.address)
        self._slots.clear()
        self._lost.clear()


@dataclass(eq=False)
class _Slot:
    """A slot (memory for one message) of this sender."""

    address: Any
    memory: Tensor
    in_use: bool = False  # True from the sending of a message until the receiver has read it


@contextlib.contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """A context manager that makes torch allocate GPU memory outside of expandable segments in the `with` block. A
    no-op unless the environment turns expandable segments on.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    without = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)
    if without == settings:
        yield
        return
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # the function is deprecated
        torch.cuda.memory._set_allocator_settings(without)
        try:
            yield
        finally:
            torch.cuda.memory._set_allocator_settings(settings)


def _remove_if_unlocked(path: Path) -> None:
    """Removes the file of a shared-memory slot unless a live process holds the lock on the file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # the file does not exist any more, or belongs to another user
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size:  # an empty file has just been created, and its owner is about to lock it
            path.unlink(missing_ok=True)
    except OSError:  # a live process holds the lock
        pass
    finally:
        os.close(descriptor)


def _await(store: RefitStore, key: str, deadline: Deadline) -> str | None:
    """Waits until `key` exists on the store. Returns None if the key exists, otherwise a text that says why the wait
    failed.
    """
    try:
        return deadline.until(lambda seconds: store.has(key, seconds))
    except TransportError as error:
        return str(error)
