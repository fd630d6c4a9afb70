"""A transport over TCP, for hosts without fast links between them. Long slices of parameters are sent without a copy.

A socket can send a list of memory blocks. Long slices are therefore sent directly from, and received directly into, the
memory of the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import itertools
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, cast

import torch
from torch import Tensor

from megatron_rl.config.schema import RefitConfig
from megatron_rl.key_value_store.store_server import configure
from megatron_rl.refit.buffers import Buffers, parts
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.task_thread import TaskThread
from megatron_rl.refit.transport import RECHECK_S, Deadline, Handle, TransportError

# A sender's first bytes (hello): a signature of the receiver's challenge and the sender's rank, followed by the rank.
HELLO = struct.Struct("<32sI")
# header of each message: size of the message in bytes, not counting pieces sent separately
LENGTH = struct.Struct("<Q")
# Longest wait in seconds for the end of a thread that has no connection yet, and therefore does not access a message.
JOIN_S = 1.0
PAUSE_S = 0.1  # pause in seconds after a failed attempt to accept a connection
HELLO_S = 5.0  # seconds after which a caller is refused if it has not sent its hello (proof that it knows the secret)
MAX_CALLERS = 256  # maximum number of connections without a hello; each has a thread and a file descriptor
# when MAX_CALLERS is reached, the oldest caller is disconnected if it has waited for more seconds than this
MERCY_S = 1.0
BLOCKS_PER_CALL = 256  # maximum number of memory blocks per sendmsg call
START_BYTES = 1 << 20  # pieces are passed to the sending thread in batches of at least this many bytes


class Tcp:
    """A transport with one TCP connection per pair of peers and direction. Implements transport.Transport.

    A connection is opened at its first message and is served by a separate thread. A receiver listens on the interface
    that routes to the store, and publishes its address and a random challenge on the store.
    """

    takes_pieces = True

    def __init__(self, store: RefitStore, rank: int, settings: RefitConfig) -> None:
        """Starts to listen on a free port and stores the address under `rank` on the store.

        Raises TransportError when the store no longer answers, or when no port is free.
        """
        self._store, self._rank, self._timeout_s = store, rank, settings.message_timeout_s
        self._buffers, self._lanes, self._closed = Buffers(), dict[tuple[str, int], _Lane](), False
        self._change = threading.Lock()
        # connections that have not sent a hello -> time of the connection; oldest first
        self._callers: dict[socket.socket, float] = {}
        self._challenge = secrets.token_bytes(16)
        try:
            host, family = store.way()
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise TransportError(f"no port to take weights at: {error}") from error
        try:
            store.put(str(rank), [host, self._listener.getsockname()[1], self._challenge.hex()])
        except TransportError:
            self._listener.close()
            raise
        threading.Thread(target=self._accept, daemon=True).start()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._buffers.take(size, torch.device("cpu"))

    def send(self, peer: int, label: str, message: Tensor, *, pieces: Iterable[Tensor] = ()) -> Handle:
        lane, size = self._lane("to", peer), 0
        blocks = [memoryview(LENGTH.pack(len(message))), _memory(message)]
        for piece in pieces:
            blocks.append(_memory(piece))
            size += len(blocks[-1])
            if size >= START_BYTES:
                lane.submit(functools.partial(_send, blocks))
                blocks, size = [], 0

        def send(to: socket.socket) -> Tensor:
            _send(blocks, to)
            return message

        return self._handle(lane, lane.submit(send), f"{label} to {peer}")

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> Handle:
        lane = self._lane("from", peer)
        done = lane.submit(
            functools.partial(self._receive, None if size is None else self.buffer(size, device), pieces)
        )
        return self._handle(lane, done, f"{label} from {peer}")

    def _handle(self, lane: _Lane, done: futures.Future[Tensor], what: str) -> Handle:
        """Returns the handle of a message. `done`: Future of the transfer. `what`: name of the message in errors."""

        def wait(deadline: Deadline) -> Tensor:
            failure = "given up"
            try:
                failure = deadline.until(lambda seconds: not futures.wait([done], seconds).not_done)
                failure = failure or (str(error) if (error := done.exception()) else None)
            finally:  # clean up also when a callback of the deadline raises an exception
                if failure is not None:
                    lane.end()
            if failure is not None:
                raise TransportError(f"{what}: {failure}")
            return done.result()

        return Handle(wait, lambda: self._buffers.give_back(done.result()))

    def _receive(self, message: Tensor | None, pieces: Sequence[Tensor | int], of: socket.socket) -> Tensor:
        """Receives one message and its pieces. Returns the message. `of`: the connection to receive from.
        `message`: the buffer to receive into, or None if the size of the message is not known yet.
        """
        head = bytearray(LENGTH.size)
        _fill(of, memoryview(head))
        (length,) = LENGTH.unpack(head)
        message = self._buffers.take(length, torch.device("cpu")) if message is None else message
        first, *others = parts(message, pieces)
        if len(first) != length:
            raise TransportError(f"{length} bytes came where {len(first)} were expected")
        for part in (first, *others):
            _fill(of, _memory(part))
        return message

    def close(self) -> None:
        with self._change:
            self._closed = True
            lanes = [*self._lanes.values()]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.end()
        with self._change:
            self._lanes.clear()
        self._buffers.clear()

    def _lane(self, way: str, peer: int) -> _Lane:
        """Returns the lane (message queue of one direction) to or from a peer. The first call for a lane creates it.

        `way`: "to" or "from".

        Raises TransportError if the transport is closed.
        """
        with self._change:
            if self._closed:
                raise TransportError(f"no messages {way} {peer} any more: closed")
            if (way, peer) not in self._lanes:
                self._lanes[way, peer] = _Lane((lambda lane: self._connect(lane, peer)) if way == "to" else _Lane.take)
            return self._lanes[way, peer]

    def _connect(self, lane: _Lane, peer: int) -> socket.socket:
        """Waits until the address of a peer is on the store, and returns a new connection to the peer.

        Raises TransportError when the address does not appear in time, and OSError when the connection fails.
        """
        end = time.monotonic() + self._timeout_s
        while not self._store.has(str(peer), RECHECK_S):
            if lane.ended or time.monotonic() > end:
                raise TransportError(f"it did not come within {self._timeout_s:.0f} s")
        host, port, challenge = self._store.get(str(peer), tuple[str, int, str], 0.0)
        connection = socket.create_connection((host, port), timeout=self._timeout_s)
        try:
            configure(connection)
            connection.settimeout(None)
            connection.sendall(hello(self._store, challenge, self._rank))
        except OSError:
            connection.close()
            raise
        return connection

    def _accept(self) -> None:
        """Accepts connections until the transport is closed."""
        while True:
            if not self._has_place():
                time.sleep(PAUSE_S)
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(PAUSE_S)  # wait, because the process may have run out of file descriptors
                continue
            with self._change:
                self._callers[connection] = time.monotonic()
            try:
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
            except RuntimeError:  # no thread can be started
                self._forget(connection)
                connection.close()

    def _has_place(self) -> bool:
        """Returns whether another connection may be accepted.

        If MAX_CALLERS connections have not sent a hello (proof that the caller knows the secret), disconnects the
        oldest of them if it is older than MERCY_S seconds.
        """
        with self._change:
            full = len(self._callers) >= MAX_CALLERS and not self._closed
            oldest, since = next(iter(self._callers.items())) if full else (None, 0.0)
        if oldest is not None and time.monotonic() - since > MERCY_S:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        return not full

    def _forget(self, connection: socket.socket) -> None:
        with self._change:
            self._callers.pop(connection, None)

    def _greet(self, connection: socket.socket) -> None:
        """Checks the hello (proof that the caller knows the secret) on a new connection. If it is valid, passes the
        connection to the lane (message queue) of the peer that connected; otherwise closes the connection.
        """
        greeting, end, lane = bytearray(), time.monotonic() + HELLO_S, None
        with contextlib.suppress(OSError, TransportError):
            while len(greeting) < HELLO.size and time.monotonic() < end:
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (came := connection.recv(HELLO.size - len(greeting))):
                    break
                greeting += came
            peer = HELLO.unpack(greeting)[1] if len(greeting) == HELLO.size else 0
            if hmac.compare_digest(greeting, hello(self._store, self._challenge.hex(), peer)):
                configure(connection)
                connection.settimeout(None)
                lane = self._lane("from", peer)
        self._forget(connection)
        if lane is None:
            connection.close()
        else:
            lane.give(connection)


def hello(store: RefitStore, challenge: str, rank: int) -> bytes:
    """Returns the hello with which peer `rank` proves to a receiver that it knows the secret of this run.

    `challenge`: the receiver's challenge in hexadecimal.
    """
    return HELLO.pack(store.sign(f"hello {challenge} {rank}".encode()), rank)


class _Lane:
    """A queue of messages in one direction between two peers, with the thread that transfers them.

    After a failure, all further messages fail.
    """

    def __init__(self, open_: Callable[[_Lane], socket.socket]) -> None:
        self._open, self._connections = open_, queue.SimpleQueue[socket.socket | None]()
        self._socket: socket.socket | None = None
        self._failure: str | None = None
        self.ended = False
        self._thread = TaskThread()

    def give(self, connection: socket.socket) -> None:
        """Passes a connection that the other side has opened to the thread of this lane (message queue)."""
        self._connections.put(connection)
        if self.ended:
            self._refuse()

    def take(self) -> socket.socket:
        """Waits for a connection that the other side opens, and returns the connection. Raises TransportError when the
        lane is closed.
        """
        connection = self._connections.get()
        if connection is None:
            raise TransportError("closed")
        return connection

    def submit(self, use: Callable[[socket.socket], Any]) -> futures.Future[Any]:
        """Queues the transfer of a message. `use`: function that transfers the message over the given connection.
        Returns a Future of the function's result. The Future raises TransportError if this transfer or an earlier
        transfer of this lane failed.
        """
        if self.ended:
            done: futures.Future[Any] = futures.Future()
            done.set_exception(TransportError("it was given up before"))
            return done
        return self._thread.submit(functools.partial(self._run, use))

    def stop(self) -> None:
        """Asks the thread to end."""
        self.ended = True  # a thread that has no connection yet checks the flag before it accesses a message
        self._shut()
        self._connections.put(None)

    def end(self) -> None:
        """Ends the lane. After the call, its thread does not read or write the memory of any message."""
        self.stop()
        self._thread.submit(self._close)
        self._thread.end(JOIN_S if self._socket is None else None)

    def _run(self, use: Callable[[socket.socket], Any]) -> Any:
        if self._failure is None:
            try:
                self._socket = self._socket or self._open(self)
                if self.ended:
                    raise TransportError("given up")
                return use(self._socket)
            except BaseException as error:  # torch raises errors of several types, for example if memory is exhausted
                self._failure = str(error) or type(error).__name__
                self._shut()  # so that the other side notices
        raise TransportError(self._failure)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._refuse()

    def _refuse(self) -> None:
        """Closes the connections that were passed to this lane and that the thread does not use."""
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self._connections.get_nowait()
                if connection is not None:
                    connection.close()
        self._connections.put(None)

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _memory(block: Tensor) -> memoryview:
    return memoryview(cast(Any, block.numpy()))  # cast: numpy declares the buffer protocol only from Python 3.12


def _send(blocks: Sequence[memoryview], to: socket.socket) -> None:
    """Sends blocks of memory over a connection."""
    unsent = deque(blocks)
    while unsent:
        sent = to.sendmsg([*itertools.islice(unsent, BLOCKS_PER_CALL)])
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]


def _fill(of: socket.socket, memory: memoryview) -> None:
    """Receives bytes from a connection until `memory` is full. Raises TransportError when the other side closes the
    connection.
    """
    while memory:
        came = of.recv_into(memory, 0, socket.MSG_WAITALL)
        if not came:
            raise TransportError("the other side has closed the connection")
        memory = memory[came:]
