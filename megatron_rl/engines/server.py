"""The protocol of one server of rollouts, as a pool needs it, and the ways in which it can fail; HTTP that tells these
apart.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import urllib3
import urllib3.util

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.base import Completion, Sampling, TopScores

CONNECT_S = 5.0
KEPT_S = 2.0  # an idle connection is used again: servers close theirs after five, perhaps while a request is on its way
CONNECTIONS = 1024  # kept, more are made and thrown away
CONTROL_S = 60.0  # a control route's answer
CONTROL_BYTES = 16 << 20  # the longest answer of one
READ_BYTES = 1 << 20  # of an answer at a time
SHOWN = 400  # characters of a server's error text
BUSY = (408, 425, 429)  # statuses that blame the moment, not the request
TOO_MANY_S = 1.0  # how long a server is left alone that got too many requests and does not say how long it wants


REFUSED = "refuses the job's token: was it started by another run?"


class ServerLost(RuntimeError):
    """The server did not answer, or not sensibly: another may. `retry_after_s`: how long it asks to be left alone."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestRefused(ValueError):
    """The server says that the request is wrong: every other one would say so too."""


class Server(Protocol):
    """One replica. Every verb raises ServerLost when it does not answer in time, RequestRefused when it says no."""

    url: str

    def ready(self) -> bool:
        """Tells whether it answers now; raises nothing."""
        ...

    def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float) -> list[Completion]:
        """Returns `sampling.n` completions of [T] int32, each with its `versions`; one that a refit cut short has
        Stop.ABORTED. Sample j draws by `seed` + j.
        """
        ...

    def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Returns for each [T] int32 the log-probs of its tokens under the model at temperature 1, 0 for the first, and
        the k likeliest tokens at every place (k may be 0). Raises EngineError where it does not tell them.
        """
        ...

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """Takes a seat at the trainer's refit board. `secret`: what signs there."""
        ...

    def pause(self) -> None:
        """Prepares for a refit: no request writes tokens from here on, as `engine.pause` says."""
        ...

    def update(self, version: int, wait_s: float) -> None:
        """Takes part in the refit that comes within `wait_s`; returns when the weights are in, under this version, and
        no old cache is left.
        """
        ...

    def resume(self) -> None: ...

    def version(self) -> int:
        """Returns the version of its weights; -1 before the first refit."""
        ...

    def hang_up(self) -> None:
        """Breaks off the verbs under way in other threads, which raise ServerLost now. Any thread may call it."""
        ...

    def close(self) -> None:
        """Hangs up for good: later verbs raise ServerLost too."""
        ...


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class Http:
    """A client of one server: JSON or bytes over HTTP, with headers that tell who asks. Many threads may use it.

    A request has one deadline for all of it, however slowly the answer drips, and an answer one limit in bytes.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, refused: str = REFUSED) -> None:
        """`refused`: what is wrong, and the cure, when the server does not know who asks."""
        self.url = url.rstrip("/")
        self._headers, self._refused = dict(headers), refused
        self._base = urllib3.util.parse_url(self.url).path or ""
        self._pool = urllib3.connection_from_url(self.url, maxsize=CONNECTIONS)
        self._ends = threading.local()  # `at`: when the request of this thread ends
        self._pool.ConnectionCls = _remembered(self._pool.ConnectionCls, self._remember, self._left_s)
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._under_way = 0
        self._closed = False

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, says: bool = True,
        max_bytes: int = CONTROL_BYTES,
    ) -> Any:  # fmt: skip
        """Sends `body` as JSON -> the answer's JSON; None for an empty answer, or when what it `says` is of no
        interest.

        Raises ServerLost, also for an answer of more than `max_bytes`, RequestRefused, and ConfigError when the server
        does not know who asks.
        """
        data = None if body is None else json.dumps(body).encode()
        answer = self._good(method, path, data, "application/json", timeout_s, max_bytes)
        try:
            return json.loads(answer.data) if says and answer.data else None
        except (ValueError, RecursionError) as error:  # neither text nor JSON, or lists in lists in lists
            raise ServerLost(f"{self.url}{path} answered something that is not JSON: {_shown(answer)!r}") from error

    def exchange(self, path: str, body: bytes, kind: str, *, timeout_s: float, max_bytes: int) -> bytes:
        """Posts bytes of a content type -> the answer's bytes. Raises as `call` does."""
        return self._good("POST", path, body, kind, timeout_s, max_bytes).data

    def answers(self, path: str, *, timeout_s: float = CONNECT_S) -> bool:
        """Tells whether a GET gives a good answer now."""
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

    def _good(
        self, method: str, path: str, body: bytes | None, kind: str, timeout_s: float, max_bytes: int
    ) -> HttpAnswer:
        """Returns an answer that says yes."""
        with self._open():
            answer = self._request(method, path, body, kind, timeout_s, max_bytes)
        if answer.status == 401:
            raise ConfigError(f"{self.url} {self._refused}")
        said = f"{self.url}{path} answered {answer.status}: {_shown(answer)}"
        if 400 <= answer.status < 500 and answer.status not in BUSY:
            raise RequestRefused(said)
        if not 200 <= answer.status < 300:
            raise ServerLost(said, retry_after_s=_retry_after_s(answer))
        return answer

    def _request(
        self, method: str, path: str, body: bytes | None, kind: str, timeout_s: float, max_bytes: int
    ) -> HttpAnswer:
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
        self._ends.at = time.monotonic() + timeout_s
        try:
            answer = self._pool.urlopen(
                method, self._base + path, body=body, headers={**self._headers, "Content-Type": kind},
                timeout=timeout, retries=False, redirect=False, preload_content=False, decode_content=False,
            )  # fmt: skip
            return HttpAnswer(answer.status, answer.headers, self._whole(answer, path, max_bytes))
        except urllib3.exceptions.TimeoutError as error:
            raise ServerLost(f"{self.url}{path}: no answer within {timeout_s:g} s") from error
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            # ValueError: Python's client reads a chunk of -5 bytes
            raise ServerLost(f"{self.url}{path}: {str(error) or type(error).__name__}") from error

    def _whole(self, answer: urllib3.BaseHTTPResponse, path: str, max_bytes: int) -> bytes:
        """Returns the body of an answer. Raises ServerLost as soon as it is longer than `max_bytes`."""
        parts, size = list[bytes](), 0
        while part := answer.read(READ_BYTES):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                answer.close()
                raise ServerLost(f"{self.url}{path} answered more than {max_bytes} bytes: that is no answer to this")
        answer.release_conn()
        return b"".join(parts)

    def _left_s(self) -> float:
        """Returns how long the request of this thread may still take. Raises TimeoutError when its time is up."""
        left = self._ends.at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request's time is up")
        return left

    def _remember(self, connection: socket.socket) -> None:
        """Closing a client wakes nobody who waits for an answer, shutting its sockets does."""
        with self._lock:
            self._sockets.add(connection)
            closed = self._closed
        if closed:
            _break(connection)


def _remembered(base: Any, remember: Callable[[socket.socket], None], left_s: Callable[[], float]) -> Any:
    """Returns a class of connections that tell their sockets, and count as dropped when they were idle for long.

    A request and its answer take no longer in all than `left_s` says.
    """

    class Remembered(base):
        used = 0.0

        def connect(self) -> None:
            super().connect()
            remember(self.sock)

        def request(self, *args: Any, **options: Any) -> Any:
            if self.sock is not None:
                self.sock.settimeout(left_s())  # else that of the request before
            return super().request(*args, **options)

        def getresponse(self) -> Any:
            self.response_class = functools.partial(_Timely, left_s)
            answer = super().getresponse()
            self.used = time.monotonic()
            return answer

        @property
        def is_connected(self) -> bool:
            return super().is_connected and time.monotonic() - self.used < KEPT_S

    return Remembered


class _Timely(http.client.HTTPResponse):
    """An answer that is read within a time in all. Python's own has a time-out for each read, so that a server that
    sends a byte now and then is never late.
    """

    def __init__(self, left_s: Callable[[], float], sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_TimelyReads(self.fp.detach(), sock, left_s))


class _TimelyReads(io.RawIOBase):
    """The reads of one answer."""

    def __init__(self, raw: Any, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._raw, self._socket, self._left_s = raw, sock, left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is broken already
        connection.shutdown(socket.SHUT_RDWR)


def _retry_after_s(answer: HttpAnswer) -> float:
    """Returns how long a server asks to be left alone: by its header, if it has one in seconds."""
    told = answer.headers.get("retry-after", "")
    if told.isdecimal() and len(told) < 7:
        return float(told)
    return TOO_MANY_S if answer.status == 429 else 0.0


def _shown(answer: HttpAnswer) -> str:
    """Returns the beginning of an answer's text, in one line."""
    return " ".join(answer.data[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]
