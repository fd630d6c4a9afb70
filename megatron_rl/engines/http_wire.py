"""A request and its answer in HTTP/1.1 over one connection, on an event loop: no thread waits for a server.

Answers are a stranger's: what is no HTTP, or longer than was asked for, is refused while it comes. h11 knows the
protocol; this file moves its bytes and holds its limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import h11

from megatron_rl.config.schema import ConfigError

# h11's patterns take a time that grows with the square of the white space in a bad head or chunk's line, and nothing
# ends them: a line is no longer than HEAD_BYTES and one piece together.
HEAD_BYTES = 1 << 13  # the longest unfinished head, or line of a chunk
HEAD_PIECE = 1 << 12  # bytes read at once before the body
BODY_PIECE = 1 << 14  # bytes of a body read at once
INTERIM = 128  # the most interim answers
SHOWN = 200  # characters of what h11 says of a bad answer, which quotes it


Request = Sequence[h11.Event]  # the parts that are sent one after the other


class WireError(Exception):
    """Bytes came that are no answer in HTTP/1.1."""


class TooLongError(Exception):
    """The answer is longer than was asked for."""


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]  # names in lower case; the last of a name
    data: bytes


class Address(NamedTuple):
    """The place where a server listens, read from its URL."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    path: str  # before those of requests

    @staticmethod
    def of(url: str) -> Address:
        """Reads a URL. Raises ConfigError for one that names no HTTP server."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL ({error}): give http://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not host or not host.isprintable() or " " in host:
            raise ConfigError(f"{url!r} is no URL of a server: give http://HOST:PORT or https://HOST")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return Address(host, port or (80 if tls is None else 443), tls, quote(parts.path, safe="/%:@!$&'()*+,;=~"))

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, *, keep: bool) -> Request:
        """Returns a request. `keep`: the connection is used again after it.

        Raises ConfigError for a header or path that HTTP cannot carry.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{host}:{self.port}", "User-Agent": "megatron-rl", "Accept-Encoding": "identity", **headers,
            "Content-Length": str(len(body or b"")), "Connection": "keep-alive" if keep else "close",
        }  # fmt: skip
        target, *values = (value.encode("latin-1", "replace") for value in (self.path + path, *fields.values()))
        named = [(name.encode("latin-1", "replace"), value) for name, value in zip(fields, values, strict=True)]
        try:
            first = h11.Request(method=method, target=target, headers=named)
        except h11.LocalProtocolError:
            said = "has a line break, or another character or space that HTTP does not allow there"
            # h11's message is not told: it shows the key
            raise ConfigError(f"{self.host}: the API key, a header or the path of a request {said}") from None
        return [first, h11.Data(data=body or b""), h11.EndOfMessage()]


class Connection:
    """A connection to a server, for one request after the other. It belongs to the loop that opened it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.loop = asyncio.get_running_loop()
        self.expiry: asyncio.TimerHandle | None = None  # ends it while nobody uses it
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)

    @staticmethod
    async def open(address: Address) -> Connection:
        """Connects. Raises OSError."""
        host, port, tls, _ = address
        return Connection(*await asyncio.open_connection(host, port, ssl=tls))

    @property
    def usable(self) -> bool:
        """Whether the other side has neither ended it nor sent anything, as far as is known. Called in its loop."""
        waiting = self._reader.read(1)
        try:
            waiting.send(None)  # one step of the coroutine: it waits where nothing has come
        except (StopIteration, OSError):
            return False
        waiting.close()
        return not self._writer.is_closing()

    async def exchange(self, request: Request, max_bytes: int) -> tuple[HttpAnswer, bool]:
        """Sends a request -> its answer, and whether the connection may be used again.

        Raises WireError, TooLongError for a body of more than `max_bytes`, and OSError.
        """
        self._writer.write(b"".join(self._http.send(part) or b"" for part in request))
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read all, and hang up
            await self._writer.drain()
        try:
            answer = await self._answer(max_bytes)
        except h11.RemoteProtocolError as error:
            ended = self._http.trailing_data[1]
            raise WireError("the connection ended before the answer did" if ended else str(error)[:SHOWN]) from error
        again = self._http.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
        again = again and self._http.trailing_data == (b"", False)
        if again:
            self._http.start_next_cycle()
        return answer, again

    async def _answer(self, max_bytes: int) -> HttpAnswer:
        status, headers, body, interim = 0, dict[str, str](), bytearray(), 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                piece = BODY_PIECE if self._http.their_state is h11.SEND_BODY else HEAD_PIECE
                self._http.receive_data(await self._reader.read(piece))
            elif isinstance(event, h11.InformationalResponse):
                interim += 1
                if interim > INTERIM:
                    raise WireError(f"more than {INTERIM} interim answers and no final one")
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > max_bytes:
                    raise TooLongError
            elif isinstance(event, h11.EndOfMessage):
                return HttpAnswer(status, headers, bytes(body))

    def close(self) -> None:
        """Ends it at once, whatever is still to be sent. Called in the thread of its loop."""
        if self.expiry is not None:
            self.expiry.cancel()
        self._writer.transport.abort()

    def end(self) -> None:
        """Closes it; any thread may call it."""
        with contextlib.suppress(RuntimeError):  # its loop has ended, and it with it
            self.loop.call_soon_threadsafe(self.close)
