"""A transport over an NCCL process group, between GPUs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit.buffers import Buffers
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.task_thread import TaskThread
from megatron_rl.refit.transport import RECHECK_S, Deadline, Handle, TransportError

_log = logging.getLogger(__name__)
POLL_S = 0.0002  # interval in seconds at which NCCL operations are polled for completion
ABORT_S = 5.0  # longest wait in seconds for NCCL to abort a group
# NCCL's timeout of a message: longer than any refit, because torch ends the whole process when the timeout expires.
NCCL_TIMEOUT = timedelta(days=30)
# torch reads these environment variables when it creates an NCCL group.
# With these values, torch reports errors of the group only to callers that wait for messages.
# By default, torch ends the whole process when a peer is lost or a message is late.
# It also ends the process some 16 minutes after a call of `abort` that does not return.
# With DUMP_ON_TIMEOUT off, torch does not poll the key-value store every second for requests of debug dumps.
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Nccl:
    """A transport over a separate NCCL process group of `size` ranks. Implements transport.Transport.

    NCCL connects two ranks at their first message, and the call blocks until the other side has called too. Therefore
    messages are started in a thread, one after another. A message that is not started in time is treated as lost. The
    thread calls NCCL only after both ranks have announced on the key-value store that they are about to connect.
    Closing the transport ends a wait on the store, but not NCCL's own wait for a peer that never comes.
    """

    takes_pieces = False  # because packing all slices into one message is faster on a GPU than a message per piece

    def __init__(self, store: RefitStore, rank: int, size: int, settings: RefitConfig) -> None:
        """Creates the process group. Collective over the `size` ranks of the group.

        Raises TransportError unless all ranks join within `message_timeout_s`.
        """
        self._rank, self._buffers, come = rank, Buffers(), settings.message_timeout_s
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_TIMEOUT
        try:
            # This reference is needed because torch keeps only the C++ part of the store alive, not the Python object.
            self._store = store.rank_store(timedelta(seconds=come))
            with _quiet():
                self._group = dist.ProcessGroupNCCL(dist.PrefixStore(store.prefix, self._store), rank, size, options)
        except RuntimeError as error:
            raise TransportError(
                f"NCCL group of {size} ranks: not all of them came within {come:.0f} s ({error})"
            ) from error
        self._starter = TaskThread()
        # _connected: peers that have announced themselves, so that NCCL may connect to them
        self._connecting, self._connected = store.under("connecting"), set[int]()
        self._closed = threading.Event()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._buffers.take(size, device)

    def send(self, peer: int, label: str, message: Tensor, *, pieces: Iterable[Tensor] = ()) -> Handle:
        return self._handle("send", peer, message, f"{label} to {peer}")

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> Handle:
        assert size is not None, "differences, whose size the receiver does not know, are not sent over NCCL"
        return self._handle("recv", peer, self.buffer(size, device), f"{label} from {peer}")

    def close(self) -> None:
        self._buffers.clear()
        self._closed.set()
        self._starter.end()
        # The group is aborted, because kernels that wait for a dead peer would otherwise spin forever.
        # NCCL's abort runs in a thread, because it may not return if the peer does not abort, too.
        # An abandoned thread keeps the group alive, because torch's destructor of the group would wait for the abort.
        aborting = threading.Thread(target=_abort, args=(self._group,), daemon=True)
        aborting.start()
        aborting.join(ABORT_S)
        if aborting.is_alive():
            _log.warning(
                "NCCL has not aborted the group of a refit within %.0f s and is left behind: its memory stays "
                "allocated on the GPU, and kernels may go on waiting for a lost engine",
                ABORT_S,
            )

    def _handle(self, verb: str, peer: int, message: Tensor, what: str) -> Handle:
        """Starts to send or to receive a message (`verb`: "send" or "recv"). `what`: name of the message in errors."""
        # Look up the caller's stream here, because NCCL must wait for the work on this stream, and the current stream
        # of the thread that calls NCCL is another stream.
        stream = torch.cuda.current_stream(message.device) if message.is_cuda else None
        start = self._starter.submit(lambda: self._start(verb, message, peer, stream))

        def wait(deadline: Deadline) -> Tensor:
            failure = deadline.until(lambda seconds: not futures.wait([start], seconds).not_done)
            error = start.exception() if failure is None else None
            if failure is None and error is None:
                work = start.result()
                failure = deadline.until(lambda seconds: _poll(work, seconds))
                error = work.exception() if failure is None else None
            if failure is not None or error is not None:
                raise TransportError(f"{what}: {failure or _first_line(error)}")
            return message

        return Handle(wait, lambda: self._buffers.give_back(message))

    def _start(self, verb: str, message: Tensor, peer: int, stream: torch.cuda.Stream | None) -> Any:
        """Waits until the peer is about to connect, then starts one send or receive after the work on `stream`. Returns
        the torch Work. Raises TransportError if the transport is closed before the start: a send or receive after the
        group's abort would connect the ranks again.
        """
        come = peer in self._connected
        if not come and not self._closed.is_set():
            self._connecting.put(f"{self._rank}-{peer}", True)
        while not come and not self._closed.is_set():
            come = self._connecting.has(f"{peer}-{self._rank}", RECHECK_S)
        if self._closed.is_set():
            raise TransportError(f"the group was closed before rank {peer} came")
        self._connected.add(peer)
        if stream is not None:
            torch.cuda.set_device(stream.device)  # needed because each thread has a separate current device in torch
        with torch.cuda.stream(stream):
            return getattr(self._group, verb)([message], peer, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context manager. An NCCL group that is created in the `with` block never ends the process (see QUIET)."""
    old_values = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        yield
    finally:
        for name, value in old_values.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _abort(group: Any) -> None:
    """Aborts an NCCL group. Logs an error instead of raising it."""
    try:
        group.abort()
    except RuntimeError as error:
        _log.warning("NCCL could not abort the group of a refit: %s", _first_line(error))


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]


def _poll(work: Any, seconds: float) -> bool:
    """Waits up to `seconds` for a torch Work. Returns whether the Work is done."""
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
