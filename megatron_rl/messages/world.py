"""Values and results of one rank that are sent to the other ranks of a process group."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from megatron_rl.messages.message_codec import TRAVELLERS, pack, unpack

T = TypeVar("T")


class DriverError(RuntimeError):
    """Raised on all ranks except the leader if a function that ran on the leader raised an error. The message has the
    traceback from there.
    """


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The ranks that form the data-parallel replicas of a policy (a trained model). A rank is an index into the
    policy's ranks. Rank 0 belongs to the first replica.
    """

    # ranks of each replica; the first rank of a replica receives the replica's data from rank 0
    ranks: Sequence[Sequence[int]] = ((0,),)
    reporters: Sequence[int] = (0,)  # for each replica: the rank that sends the replica's results to rank 0
    group: Any = None  # gloo process group of this rank's replica; None if the replica has only one rank

    def of(self, rank: int) -> int:
        """Returns the index of the replica that a rank belongs to."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)


class World:
    """The ranks of a process group, with gloo for communication (objects are never sent through NCCL). Every method is
    collective: all these ranks call it. The leader is the first of them.
    """

    def __init__(self, group: Any = None, *, timeout: timedelta = timedelta(hours=2)) -> None:
        """`group`: a gloo group of the ranks; None creates one of all ranks, with this timeout. `rank` is this rank's
        place in the group, counted from 0, and `size` its number of ranks.
        """
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if group is None else group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._leading = False  # True on the leader inside from_leader

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""
        dist.barrier(group=self._group)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Returns the value of the rank `source`, by default the leader, on every rank."""
        return value if self.size == 1 else broadcast(value, self._group, source=source)

    def everywhere(self, value: bool) -> bool:
        """Returns whether `value` is true on all ranks."""
        return all(all_gather(value, self._group))

    def from_leader(self, function: Callable[..., T], *args: Any) -> T:
        """Runs `function(*args)` on the leader and returns its result on every rank. An exception on the leader is
        raised on every rank: itself on the leader, as DriverError on the other ranks.
        """
        if self._leading:  # in a nested call, only the outer call sends its result to the other ranks
            return function(*args)
        if self.rank != 0:
            told: Any = self.broadcast(None)
            failure, packed = told
            if failure is not None:
                raise DriverError(f"rank {dist.get_global_rank(self._group, 0)} failed:\n{failure}")
            return unpack(packed)
        self._leading = True
        try:
            result = function(*args)
            # inside the try block, so that every rank raises if the result cannot be packed, and no rank waits forever
            packed = pack(result) if self.size > 1 else bytearray()
        except BaseException as error:
            self.broadcast(("".join(traceback.format_exception(error)), None))
            raise
        finally:
            self._leading = False
        self.broadcast((None, packed))
        return result

    def scatter(self, sizes: Sequence[int], make: Callable[[int], np.ndarray], replicas: Replicas) -> np.ndarray:
        """Sends from rank 0 to every rank the bytes of the rank's replica. Returns these bytes as a uint8 array.
        Collective.

        `sizes`: number of bytes of each replica.
        `make(replica)`: returns the bytes of a replica. It is called on rank 0 only, once per replica. It must not
        raise, because other ranks are waiting.

        Rank 0 sends each replica's bytes once, to the replica's first rank, which broadcasts the bytes to the replica's
        other ranks. Rank 0 holds at most one replica's array besides the array of rank 0's own replica.
        """
        own = replicas.of(self.rank)
        if self.rank == 0:
            for replica, ranks in enumerate(replicas.ranks):
                if replica != own:
                    dist.send(torch.from_numpy(make(replica)), self._global_rank(ranks[0]), group=self._group)
            buffer = make(own)  # the last array, so that the arrays of the other replicas have been freed
        else:
            buffer = np.empty(sizes[own], np.uint8)
            if self.rank == replicas.ranks[own][0]:
                dist.recv(torch.from_numpy(buffer), self._global_rank(0), group=self._group)
        if len(replicas.ranks[own]) > 1:
            dist.broadcast(torch.from_numpy(buffer), self._global_rank(replicas.ranks[own][0]), group=replicas.group)
        return buffer

    def gather_back(self, own: np.ndarray | None, sizes: Sequence[int], replicas: Replicas) -> list[np.ndarray] | None:
        """Sends a float32 array from one rank of each replica (its reporter rank) to rank 0. Returns the list of arrays
        by replica on rank 0, None on other ranks. Collective.

        `sizes`: number of elements of each replica's array, known on rank 0.
        """
        if self.rank != 0:
            if self.rank in replicas.reporters:
                assert own is not None
                if len(own):
                    dist.send(torch.from_numpy(own), self._global_rank(0), group=self._group)
            return None
        found = []
        for rank, size in zip(replicas.reporters, sizes, strict=True):
            values = own if rank == 0 and own is not None else np.empty(size, np.float32)
            if rank != 0 and size:
                dist.recv(torch.from_numpy(values), self._global_rank(rank), group=self._group)
            found.append(values)
        return found

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


def broadcast(value: Any, group: Any, *, source: int = 0, travellers: Sequence[type] = TRAVELLERS) -> Any:
    """Broadcasts a value from the rank `source` of a process group and returns it on every rank of the group.
    Collective. Raises TypeError on the rank `source`, before anything is sent, if the value cannot be serialised.
    """
    root, device = dist.get_global_rank(group, source), _get_object_coll_device(group)
    sends = dist.get_rank(group) == source
    packed = pack(value, travellers) if sends else bytearray()
    size = torch.tensor([len(packed)], device=device)
    dist.broadcast(size, root, group=group)
    buffer = torch.frombuffer(packed, dtype=torch.uint8) if sends else torch.empty(int(size), dtype=torch.uint8)
    buffer = buffer.to(device)
    dist.broadcast(buffer, root, group=group)
    return value if sends else unpack(memoryview(cast(Any, buffer.cpu().numpy())), travellers)


def gather(value: Any, group: Any, *, travellers: Sequence[type] = TRAVELLERS) -> list[Any]:
    """Gathers a value from each rank of a gloo process group on the group's first rank. Returns the list of values
    there, and [] on other ranks. Collective.
    """
    packed = pack(value, travellers)
    size, first = torch.tensor([len(packed)]), dist.get_global_rank(group, 0)
    if dist.get_rank(group) != 0:
        dist.gather(size, dst=first, group=group)
        dist.send(torch.frombuffer(packed, dtype=torch.uint8), first, group=group)
        return []
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.gather(size, sizes, dst=first, group=group)
    came = [bytearray(int(size)) for size in sizes]
    coming = [
        dist.irecv(torch.frombuffer(buffer, dtype=torch.uint8), dist.get_global_rank(group, rank), group=group)
        for rank, buffer in enumerate(came)
        if rank != 0
    ]
    for one in coming:
        assert one is not None  # None only on ranks outside the group
        one.wait()
    return [value, *(unpack(buffer, travellers) for buffer in came[1:])]


def all_gather(value: Any, group: Any, *, travellers: Sequence[type] = TRAVELLERS) -> list[Any]:
    """Gathers a value from each rank of a gloo process group. Returns the list of values, in rank order, on every rank.
    Collective.
    """
    return broadcast(gather(value, group, travellers=travellers), group, travellers=travellers)
