"""Stands in for what lies under torch.cuda.graph: streams, graphs, the allocator and the default generator, with the
states in which torch 2.11 leaves them. torch.cuda.graph and torch.cuda.stream themselves are torch's own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

CUBLAS = "cublas"  # the allocation that cuBLAS keeps for a stream until the process ends


@dataclass(eq=False)
class Stream:
    """A stream, which notes what it waits for. The first one stands for the default stream."""

    cuda: FakeCuda
    device: torch.device = torch.device("cuda:0")

    def wait_stream(self, awaited: Stream) -> None:
        self.cuda.order.append(("wait", self, awaited))


@dataclass(eq=False)
class Pool:
    """A private pool of the allocator: how many graphs use it, and what will never be freed in it."""

    uses: int = 0
    held: list[str] = field(default_factory=list)


class Generator:
    """The default generator: a state that other objects can hold, too."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def clone_state(self) -> Generator:
        return Generator(self.state | {"capturing": False})

    def graphsafe_set_state(self, source: Generator) -> Generator:
        self.state = source.state
        return self

    def get_state(self) -> int:
        return self.state["offset"]

    def set_state(self, offset: int) -> None:
        self.state["offset"] = offset


class FakeCuda:
    """What a process has of CUDA. Fields that tests set make captures fail."""

    def __init__(self) -> None:
        self.order: list[tuple[str, Stream, Stream | None]] = []  # waits, and kernels by their stream
        self.default = self.current = Stream(self)
        self.pools: dict[int, Pool] = {}
        self.recording: list[int] = []  # pools into which a capture allocates
        self.workspaces: dict[Stream, int | None] = {}  # of cuBLAS by stream: its pool, None outside of all
        self.generator = Generator({"capturing": False, "offset": 8})
        self.capturing: Graph | None = None
        self.handles, self.replays = 0, 0
        self.fails_to_begin = 0  # so many captures from now on
        self.fails_to_end = False  # the next capture
        self.broken = False

    def install(self, monkeypatch: Any) -> None:
        """Replaces torch's pieces for a test."""
        cuda: dict[str, Any] = {
            "CUDAGraph": lambda: Graph(self), "Stream": lambda: Stream(self), "graph_pool_handle": self.new_handle,
            "current_stream": lambda *device: self.current, "set_stream": self.set_stream,
            "current_device": lambda: 0, "default_generators": (self.generator,), "synchronize": self.synchronize,
            "empty_cache": self.empty_cache, "_get_device_index": lambda *unused: 0,
            "stream": torch.cuda.StreamContext,  # megatron/platform.py has replaced it where there is no GPU
        }  # fmt: skip
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
        replacements = {"_cuda_endAllocateToPool": self.end_allocate, "_cuda_releasePool": self.release}
        for name, value in (replacements | {"_host_emptyCache": lambda: None}).items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "rand", self.rand)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **more: zeros(*sizes, **more))

    def product(self) -> None:
        """Multiplies matrices on the current stream."""
        self.order.append(("product", self.current, None))
        if self.current not in self.workspaces:
            pool = self.recording[-1] if self.recording else None
            self.workspaces[self.current] = pool
            if pool is not None:
                self.pools[pool].held.append(CUBLAS)

    def wait(self) -> None:
        """Waits for the device, which a capture refuses."""
        if self.capturing is not None:
            self.fails_to_end = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def new_handle(self) -> int:
        self.handles += 1
        return self.handles

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def empty_cache(self) -> None:
        assert_torch(not self.recording, "captures_underway.empty()")
        self.pools = {handle: pool for handle, pool in self.pools.items() if pool.uses or pool.held}

    def begin_allocate(self, handle: int) -> None:
        if handle in self.pools:
            assert_torch(self.pools[handle].uses > 0, "it->second->use_count > 0")
        pool = self.pools.setdefault(handle, Pool())
        pool.uses += 1
        self.recording.append(handle)

    def end_allocate(self, device: int, handle: int) -> None:
        if handle not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(handle)

    def release(self, device: int, handle: int) -> None:
        self.pools[handle].uses -= 1
        assert self.pools[handle].uses >= 0

    def rand(self, *sizes: int, device: str) -> None:
        if self.generator.state["capturing"]:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.generator.state["offset"] += 4


class Graph:
    """A CUDA graph. Its capture runs what is captured: tensors of the CPU know no other way."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.state = cuda, cuda.generator.state

    def capture_begin(self, pool: int, **modes: Any) -> None:
        self.pool, self.state["capturing"] = pool, True
        if self.cuda.current is self.cuda.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.cuda.begin_allocate(pool)
        if self.cuda.fails_to_begin:
            self.cuda.fails_to_begin -= 1
            raise RuntimeError("CUDA error: out of memory")
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None
        if self.cuda.fails_to_end:
            self.cuda.fails_to_end = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.end_allocate(0, self.pool)
        self.state["capturing"] = False
        weakref.finalize(self, self.cuda.release, 0, self.pool)

    def replay(self) -> None:
        if self.state["capturing"]:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.cuda.replays += 1


def assert_torch(holds: bool, what: str) -> None:
    """Raises as TORCH_INTERNAL_ASSERT does."""
    if not holds:
        raise RuntimeError(f"{what} INTERNAL ASSERT FAILED")
