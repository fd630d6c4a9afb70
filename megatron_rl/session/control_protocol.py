"""What a run asks of the supervisors of servers in its own GPUs, and what these answer: lines over one socket.

`settle`: start no server from now on -> `serves INCARNATION`, once no start is under way; without a server `serves`.
`hold A B ...`: end a server that is none of these, which sleep -> `held`, once it has ended. `release`: servers may be
started again; there is no answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

SETTLE, HOLD, RELEASE, SERVES, HELD = "settle", "hold", "release", "serves", "held"
STARTING, NONE = "starting", ""  # what `ControlChannel` says of a server beside its incarnation


class ControlChannel:
    """A supervisor's side: a thread reads the orders, another one runs the server and asks what it may do. Its `stop`
    is set at the end of the input.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self._change = threading.Condition()
        self._server, self._held, self._asleep = STARTING, False, frozenset[str]()
        self._number = 0  # of the latest order

    def listen(self, descriptor: int) -> None:
        """Obeys what comes from a descriptor, in a thread, until its end. A pipe that only ends will do."""
        threading.Thread(target=self._read, args=(descriptor,), daemon=True).start()

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Waits until a server may be started, or the supervisor is to leave. In the block there is one."""
        with self._change:
            while self._held and not self.stop.is_set():
                self._change.wait(1.0)
            self._say(STARTING)  # before another order can come in between
        try:
            yield
        finally:
            self._say(NONE)

    def serves(self, incarnation: str) -> None:
        """Tells that the server answers."""
        self._say(incarnation)

    @property
    def unwanted(self) -> bool:
        """Tells whether the server must end now, because it does not sleep while the trainer takes its memory."""
        with self._change:
            return self._held and bool(self._asleep) and self._server not in self._asleep

    def _say(self, server: str) -> None:
        with self._change:
            self._server = server
            self._change.notify_all()

    def _read(self, descriptor: int) -> None:
        text = b""
        try:
            while found := os.read(descriptor, 4096):
                text += found
                *lines, text = text.split(b"\n")
                for line in lines:
                    self._obey(line.decode().split(), descriptor)
        except OSError:
            pass  # the run has gone while an answer to it was unread: that is an end, too
        finally:
            self.stop.set()
            with self._change:
                self._change.notify_all()

    def _obey(self, words: list[str], descriptor: int) -> None:
        """Takes an order in; a thread answers, as this one must see the end of the input meanwhile."""
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
                threading.Thread(target=self._answer, args=(descriptor, number, done), daemon=True).start()

    def _answer(self, descriptor: int, number: int, done: Callable[[], bool]) -> None:
        """Answers an order when it is done, unless another one has come since."""
        with self._change:
            self._change.wait_for(lambda: done() or self._number != number or self.stop.is_set())
            if self._number != number or self.stop.is_set():
                return
            answer = HELD if self._asleep else f"{SERVES} {self._server}".strip()
        with contextlib.suppress(OSError):  # the run has gone
            os.write(descriptor, answer.encode() + b"\n")


class ControlClient:
    """The run's side of one supervisor's socket."""

    def __init__(self, own: socket.socket) -> None:
        self._socket, self._text = own, b""

    def say(self, *words: str) -> None:
        """Sends an order; to a supervisor that is gone, nothing."""
        with contextlib.suppress(OSError):
            self._socket.sendall(" ".join(words).encode() + b"\n")

    def answer(self, timeout_s: float) -> list[str]:
        """Returns the words of the next answer; none of a supervisor that is gone. Raises TimeoutError."""
        self._socket.settimeout(timeout_s)
        try:
            while b"\n" not in self._text:
                if not (found := self._socket.recv(4096)):
                    return []
                self._text += found
        except ConnectionError:
            return []
        line, self._text = self._text.split(b"\n", 1)
        return line.decode().split()

    def close(self) -> None:
        """Ends the line, which tells the supervisor to leave."""
        self._socket.close()
