"""The ranks of a run: values and results of rank 0 are sent to all ranks, and rank 0 can run functions on all ranks."""

from __future__ import annotations

import threading
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
Handler = Callable[[Any], Any]


class DriverError(RuntimeError):
    """Raised on all ranks except rank 0 if a function that ran on rank 0 raised an error. The message has the traceback
    from rank 0.
    """


class FollowerError(RuntimeError):
    """Raised on rank 0 (the driver) if a handler that `call_all` ran raised an error on some rank. The message has the
    traceback from the rank where the handler failed.
    """


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The ranks that form the data-parallel replicas of a policy (a trained model). Rank 0 belongs to the first
    replica.
    """

    # ranks of each replica; the first rank of a replica receives the replica's data from rank 0
    ranks: Sequence[Sequence[int]] = ((0,),)
    reporters: Sequence[int] = (0,)  # for each replica: the rank that sends the replica's results to rank 0
    group: Any = None  # gloo process group of this rank's replica; None if the replica has only one rank

    def of(self, rank: int) -> int:
        """Returns the index of the replica that a rank belongs to."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)


class World:
    """All ranks of the default process group, with a separate gloo group for communication (objects are never sent
    through NCCL).

    While rank 0 runs a function in `from_driver`, the other ranks wait for commands from rank 0: to run a registered
    handler, or to receive the function's result.

    `work`: a second world of the same ranks and handlers, with a group of its own. The code of a handler uses `work`,
    because all ranks run the handler, so that no rank waits for the commands of the first world. The field `work` of
    the second world is the second world itself.
    """

    def __init__(self, timeout: timedelta = timedelta(hours=2), *, outer: World | None = None) -> None:
        """`outer`: the world whose `work` this world is; None creates both worlds. Collective."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._prepare(outer)
        self.work: World = World(timeout, outer=self) if outer is None else self

    def _prepare(self, outer: World | None) -> None:
        self._outer = outer
        self._handlers: dict[str, Handler] = {} if outer is None else outer._handlers
        self._calling = threading.Lock()  # held during a command: threads of rank 0 send commands in turn
        self._driver: int | None = None  # on rank 0: id of the thread that runs a function in from_driver
        self._handling: int | None = None  # id of the thread that runs a handler
        self._apart = False  # True on rank 0 after an error in `together`, when the other ranks may not listen any more

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""
        dist.barrier(group=self._group)

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every rank."""
        return self._send(value)

    def everywhere(self, value: bool) -> bool:
        """Returns whether `value` is true on all ranks. Collective; must not be called inside `from_driver`."""
        return all(all_gather(value, self._group))

    def from_driver(self, function: Callable[..., T], *args: Any) -> T:
        """Runs `function(*args)` on rank 0 and returns its result on every rank. An exception on rank 0 is raised on
        every rank.
        """
        if self._handling == threading.get_ident():
            raise RuntimeError("from_driver inside a running handler: no rank waits for commands; use work.from_driver")
        if self._outer is not None and self._outer._driver is not None and self._outer._handling is None:
            raise RuntimeError("work.from_driver outside a handler: the other ranks wait for commands; use call_all")
        if self._driver is not None:  # in a nested call, only the outer call sends its result to the other ranks
            return function(*args)
        if self.rank != 0:
            return self._follow()
        self._driver = threading.get_ident()
        try:
            result = function(*args)
            # inside the try block, so that every rank raises if the result cannot be packed, and no rank waits forever
            packed = pack(result) if self.size > 1 else bytearray()
        except BaseException as error:
            if not self._apart:
                self._send(("raise", "".join(traceback.format_exception(error)), None))
            raise
        finally:
            self._driver = None
        self._send(("return", packed, None))
        return result

    def serve(self, name: str, handler: Handler) -> None:
        """Registers `handler` under a name, so that `call_all` can run it. Every rank must register the same names."""
        self._handlers[name] = handler

    def call_all(self, name: str, args_per_rank: Sequence[Any]) -> list[Any]:
        """Runs the handler with this name on every rank at the same time, and returns the list of results by rank. Must
        be called on rank 0 inside `from_driver`, in any thread. Calls from several threads run one after the other.

        If the handler raises an error on any rank, raises FollowerError, with the rank and the traceback, after all
        ranks have finished. In the thread that runs a function in `work.from_driver`, the command goes to the ranks
        through `work`, where they listen.
        """
        if self.work is not self and self.work._driver == threading.get_ident():
            return self.work.call_all(name, args_per_rank)
        if len(args_per_rank) != self.size:
            raise ValueError(f"{len(args_per_rank)} arguments for {self.size} ranks: give one per rank")
        self._check_call("call_all", name)
        with self._calling:
            if self.size == 1:
                return [self._handle(name, args_per_rank[0])]
            self._send(("call", name, [pack(argument) for argument in args_per_rank]))
            answers = self._collect(name, args_per_rank[0])
        for rank, (failure, _) in enumerate(answers):
            if failure is not None:
                raise FollowerError(f"rank {rank} failed in {name!r}:\n{failure}")
        return [unpack(packed) for _, packed in answers]

    def together(self, name: str, argument: Any, others: Any) -> Any:
        """Runs the handler with this name on every rank at the same time, with `argument` on rank 0 and a copy of
        `others` on the other ranks. Returns the result of rank 0. Must be called on rank 0 inside `from_driver`.

        For a handler that is collective, so that ranks wait for one another inside it. A rank where the handler fails
        therefore sends nothing: the rank raises its error at once out of `from_driver`, and the run cannot go on.
        """
        self._check_call("together", name)
        with self._calling:
            self._send(("together", name, pack(others) if self.size > 1 else None))
            try:
                return self._handle(name, argument)
            except BaseException:
                self._apart = self.size > 1
                raise

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
                    dist.send(torch.from_numpy(make(replica)), ranks[0], group=self._group)
            buffer = make(own)  # the last array, so that the arrays of the other replicas have been freed
        else:
            buffer = np.empty(sizes[own], np.uint8)
            if self.rank == replicas.ranks[own][0]:
                dist.recv(torch.from_numpy(buffer), 0, group=self._group)
        if len(replicas.ranks[own]) > 1:
            dist.broadcast(torch.from_numpy(buffer), replicas.ranks[own][0], group=replicas.group)
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
                    dist.send(torch.from_numpy(own), 0, group=self._group)
            return None
        found = []
        for rank, size in zip(replicas.reporters, sizes, strict=True):
            values = own if rank == 0 and own is not None else np.empty(size, np.float32)
            if rank != 0 and size:
                dist.recv(torch.from_numpy(values), rank, group=self._group)
            found.append(values)
        return found

    def _follow(self) -> Any:
        while True:
            order, what, extra = self._send(None)
            if order == "return":
                return unpack(what)
            if order == "raise":
                raise DriverError(f"rank 0 failed:\n{what}")
            if order == "together":
                self._handle(what, unpack(extra))
            else:
                self._collect(what, unpack(extra[self.rank]))

    def _check_call(self, verb: str, name: str) -> None:
        """Raises ValueError if no handler has this name, and RuntimeError if the ranks cannot run a handler now."""
        if name not in self._handlers:
            raise ValueError(f"no handler {name!r} is served; known: {', '.join(sorted(self._handlers)) or 'none'}")
        if self._handling == threading.get_ident():
            raise RuntimeError(f"{verb} of {name!r} inside a running handler: use work.from_driver around the call")
        if self.size > 1 and self._driver is None:
            raise RuntimeError(f"{verb} outside from_driver, where the other ranks do not listen: call it inside")

    def _handle(self, name: str, argument: Any) -> Any:
        self._handling = threading.get_ident()
        try:
            return self._handlers[name](argument)
        finally:
            self._handling = None

    def _collect(self, name: str, argument: Any) -> list[tuple[str | None, bytes]]:
        """Runs a registered handler on this rank, and gathers (traceback or None, packed result) of every rank on rank
        0.
        """
        failure, packed = None, bytearray()
        try:
            packed = pack(self._handle(name, argument))
        except BaseException as error:  # the error is sent to rank 0, which raises it on every rank
            failure = "".join(traceback.format_exception(error))
        return gather((failure, packed), self._group)

    def _send(self, value: Any) -> Any:
        """Broadcasts a value from rank 0 and returns it on every rank."""
        return value if self.size == 1 else broadcast(value, self._group)


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
