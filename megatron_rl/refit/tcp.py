"""Messages over TCP between hosts without fast links: out of the weights' own memory, and into it, where they lie in pieces long enough.

gloo sends one block of memory at a time, and what a message joins has to be copied together first. A socket takes a list of blocks.
"""

from __future__ import annotations

import contextlib
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

import torch
from torch import Tensor

from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit.base import LOOK_S, Deadline, TransportError
from megatron_rl.refit.board import Board
from megatron_rl.refit.buffers import Buffers, parts

HELLO = struct.Struct(
    "<32sI"
)  # what a sender says first: its number, and before it the receiver's challenge and this, signed
LENGTH = struct.Struct("<Q")  # of the message that follows, without its pieces
CONNECTING_S = 1.0  # so long the end of a lane waits for its thread, which touches no message yet
PAUSE_S = 0.1
IDLE_S = 60
HELLO_S = 5.0  # a stranger may take so long to say nothing
AT_ONCE = 256  # blocks in one call
ENOUGH = 1 << 20  # bytes with which the sending thread is set to work


class Tcp:
    """A connection per pair and direction, opened with its first message and worked by a thread of its own.

    A receiver listens on the interface that leads to the board, and puts its address and a challenge there. Peers are numbers.
    """

    takes_pieces = streams = True

    def __init__(self, board: Board, rank: int, settings: RefitConfig) -> None:
        """Raises TransportError when the board is gone, or there is no port."""
        self._board, self._rank, self._timeout_s = board, rank, settings.message_timeout_s
        self._buffers, self._lanes, self._closed = Buffers(), dict[tuple[str, int], _Lane](), False
        self._change = threading.Lock()
        self._challenge = secrets.token_bytes(16)
        try:
            host, family = board.way()
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise TransportError(f"no port to take weights at: {error}") from error
        try:
            board.put(str(rank), [host, self._listener.getsockname()[1], self._challenge.hex()])
        except TransportError:
            self._listener.close()
            raise
        threading.Thread(target=self._accept, daemon=True).start()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._buffers.take(size, torch.device("cpu"))

    def send(self, peer: int, label: str, message: Tensor, *, told: bool, pieces: Iterable[Tensor] = ()) -> _Moving:
        lane, done, size = self._lane("to", peer), _Done(message), 0
        blocks = [memoryview(LENGTH.pack(len(message))), _memory(message)]
        for piece in pieces:
            blocks.append(_memory(piece))
            size += len(blocks[-1])
            if size >= ENOUGH:
                lane.start(_Sending(blocks))
                blocks, size = [], 0
        lane.start(_Sending(blocks), done)
        return _Moving(lane, done, f"{label} to {peer}", self._buffers)

    def receive(
        self, peer: int, label: str, size: int | None, device: torch.device, *, pieces: Sequence[Tensor | int] = ()
    ) -> _Moving:
        lane, done = self._lane("from", peer), _Done(None if size is None else self.buffer(size, device))
        lane.start(_Receiving(done, pieces, self._buffers), done)
        return _Moving(lane, done, f"{label} from {peer}", self._buffers)

    def close(self) -> None:
        with self._change:
            self._closed = True
            lanes = [*self._lanes.values()]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # what waits in accept wakes
        self._listener.close()
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.end()
        with self._change:
            self._lanes.clear()
        self._buffers.clear()

    def _lane(self, way: str, peer: int) -> _Lane:
        with self._change:
            if self._closed:
                raise TransportError(f"no messages {way} {peer} any more: closed")
            if (way, peer) not in self._lanes:
                self._lanes[way, peer] = _Lane((lambda lane: self._connect(lane, peer)) if way == "to" else _Lane.given)
            return self._lanes[way, peer]

    def _connect(self, lane: _Lane, peer: int) -> socket.socket:
        end = time.monotonic() + self._timeout_s
        while not self._board.has(str(peer), LOOK_S):
            if lane.ended or time.monotonic() > end:
                raise TransportError(f"it did not come within {self._timeout_s:.0f} s")
        host, port, challenge = self._board.peek(str(peer))
        made = socket.create_connection((host, port), timeout=self._timeout_s)
        try:
            _settle(made)
            made.sendall(hello(self._board, challenge, self._rank))
        except OSError:
            made.close()
            raise
        return made

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(PAUSE_S)  # no descriptor is free, perhaps
                continue
            try:
                threading.Thread(target=self._greet, args=(made,), daemon=True).start()
            except RuntimeError:  # no thread is
                made.close()

    def _greet(self, made: socket.socket) -> None:
        try:
            said, end = bytearray(), time.monotonic() + HELLO_S
            while len(said) < HELLO.size:
                made.settimeout(max(0.01, end - time.monotonic()))
                came = made.recv(HELLO.size - len(said))
                if not came or time.monotonic() > end:
                    raise TransportError("a stranger")
                said += came
            _, peer = HELLO.unpack(said)
            if not hmac.compare_digest(said, hello(self._board, self._challenge.hex(), peer)):
                raise TransportError("a stranger")
            _settle(made)
            self._lane("from", peer).give(made)
        except (OSError, TransportError):
            made.close()


def hello(board: Board, challenge: str, rank: int) -> bytes:
    """How `rank` shows a receiver that it is of the run."""
    return HELLO.pack(board.sign(f"hello {challenge} {rank}".encode()), rank)


class _Lane:
    """Messages of one direction between two peers, one after the other. After a failure there are no more of them."""

    def __init__(self, open_: Callable[[_Lane], socket.socket]) -> None:
        self._open, self._given = open_, queue.SimpleQueue[socket.socket | None]()
        self._tasks = queue.SimpleQueue[tuple[_Sending | _Receiving, _Done | None] | None]()
        self._socket: socket.socket | None = None
        self.ended = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def give(self, made: socket.socket) -> None:
        """The connection of a lane that others open."""
        self._given.put(made)
        if self.ended:
            self._refuse()

    def given(self) -> socket.socket:
        made = self._given.get()
        if made is None:
            raise TransportError("closed")
        return made

    def start(self, task: _Sending | _Receiving, done: _Done | None = None) -> None:
        """`done` is told when the task is over."""
        if not self.ended:
            self._tasks.put((task, done))
        elif done is not None:
            done.tell("it was given up before")

    def stop(self) -> None:
        """Asks it to end."""
        self.ended = True  # a thread that has no connection yet looks at it before it touches any message
        self._shut()
        self._given.put(None)
        self._tasks.put(None)

    def end(self) -> None:
        """No message's memory is read or written after this."""
        self.stop()
        self._thread.join(CONNECTING_S if self._socket is None else None)

    def _refuse(self) -> None:
        """Closes connections that nobody uses."""
        with contextlib.suppress(queue.Empty):
            while True:
                made = self._given.get_nowait()
                if made is not None:
                    made.close()
        self._given.put(None)

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _work(self) -> None:
        failure = None
        while (item := self._tasks.get()) is not None:
            task, done = item
            try:
                if failure is None:
                    self._socket = self._socket or self._open(self)
                    if self.ended:
                        raise TransportError("given up")
                    task.run(self._socket)
            except Exception as error:  # of torch too: no memory
                failure = str(error) or type(error).__name__
                self._shut()  # the other side hears of it
            if done is not None:
                done.tell(failure)
        if self._socket is not None:
            self._shut()
            self._socket.close()
        self._refuse()


class _Done:
    """What a task came to: a message, or a failure."""

    def __init__(self, message: Tensor | None) -> None:
        self.message, self.failure, self.event = message, None, threading.Event()

    def tell(self, failure: str | None) -> None:
        self.failure = failure
        self.event.set()


class _Sending:
    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self._blocks = blocks

    def run(self, to: socket.socket) -> None:
        left = deque(self._blocks)
        while left:
            sent = to.sendmsg([*itertools.islice(left, AT_ONCE)])
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = left[0][sent:]


class _Receiving:
    def __init__(self, done: _Done, pieces: Sequence[Tensor | int], buffers: Buffers) -> None:
        self._done, self._pieces, self._buffers = done, pieces, buffers

    def run(self, of: socket.socket) -> None:
        head = bytearray(LENGTH.size)
        _fill(of, memoryview(head))
        (length,) = LENGTH.unpack(head)
        if self._done.message is None:
            self._done.message = self._buffers.take(length, torch.device("cpu"))
        first, *others = parts(self._done.message, self._pieces)
        if len(first) != length:
            raise TransportError(f"{length} bytes came where {len(first)} were awaited")
        for part in (first, *others):
            _fill(of, _memory(part))


class _Moving:
    """Implements base.Handle."""

    def __init__(self, lane: _Lane, done: _Done, what: str, buffers: Buffers) -> None:
        self._lane, self._done, self._what, self._buffers = lane, done, what, buffers

    def wait(self, deadline: Deadline) -> Tensor:
        failure = "given up"
        try:
            failure = deadline.until(self._done.event.wait) or self._done.failure
        finally:  # the board may be gone
            if failure is not None:
                self._lane.end()
        if failure is not None:
            raise TransportError(f"{self._what}: {failure}")
        assert self._done.message is not None
        return self._done.message

    def release(self) -> None:
        assert self._done.message is not None
        self._buffers.give_back(self._done.message)


def _settle(made: socket.socket) -> None:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # between refits nothing else is sent
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)


def _memory(block: Tensor) -> memoryview:
    return memoryview(block.numpy())


def _fill(of: socket.socket, memory: memoryview) -> None:
    while memory:
        came = of.recv_into(memory, 0, socket.MSG_WAITALL)
        if not came:
            raise TransportError("the other side has closed the connection")
        memory = memory[came:]
