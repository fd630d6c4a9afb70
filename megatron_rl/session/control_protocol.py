"""The message protocol between a run and the supervisor processes of the servers that share the run's GPUs.

The run has one socket to each supervisor. A supervisor manages one server. Each start of the server has an id, called
incarnation. The run sends orders, and the supervisor answers:

- `settle`: do not start the server from now on. Once no start is in progress, the supervisor answers
  `serves INCARNATION`, or `serves` if the server is not running.
- `hold A B ...`: end the server unless its incarnation is one of A, B, ..., the incarnations that are asleep. The
  supervisor answers `held` once the server is asleep or has ended.
- `release`: the server may be started again. The supervisor does not answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

SETTLE, HOLD, RELEASE, SERVES, HELD = "settle", "hold", "release", "serves", "held"
# States of a server that does not run: STARTING, or NONE if there is no server process. The state of a running server
# is its incarnation, the id of its start.
STARTING, NONE = "starting", ""


class ControlChannel:
    """A supervisor's side of the protocol by which a run controls the servers that share the run's GPUs.

    One thread reads the run's orders. Another thread runs the server and asks this object whether the server may start
    or must end. The event `stop` is set when the run closes the socket or exits.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self._change = threading.Condition()
        self._server, self._held, self._asleep = STARTING, False, frozenset[str]()
        self._number = 0  # sequence number of the latest order

    def listen(self, descriptor: int) -> None:
        """Starts a thread that reads and executes the run's orders from a file descriptor until end of file."""
        threading.Thread(target=self._read, args=(Connection(os.dup(descriptor)),), daemon=True).start()

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Context manager for one run of the server. Waits on entry until the server may start or `stop` is set."""
        with self._change:
            while self._held and not self.stop.is_set():
                self._change.wait(1.0)
            self._say(STARTING)  # set under the lock, so that no other order is executed before
        try:
            yield
        finally:
            self._say(NONE)

    def serves(self, incarnation: str) -> None:
        """Records that the server answers requests. `incarnation`: id of this start of the server."""
        self._say(incarnation)

    @property
    def unwanted(self) -> bool:
        """Returns whether the server must end now because it is not asleep while the trainer uses the GPU memory."""
        with self._change:
            return self._held and bool(self._asleep) and self._server not in self._asleep

    def _say(self, server: str) -> None:
        with self._change:
            self._server = server
            self._change.notify_all()

    def _read(self, run: Connection) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):  # the run has exited; OSError if an answer is unread
                while True:
                    self._obey(run.recv_bytes().decode().split(), run)
        finally:
            self.stop.set()
            with self._change:
                self._change.notify_all()

    def _obey(self, words: list[str], run: Connection) -> None:
        """Executes an order of the run. A new thread waits until the order is done and sends the answer, so that this
        thread can read further orders and detect the end of the input."""
        verb, asleep = (words or [""])[0], frozenset(words[1:])
        with self._change:
            self._number += 1
            self._held = verb in (SETTLE, HOLD)
            self._asleep = asleep | {"-"} if verb == HOLD else frozenset()
            self._change.notify_all()
            if self._held:
                done = (
                    (lambda: self._server != STARTING) if verb == SETTLE else (lambda: self._server in {NONE, *asleep})
                )
                number = self._number
                threading.Thread(target=self._answer, args=(run, number, done), daemon=True).start()

    def _answer(self, run: Connection, number: int, done: Callable[[], bool]) -> None:
        """Waits until the order with the sequence number `number` is done, and then sends the answer. If a newer order
        arrives before, sends no answer."""
        with self._change:
            self._change.wait_for(lambda: done() or self._number != number or self.stop.is_set())
            if self._number != number or self.stop.is_set():
                return
            answer = HELD if self._asleep else f"{SERVES} {self._server}".strip()
        with contextlib.suppress(OSError):  # the run has exited
            run.send_bytes(answer.encode())


class ControlClient:
    """The run's side of the socket to one supervisor."""

    def __init__(self, own: socket.socket) -> None:
        self._supervisor = Connection(own.detach())

    def say(self, *words: str) -> None:
        """Sends an order. A no-op if the supervisor has exited."""
        with contextlib.suppress(OSError):
            self._supervisor.send_bytes(" ".join(words).encode())

    def answer(self, timeout_s: float) -> list[str]:
        """Returns the words of the supervisor's next answer, or an empty list if the supervisor has exited.

        Raises TimeoutError if there is no answer within `timeout_s` seconds."""
        try:
            if not self._supervisor.poll(timeout_s):
                raise TimeoutError
            return self._supervisor.recv_bytes().decode().split()
        except (EOFError, ConnectionError):
            return []

    def close(self) -> None:
        """Closes the socket to the supervisor, which then ends its server and exits."""
        self._supervisor.close()
