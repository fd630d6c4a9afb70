"""An HTTP client of one server. The client distinguishes invalid responses, timeouts and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from megatron_rl.config.base import ConfigError
from megatron_rl.lib.user_code import one_line
from megatron_rl.network.retries import asked_pause_s, is_wrong_request

CONNECT_S = 5.0
KEPT_S = 2.0  # seconds for which the client keeps an idle connection open; servers close it after five seconds
CONTROL_S = 60.0  # default timeout in seconds of a request
CONTROL_BYTES = 16 << 20  # default maximum size of a response in bytes
SHOWN = 400  # maximum number of characters of a server's error text in a message
JSON = "application/json"
REFUSED = "refuses the job's token: was it started by another run?"
ASKS = {"User-Agent": "megatron-rl", "Accept-Encoding": "identity"}


class ServerLost(RuntimeError):
    """Raised when a server does not respond, reports an internal error, or sends an invalid response. Another server
    may be able to answer the same request.

    `retry_after_s`: number of seconds that the server asks to wait before the next request.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestRefused(ValueError):
    """Raised when the server reports that the request is invalid. Any other server would refuse the request too."""


class Http:
    """A client of one server: JSON or bytes over HTTP, with headers that authenticate the client.

    One timeout covers the whole request, from connecting to the last byte of the response. A response has a maximum
    size in bytes. `ask` and `exchange` are coroutines; the caller's event loop keeps their connections open for a short
    time. `call` and `answers` block the calling thread. Several event loops and threads may use one client at once.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, refused: str = REFUSED) -> None:
        """`refused`: the error message for a server that rejects the client's credentials. The message says what is
        wrong and what to do.

        Raises ConfigError if the URL names no server, or if a header has characters that HTTP does not allow.
        """
        self.url = url.rstrip("/")
        _check(self.url, headers)
        self._headers, self._refused = {**ASKS, **headers}, refused
        self._lock = threading.Lock()  # guards the fields below
        self._under_way: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[Any]]] = {}
        self._closed = False

    async def ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, says: bool = True,
        max_bytes: int = CONTROL_BYTES,
    ) -> Any:  # fmt: skip
        """Sends `body` as JSON and returns the parsed JSON response. Returns None for an empty response. If `says` is
        False, ignores the content of the response and returns None.

        Raises ServerLost (also for a response of more than `max_bytes`), RequestRefused, and ConfigError if the server
        rejects the client's credentials.
        """
        data = None if body is None else json.dumps(body).encode()
        answer = await self._good(method, path, data, JSON, timeout_s, max_bytes)
        try:
            return json.loads(answer) if says and answer else None
        except (ValueError, RecursionError) as error:  # the response is not text, not JSON, or nested too deeply
            raise ServerLost(f"{self.url}{path} answered something that is not JSON: {_shown(answer)!r}") from error

    async def exchange(self, path: str, body: bytes, kind: str, *, timeout_s: float, max_bytes: int) -> bytes:
        """Posts bytes of the content type `kind` and returns the bytes of the response. Raises the same errors as
        `ask`.
        """
        return await self._good("POST", path, body, kind, timeout_s, max_bytes)

    def call(self, method: str, path: str, body: Any = None, **terms: Any) -> Any:
        """Does the same as `ask`, but blocks until the response has arrived. Must not be called from a running event
        loop.
        """

        work = self.ask(method, path, body, **terms)
        try:
            return asyncio.run(work)
        except OSError as error:  # there is no free file descriptor for an event loop
            work.close()
            raise ServerLost(f"{self.url}{path}: {error}") from error

    def answers(self, path: str, *, timeout_s: float = CONNECT_S) -> bool:
        """Returns whether the server answers a GET request of `path` successfully now. Blocks the calling thread."""
        try:
            self.call("GET", path, timeout_s=timeout_s)
        except (ServerLost, RequestRefused, ConfigError):
            return False
        return True

    def hang_up(self) -> None:
        """Aborts the requests in progress: they raise ServerLost. Thread-safe."""

        def break_off(task: asyncio.Task[Any]) -> None:  # runs in the event loop of the request
            with self._lock:
                found = self._under_way.pop(task, None)
            if found is not None:  # None if the request has already ended
                task.cancel()

        with self._lock:
            under_way = [*self._under_way.items()]
        for task, loop in under_way:
            with contextlib.suppress(RuntimeError):  # raised if the event loop, and so the request, has ended
                loop.call_soon_threadsafe(break_off, task)

    def close(self) -> None:
        """Aborts the requests in progress and makes later requests raise ServerLost. Thread-safe."""
        with self._lock:
            self._closed = True
        self.hang_up()

    async def _good(
        self, method: str, path: str, body: bytes | None, kind: str, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Sends a request and returns the body of the response, if the response has a success status (2xx).

        Raises ConfigError for status 401 (wrong credentials), RequestRefused for another status that reports a wrong
        request, and ServerLost for any other status or if there is no response.
        """
        status, headers, data = await self._answer(method, path, body, kind, timeout_s, max_bytes)
        if status == 401:
            raise ConfigError(f"{self.url} {self._refused}")
        said = f"{self.url}{path} answered {status}: {_shown(data)}"
        if is_wrong_request(status):
            raise RequestRefused(said)
        if not 200 <= status < 300:
            raise ServerLost(said, retry_after_s=asked_pause_s(status, headers))
        return data

    async def _answer(
        self, method: str, path: str, body: bytes | None, kind: str, timeout_s: float, max_bytes: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Sends a request and returns the status, headers and body of the response, for any status. Raises ServerLost
        if there is no complete response in time, or if the response has more than `max_bytes` bytes.
        """
        task = asyncio.current_task()
        assert task is not None
        session, data = await self._begin(task), bytearray()
        limits = aiohttp.ClientTimeout(connect=min(CONNECT_S, timeout_s))
        url, headers = URL(self.url + path), {**self._headers, "Content-Type": kind}
        try:
            async with (
                asyncio.timeout(timeout_s),
                session.request(
                    method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
                ) as response,
            ):
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > max_bytes:
                        raise ServerLost(
                            f"{self.url}{path} answered more than {max_bytes} bytes: that is no answer to this"
                        )
                return response.status, response.headers, bytes(data)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host name that cannot be encoded
            why = one_line(error, SHOWN)
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                why = f"no connection within {limits.connect:g} s"
            elif isinstance(error, TimeoutError):
                why = f"no answer within {timeout_s:g} s"
            raise ServerLost(f"{self.url}{path}: {why}") from error
        except asyncio.CancelledError:
            if task in self._under_way:
                raise
            task.uncancel()  # the cancellation came from `hang_up`
            raise ServerLost(f"{self.url}{path}: the connection was broken off") from None
        finally:
            with self._lock:
                self._under_way.pop(task, None)

    async def _begin(self, task: asyncio.Task[Any]) -> aiohttp.ClientSession:
        """Registers a request and returns the aiohttp session of the running event loop. Raises ServerLost if the
        client is closed.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise ServerLost(f"{self.url}: this client of it was closed")
            self._under_way[task] = loop
            if loop in self._sessions:
                return self._sessions[loop][0]
        opened = _open_session()
        session = await anext(opened)
        with self._lock:
            living = {own: kept for own, kept in self._sessions.items() if not own.is_closed()}
            self._sessions = {**living, loop: (session, opened)}
        return session


class _Connector(aiohttp.TCPConnector):
    """A connector that reuses a connection unless the server has sent unexpected data on it."""

    async def connect(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        connection: Any = await super().connect(req, traces, timeout)
        while connection.protocol.should_close:
            connection.close()
            connection = await super().connect(req, traces, timeout)
        return connection


async def _open_session() -> AsyncGenerator[aiohttp.ClientSession]:
    """Yields an aiohttp session for the running event loop. When the loop ends, asyncio closes this generator, which
    closes the session.
    """
    connector, cookies = _Connector(limit=0, keepalive_timeout=KEPT_S), aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(connector=connector, cookie_jar=cookies, auto_decompress=False) as session:
        yield session


def _check(url: str, headers: Mapping[str, str]) -> None:
    """Raises ConfigError if the URL names no HTTP server, or if a header has characters that HTTP does not allow."""
    try:
        parts = urlsplit(url)
        host, _, _ = parts.hostname or "", parts.port, URL(url)
        problem = "" if parts.scheme in ("http", "https") and host.isprintable() and " " not in host else "of a server"
    except ValueError as error:
        host, problem = "", f"({error})"
    if problem or not host:
        raise ConfigError(f"{url!r} is no URL {problem or 'of a server'}: give http://HOST:PORT or https://HOST")
    if not all(value.isprintable() and value == value.strip() for value in headers.values()):
        raise ConfigError(  # The message does not show the header's value, because the value may be an API key.
            f"{host}: the API key or a header of requests has a line break, or another character or space that HTTP "
            "does not allow there"
        )


def _shown(data: bytes) -> str:
    """Returns the beginning of a response's text as one line."""
    return " ".join(data[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]
