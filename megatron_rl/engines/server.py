"""What the pool needs of one server of rollouts, and the ways in which it can fail; HTTP that tells these apart."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import urllib3

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.base import Completion, Sampling
from megatron_rl.engines.guard import HEADER

CONNECT_S = 5.0
KEPT_S = 2.0  # an idle connection is used again: servers close theirs after five, perhaps while a request is on its way
CONNECTIONS = 1024  # kept, more are made and thrown away
CONTROL_S = 60.0  # a control route's answer
SHOWN = 400  # characters of a server's error text
BUSY = (408, 425, 429)  # statuses that blame the moment, not the request


class ServerLost(RuntimeError):
    """The server did not answer, or not sensibly: another one may."""


class RequestRefused(ValueError):
    """The server says that the request is wrong: every other one would say so too."""


class Server(Protocol):
    """One replica. Every verb raises ServerLost when it does not answer in time, RequestRefused when it says no."""

    url: str

    def ready(self) -> bool:
        """Whether it answers now; raises nothing."""
        ...

    def generate(self, prompt: Sequence[int], sampling: Sampling, *, seed: int, timeout_s: float) -> list[Completion]:
        """`sampling.n` completions, each with its `versions`; one that a refit cut short has Stop.ABORTED."""
        ...

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """Takes a seat at the trainer's refit board. `secret`: what signs there."""
        ...

    def pause(self) -> None:
        """Before a refit: no request writes tokens from here on, as `engine.pause` says."""
        ...

    def update(self, version: int, wait_s: float) -> None:
        """Takes part in the refit that comes within `wait_s`; returns when the weights are in, named so, and no old cache is left."""
        ...

    def resume(self) -> None: ...

    def version(self) -> int:
        """Of its weights; -1 before the first refit."""
        ...

    def hang_up(self) -> None:
        """From any thread: verbs under way in others raise ServerLost now."""
        ...

    def close(self) -> None:
        """Hangs up for good: later verbs raise ServerLost too."""
        ...


class Http:
    """JSON over HTTP to one server, with the job's token. Calls come from many threads."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {HEADER: token, "Content-Type": "application/json"}
        self._base = urllib3.util.parse_url(self.url).path or ""
        self._pool = urllib3.connection_from_url(self.url, maxsize=CONNECTIONS)
        self._pool.ConnectionCls = _remembered(self._pool.ConnectionCls, self._remember)
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._under_way = 0
        self._closed = False

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, says: bool = True) -> Any:
        """The answer's JSON, None for an empty one, or when what it `says` is of no interest. Raises ServerLost, RequestRefused, and
        ConfigError for a wrong token."""
        with self._open():
            answer = self._request(method, path, body, timeout_s)
        if answer.status == 401:
            raise ConfigError(f"{self.url} refuses the job's token: was it started by another run?")
        said = f"{self.url}{path} answered {answer.status}: {_shown(answer)}"
        if 400 <= answer.status < 500 and answer.status not in BUSY:
            raise RequestRefused(said)
        if not 200 <= answer.status < 300:
            raise ServerLost(said)
        try:
            return json.loads(answer.data) if says and answer.data else None
        except ValueError as error:  # neither text nor JSON
            raise ServerLost(f"{self.url}{path} answered something that is not JSON: {_shown(answer)!r}") from error

    def answers(self, path: str, *, timeout_s: float = CONNECT_S) -> bool:
        """Whether a GET gives a good answer now."""
        try:
            self.call("GET", path, timeout_s=timeout_s)
        except (ServerLost, RequestRefused, ConfigError):
            return False
        return True

    def hang_up(self) -> None:
        """Breaks every connection: calls under way raise ServerLost, those that come make new ones."""
        with self._lock:
            connections = list(self._sockets)
        for connection in connections:
            _break(connection)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = not self._under_way
        self.hang_up()
        if idle:
            self._pool.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """The client stays open for the block."""
        with self._lock:
            if self._closed:
                raise ServerLost(f"{self.url}: this client of it was closed")
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                last = self._closed and not self._under_way
            if last:
                self._pool.close()

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            return self._pool.urlopen(
                method,
                self._base + path,
                body=data,
                headers=self._headers,
                timeout=timeout,
                retries=False,
                redirect=False,
            )
        except urllib3.exceptions.TimeoutError as error:
            raise ServerLost(f"{self.url}{path}: no answer within {timeout_s:g} s") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ServerLost(f"{self.url}{path}: {str(error) or type(error).__name__}") from error

    def _remember(self, connection: socket.socket) -> None:
        """Closing a client wakes nobody who waits for an answer, shutting its sockets does."""
        with self._lock:
            self._sockets.add(connection)
            closed = self._closed
        if closed:
            _break(connection)


def _remembered(base: Any, remember: Callable[[socket.socket], None]) -> Any:
    """A class of connections that tell their sockets, and are taken for dropped when they were idle for long."""

    class Remembered(base):
        used = 0.0

        def connect(self) -> None:
            super().connect()
            remember(self.sock)

        def getresponse(self) -> Any:
            answer = super().getresponse()
            self.used = time.monotonic()
            return answer

        @property
        def is_connected(self) -> bool:
            return super().is_connected and time.monotonic() - self.used < KEPT_S

    return Remembered


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is broken already
        connection.shutdown(socket.SHUT_RDWR)


def _shown(answer: urllib3.BaseHTTPResponse) -> str:
    """The beginning of an answer's text, in one line."""
    return " ".join(answer.data[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]
