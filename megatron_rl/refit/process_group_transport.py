"""A transport over a torch process group: gloo between hosts without fast links, or NCCL between GPUs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit.buffers import Buffers, parts
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.transport import RECHECK_S, Deadline, TransportError

_log = logging.getLogger(__name__)
POLL_S = 0.0002  # interval in seconds at which NCCL operations are polled for completion
JOIN_S = 5.0  # longest wait in seconds for a thread to end
ABORT_S = 5.0  # longest wait in seconds for NCCL to abort a group
# NCCL's timeout of a message. Longer than any refit, because torch ends the whole process when it expires.
NCCL_TIMEOUT = timedelta(days=30)
# Environment variables that torch reads when it creates an NCCL group. With them, torch reports errors of the group to
# callers that wait for messages, and to nobody else. By default, torch ends the whole process when a peer is lost, when
# a message is late, or some 16 minutes after a call of `abort` that does not return. Without the dump of debugging
# information, torch does not ask the key-value store for requests of dumps every second.
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class PointToPoint:
    """A transport over a separate process group of `size` ranks. Implements transport.Transport.

    gloo closes all connections of a group when one wait times out. Therefore waits run in a thread without the message
    timeout. When a message is late, the thread is abandoned together with its buffer until the group's long timeout.
    The next refit that leaves out a rank creates a new group.

    NCCL connects two ranks at their first message, and the call blocks until the other side has called too. Therefore
    messages are started in a thread, one after another. A message that is not started in time is treated as lost. The
    thread calls NCCL only after both ranks have announced on the key-value store that they are about to connect: the
    wait on the store ends when the transport is closed, NCCL's own wait for a peer that never comes does not.
    """

    def __init__(self, store: RefitStore, rank: int, size: int, *, backend: str, settings: RefitConfig) -> None:
        """Creates the process group. Collective over its ranks.

        `backend`: "gloo" or "nccl". Raises TransportError unless all ranks join within `message_timeout_s`.
        """
        self._rank, self._backend, self.buffers = rank, backend, Buffers()
        come = settings.message_timeout_s
        try:
            # the reference keeps the object alive, because torch refers only to its C++ half
            self._store = store.rank_store(timedelta(seconds=come))
            prefixed = dist.PrefixStore(store.prefix, self._store)
            self._group = _make(backend, prefixed, store.way()[0], (rank, size), timedelta(seconds=come))
        except RuntimeError as error:
            raise TransportError(
                f"{backend} group of {size} ranks: not all of them came within {come:.0f} s ({error})"
            ) from error
        self._long = timedelta(seconds=settings.timeout_s)
        self._starter = _Starter() if backend == "nccl" else None
        self._connecting, self._connected = store.under("connecting"), set[int]()  # peers that NCCL may connect
        self._closed = threading.Event()
        self._waiter: _Waiter | None = None
        # abandoned threads, with the torch Works that they wait for
        self._left: list[tuple[_Waiter, Sequence[Any]]] = []
        # Number of messages sent to each peer so far, and received from each peer.
        self._sent, self._came = ([itertools.count() for _ in range(size)] for _ in range(2))

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self.buffers.take(size, torch.device("cpu") if self._backend == "gloo" else device)

    @property
    def takes_pieces(self) -> bool:
        # on a GPU, packing slices into one message costs less time than a further message
        return self._backend == "gloo"

    @property
    def streams(self) -> bool:
        return False

    def send(
        self, peer: int, label: str, message: Tensor, *, size_known: bool, pieces: Iterable[Tensor] = ()
    ) -> _GroupHandle:
        works, number = [], next(self._sent[peer])
        if not size_known:
            length = torch.tensor([len(message)], dtype=torch.int64, device=message.device).view(torch.uint8)
            works.append(self._start("send", length, peer, 2 * number))
        works.append(self._start("send", message, peer, 2 * number + 1))
        works += [self._start("send", piece, peer, 2 * next(self._sent[peer]) + 1) for piece in pieces]
        return _GroupHandle(self, works, message, f"{label} to {peer}")

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> _GroupHandle:
        number = next(self._came[peer])
        if size is not None:
            message = self.buffer(size, device)
            first, *others = parts(message, pieces)
            works = [self._start("receive", first, peer, 2 * number + 1)]
            works += [self._start("receive", part, peer, 2 * next(self._came[peer]) + 1) for part in others]
            return _GroupHandle(self, works, message, f"{label} from {peer}", into_pieces=bool(pieces))
        length = torch.zeros(8, dtype=torch.uint8, device=torch.device("cpu") if self._backend == "gloo" else device)
        first = self._start("receive", length, peer, 2 * number)
        return _GroupHandle(self, [first], length, f"{label} from {peer}", after_length=(peer, number, device))

    def close(self) -> None:
        self.buffers.clear()
        for waiter, works in self._left:
            self.abort(works)
            waiter.end()  # the thread is ended first: torch aborts the process if Python exits while the thread waits
        if self._waiter is not None:
            self._waiter.end()
        if self._starter is not None:
            self._closed.set()
            self._starter.end()
            # The group is aborted, because kernels that wait for a dead peer would spin forever. NCCL's abort may not
            # return if the peer does not abort, too. The abandoned thread keeps the group alive: torch's destructor of
            # the group would wait for the abort.
            aborting = threading.Thread(target=_abort, args=(self._group,), daemon=True)
            aborting.start()
            aborting.join(ABORT_S)
            if aborting.is_alive():
                _log.warning(
                    "NCCL has not aborted the group of a refit within %.0f s and is left behind: its memory stays "
                    "allocated on the GPU, and kernels may go on waiting for a lost engine",
                    ABORT_S,
                )

    def _start(self, way: str, message: Tensor, peer: int, tag: int) -> Any:
        """Starts one send or receive. Returns the torch Work, or a RuntimeError (which is not raised) if the connection
        is already lost.

        With NCCL, returns a Future of the Work or error. `way`: direction, "send" or "receive".
        """
        if self._starter is None:
            return self._start_now(way, message, peer, tag)
        # NCCL waits for the work on the current stream, which is the caller's and not that of the starting thread
        stream = torch.cuda.current_stream(message.device) if message.is_cuda else None
        return self._starter.submit(lambda: self._start_connected(way, message, peer, tag, stream))

    def _start_now(self, way: str, message: Tensor, peer: int, tag: int) -> Any:
        try:
            return self._group.send([message], peer, tag) if way == "send" else self._group.recv([message], peer, tag)
        except RuntimeError as error:
            return error

    def _start_connected(self, way: str, message: Tensor, peer: int, tag: int, stream: torch.cuda.Stream | None) -> Any:
        """Waits until the peer is about to connect, then starts one send or receive after the work on `stream`. Returns
        as `_start_now`. Returns the error (which is not raised) if the transport was closed before the peer came.
        """
        try:
            if peer not in self._connected:
                self._connecting.put(f"{self._rank}-{peer}", True)
                while not self._connecting.has(f"{peer}-{self._rank}", RECHECK_S):
                    if self._closed.is_set():
                        return TransportError(f"the group was closed before rank {peer} came")
                self._connected.add(peer)
            if stream is not None:
                torch.cuda.set_device(stream.device)  # the current device is per thread
            with torch.cuda.stream(stream):
                return self._start_now(way, message, peer, tag)
        except RuntimeError as error:
            return error

    def receive_after_length(self, length: Tensor, peer: int, number: int, device: torch.device) -> tuple[Tensor, Any]:
        """Starts to receive message `number` of a peer, whose length has already been received.

        `length`: the length in bytes as uint8 [8].

        Returns (memory of the message, the torch Work as `_start` returns it).
        """
        message = self.buffer(int(length.cpu().view(torch.int64)[0]), device)
        return message, self._start("receive", message, peer, 2 * number + 1)

    def finish(self, works: Sequence[Any], deadline: Deadline) -> str | None:
        """Waits for all works of one message. Returns None if all are done, otherwise the reason of the failure as
        text.
        """
        if self._starter is not None:
            if late := deadline.until(lambda seconds: not futures.wait(works, seconds).not_done):
                return late
            works = [work.result() for work in works]
        for work in works:
            if isinstance(work, RuntimeError):
                return _first_line(work)
        failures: list[str] = []
        if self._backend == "nccl":
            late = deadline.until(lambda seconds: _poll(works, seconds))
            failures += [
                _first_line(work.exception()) for work in works if late is None and work.exception() is not None
            ]
        else:
            self._waiter = self._waiter or _Waiter(self._long)
            done = self._waiter.start(works, failures)
            if late := deadline.until(done.wait):
                self._left.append((self._waiter, works))
                self._waiter = None
        return late or (failures[0] if failures else None)

    def abort(self, works: Sequence[Any]) -> None:
        """Closes all connections of the group, by a wait that times out.

        After the call, nothing is written to the memory of `works`.
        """
        for work in works:
            with contextlib.suppress(RuntimeError):
                if not isinstance(work, (RuntimeError, futures.Future)):
                    work.wait(timedelta(milliseconds=1))


class _Waiter:
    """A thread that waits for messages, one after another. A message consists of one or more torch Works."""

    def __init__(self, longest: timedelta) -> None:
        self._tasks: queue.SimpleQueue[tuple[Sequence[Any], list[str], threading.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(longest,), daemon=True)
        self._thread.start()

    def start(self, works: Sequence[Any], failures: list[str]) -> threading.Event:
        """Queues the torch Works of a message. Returns an event that is set when all works are done or one has failed.

        An error is appended to `failures` before the event is set.
        """
        done = threading.Event()
        self._tasks.put((works, failures, done))
        return done

    def end(self) -> None:
        """Ends the thread."""
        self._tasks.put(None)
        self._thread.join(JOIN_S)

    def _work(self, longest: timedelta) -> None:
        while (task := self._tasks.get()) is not None:
            works, failures, done = task
            try:
                for work in works:
                    work.wait(longest)
            except RuntimeError as error:
                failures.append(_first_line(error))
            done.set()


class _Starter:
    """A thread that starts messages of NCCL one after another. The thread does not keep the process alive if a start
    never returns.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, start: Callable[[], Any]) -> futures.Future[Any]:
        """Queues a call of the function `start`, which must not raise. Returns the Future of the function's result."""
        future: futures.Future[Any] = futures.Future()
        self._tasks.put((future, start))
        return future

    def end(self) -> None:
        """Asks the thread to end after the queued starts, and does not wait for it."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, start = task
            future.set_result(start())


class _GroupHandle:
    """A message in flight in a process group. Implements transport.Handle."""

    def __init__(
        self, transport: PointToPoint, works: Sequence[Any], message: Tensor, what: str, *,
        after_length: tuple[int, int, torch.device] | None = None, into_pieces: bool = False,
    ) -> None:  # fmt: skip
        """Stores the works of one message.

        `what`: name of the message in errors.
        `after_length`: (peer, message index, device) if the works receive only the length of the message, after which
        the message itself is received.
        `into_pieces`: whether the works write to memory outside of the buffers. If so, the works are aborted after a
        failure, so that nothing is written there afterwards.
        """
        self._transport, self._works, self._message, self._what = transport, works, message, what
        self._after_length, self._into_pieces = after_length, into_pieces

    def wait(self, deadline: Deadline) -> Tensor:
        self._finish(self._works, deadline)
        if self._after_length is not None:
            self._message, work = self._transport.receive_after_length(self._message, *self._after_length)
            self._finish([work], deadline)
        return self._message

    def release(self) -> None:
        self._transport.buffers.give_back(self._message)

    def _finish(self, works: Sequence[Any], deadline: Deadline) -> None:
        """Waits for the torch Works of the message. Raises TransportError when a Work fails or is late."""
        failure = "given up"
        try:
            failure = self._transport.finish(works, deadline)
        finally:  # clean up also when a callback of the deadline raises an exception
            if failure is not None and self._into_pieces:
                self._transport.abort(self._works)
        if failure is not None:
            raise TransportError(f"{self._what}: {failure}")


def _make(backend: str, store: Any, address: str, place: tuple[int, int], timeout: timedelta) -> Any:
    """Creates a process group whose ranks find each other through `store`.

    `address`: the only address at which gloo listens. `place`: (rank, size of the group).
    """
    if backend == "gloo":
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, *place, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NCCL_TIMEOUT
    with _quiet():
        return dist.ProcessGroupNCCL(store, *place, options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager. An NCCL group that is created in the block never ends the process (see QUIET)."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _abort(group: Any) -> None:
    """Aborts an NCCL group. Logs an error instead of raising it."""
    try:
        group.abort()
    except RuntimeError as error:
        _log.warning("NCCL could not abort the group of a refit: %s", _first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _poll(works: Sequence[Any], seconds: float) -> bool:
    """Waits up to `seconds` for all torch Works. Returns whether all of them are done."""
    end = time.monotonic() + seconds
    while not all(work.is_completed() for work in works):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
