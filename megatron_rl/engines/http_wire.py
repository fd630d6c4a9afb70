"""A request and its answer in HTTP/1.1 over one connection, on an event loop: no thread waits for a server.

Answers are a stranger's: what is no HTTP, or longer than was asked for, is refused while it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from megatron_rl.config.schema import ConfigError

BUFFER_BYTES = 1 << 20  # of an answer that is kept before it is read
HEAD_BYTES = 1 << 16  # the longest head of an answer
LINES = 128  # the most fields of a head, interim answers, or lines behind the last chunk
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?", re.DOTALL)
_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


class WireError(Exception):
    """What came is no answer in HTTP/1.1."""


class TooLongError(Exception):
    """The answer is longer than was asked for."""


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    data: bytes


class Address(NamedTuple):
    """Where a server listens, by its URL."""

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

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, *, keep: bool) -> bytes:
        """Returns the bytes of a request. `keep`: the connection is used again after it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{host}:{self.port}", "User-Agent": "megatron-rl", "Accept-Encoding": "identity", **headers,
            "Content-Length": str(len(body or b"")), "Connection": "keep-alive" if keep else "close",
        }  # fmt: skip
        lines = [f"{method} {self.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        for line in lines:
            if not line.isprintable():
                raise ConfigError(f"{self.host}: the API key, a header or the path of a request has a line break")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", errors="replace") + (body or b"")


class Connection:
    """A connection to a server, for one request after the other. It belongs to the loop that opened it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.loop = asyncio.get_running_loop()
        self.expiry: asyncio.TimerHandle | None = None  # ends it while nobody uses it
        self._reader, self._writer = reader, writer

    @staticmethod
    async def open(address: Address) -> Connection:
        """Connects. Raises OSError."""
        host, port, tls, _ = address
        return Connection(*await asyncio.open_connection(host, port, ssl=tls, limit=BUFFER_BYTES))

    @property
    def usable(self) -> bool:
        """Whether the other side has neither ended it nor sent anything, as far as is known."""
        return not (self._writer.is_closing() or self._reader.at_eof())

    async def exchange(self, request: bytes, max_bytes: int) -> tuple[HttpAnswer, bool]:
        """Sends a request -> its answer, and whether the connection may be used again.

        Raises WireError, TooLongError for a body of more than `max_bytes`, and OSError.
        """
        self._writer.write(request)
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read all, and hang up
            await self._writer.drain()
        try:
            return await _answer(self._reader, max_bytes)
        except asyncio.IncompleteReadError as error:
            raise WireError("the connection ended before the answer did") from error
        except asyncio.LimitOverrunError as error:
            raise WireError(f"a line of more than {BUFFER_BYTES} bytes") from error

    def close(self) -> None:
        """Ends it at once, whatever is still to be sent. Called in the thread of its loop."""
        if self.expiry is not None:
            self.expiry.cancel()
        self._writer.transport.abort()

    def end(self) -> None:
        """Closes it; any thread may call it."""
        with contextlib.suppress(RuntimeError):  # its loop has ended, and it with it
            self.loop.call_soon_threadsafe(self.close)


async def _answer(reader: asyncio.StreamReader, max_bytes: int) -> tuple[HttpAnswer, bool]:
    for _ in range(LINES):
        minor, status, headers = await _head(reader)
        if status >= 200:
            break
    else:
        raise WireError(f"{LINES} interim answers and no final one")
    again = minor == 1 and headers.get("connection", "").lower() != "close"
    if status in (204, 304):
        return HttpAnswer(status, headers, b""), again
    if "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise WireError(f"the transfer encoding {headers['transfer-encoding'][:40]!r} is not known")
        return HttpAnswer(status, headers, await _chunks(reader, max_bytes)), again
    if "content-length" not in headers:
        return HttpAnswer(status, headers, await _rest(reader, max_bytes)), False
    told = headers["content-length"]
    if not (told.isascii() and told.isdecimal() and len(told) < 19):
        raise WireError(f"a body of {told[:40]!r} bytes")
    if int(told) > max_bytes:
        raise TooLongError
    return HttpAnswer(status, headers, await reader.readexactly(int(told))), again


async def _head(reader: asyncio.StreamReader) -> tuple[int, int, dict[str, str]]:
    """Returns the minor version, the status and the fields of a head."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    found = _STATUS.fullmatch(first)
    if found is None:
        raise WireError(f"no HTTP: {first[:80]!r}")
    if len(lines) > LINES or len(first) + sum(map(len, lines)) > HEAD_BYTES:
        raise WireError(f"a head of more than {LINES} fields or {HEAD_BYTES} bytes")
    headers: dict[str, str] = {}
    for line in lines:
        raw, colon, value = line.decode("latin-1").partition(":")
        name, value = raw.lower(), value.strip()
        if not colon or not raw.strip() or raw != raw.strip():
            raise WireError(f"no field of a head: {line[:80]!r}")
        if name == "content-length" and headers.get(name, value) != value:
            raise WireError("two lengths of one body")
        headers[name] = value if name == "content-length" else f"{headers[name]}, {value}" if name in headers else value
    return int(found[1]), int(found[2]), headers


async def _chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    parts, total = list[bytes](), 0
    while True:
        told = (await reader.readuntil(b"\r\n"))[:-2].partition(b";")[0].strip()
        if not _SIZE.fullmatch(told):
            raise WireError(f"a chunk of {told[:40]!r} bytes")
        size = int(told, 16)
        total += size
        if total > max_bytes:
            raise TooLongError
        if not size:
            break
        parts.append(await reader.readexactly(size))
        if await reader.readexactly(2) != b"\r\n":
            raise WireError("a chunk that is longer than its size")
    for _ in range(LINES):
        if await reader.readuntil(b"\r\n") == b"\r\n":
            return b"".join(parts)
    raise WireError(f"more than {LINES} lines behind the last chunk")


async def _rest(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Returns what comes until the other side ends the connection."""
    parts, total = list[bytes](), 0
    while part := await reader.read(BUFFER_BYTES):
        parts.append(part)
        total += len(part)
        if total > max_bytes:
            raise TooLongError
    return b"".join(parts)
