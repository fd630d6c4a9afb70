"""The protocol of one server of rollouts, as a pool needs it, and the ways in which it can fail; HTTP that tells these
apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.base import Completion, Sampling, TopScores
from megatron_rl.engines.http_wire import Address, Connection, HttpAnswer, Request, TooLongError, WireError

CONNECT_S = 5.0
KEPT_S = 2.0  # that an idle connection is kept
CONTROL_S = 60.0  # a control route's answer
CONTROL_BYTES = 16 << 20  # the longest answer of one
SHOWN = 400  # characters of a server's error text
JSON = "application/json"
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


@dataclass(frozen=True)
class Adapters:
    """The place of a role's adapters, for a server that computes with them beside a model."""

    directory: Path  # with v{version} in it
    place: int = 0  # of the role among those that share the server
    roles: int = 1  # that share it


class Server(Protocol):
    """One replica. Every verb raises ServerLost when it does not answer in time, RequestRefused when it says no.

    Requests for rollouts and scores, of which there are many at a time, wait on the caller's event loop; the other
    verbs hold the thread that calls them.
    """

    url: str

    def ready(self) -> bool:
        """Tells whether it answers now; raises nothing."""
        ...

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float
    ) -> list[Completion]:
        """Returns `sampling.n` completions of [T] int32, each with its `versions`; one that a refit cut short has
        Stop.ABORTED. Sample j draws by `seed` + j.
        """
        ...

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Returns for each [T] int32 the log-probs of its tokens under the model at temperature 1, 0 for the first, and
        the k likeliest tokens at every place (k may be 0). Raises EngineError where it does not tell them.
        """
        ...

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """Takes a seat at the trainer's refit board. `secret`: what signs there."""
        ...

    def pause(self) -> None:
        """Prepares for a refit: no request writes tokens from here on, as `engine.pause` says. A server that sleeps
        takes the memory of its weights again, and not yet that of its keys and values.
        """
        ...

    def update(self, version: int, wait_s: float) -> None:
        """Takes part in the refit that comes within `wait_s`; returns when the weights are in, under this version, and
        no old cache is left.
        """
        ...

    def resume(self) -> None:
        """Lets requests go on after a refit; a server that sleeps goes on sleeping."""
        ...

    def sleep(self, *, discard: bool) -> None:
        """Gives the memory of the GPU back until `wake`; requests under way end as by an abort. `discard`: the weights
        are dropped, as a refit brings all of them before the next request; else host memory keeps them.
        """
        ...

    def wake(self) -> None:
        """Takes all memory again that `sleep` gave back, and answers requests from here on. A server that is awake
        stays as it is.
        """
        ...

    def version(self) -> int:
        """Returns the version of its weights; -1 before the first refit."""
        ...

    def hang_up(self) -> None:
        """Breaks off the verbs under way, which raise ServerLost now. Any thread may call it."""
        ...

    def close(self) -> None:
        """Hangs up for good: later verbs raise ServerLost too."""
        ...


class Http:
    """A client of one server: JSON or bytes over HTTP, with headers that tell who asks.

    A request has one deadline for all of it, connecting included, however slowly the answer drips, and an answer one
    limit in bytes. `ask` and `exchange` wait on the caller's event loop and keep their connection for a moment; `call`
    and `answers` hold the thread that calls them. Many loops and threads may use a client at once.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, refused: str = REFUSED) -> None:
        """`refused`: what is wrong, and the cure, when the server does not know who asks. Raises ConfigError for a URL
        that names no server.
        """
        self.url = url.rstrip("/")
        self._address = Address.of(self.url)
        self._headers, self._refused = dict(headers), refused
        self._lock = threading.Lock()  # guards what follows
        self._under_way: set[_Call] = set()
        self._idle: list[Connection] = []
        self._closed = False

    async def ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, says: bool = True,
        max_bytes: int = CONTROL_BYTES, keep: bool = True,
    ) -> Any:  # fmt: skip
        """Sends `body` as JSON -> the answer's JSON; None for an empty answer, or when what it `says` is of no
        interest. `keep`: the connection is used again, by this loop.

        Raises ServerLost, also for an answer of more than `max_bytes`, RequestRefused, and ConfigError when the server
        does not know who asks.
        """
        data = None if body is None else json.dumps(body).encode()
        answer = await self._good(method, path, data, JSON, (timeout_s, max_bytes, keep))
        try:
            return json.loads(answer.data) if says and answer.data else None
        except (ValueError, RecursionError) as error:  # neither text nor JSON, or lists in lists in lists
            raise ServerLost(f"{self.url}{path} answered something that is not JSON: {_shown(answer)!r}") from error

    async def exchange(self, path: str, body: bytes, kind: str, *, timeout_s: float, max_bytes: int) -> bytes:
        """Posts bytes of a content type -> the answer's bytes. Raises as `ask` does."""
        return (await self._good("POST", path, body, kind, (timeout_s, max_bytes, True))).data

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, says: bool = True,
        max_bytes: int = CONTROL_BYTES,
    ) -> Any:  # fmt: skip
        """Does as `ask`, and holds the thread until the answer is there. Not to be called where a loop runs."""
        asked = self.ask(method, path, body, timeout_s=timeout_s, says=says, max_bytes=max_bytes, keep=False)
        try:
            return asyncio.run(asked)
        except OSError as error:  # no descriptor is left for a loop
            asked.close()
            raise ServerLost(f"{self.url}{path}: {error}") from error

    def answers(self, path: str, *, timeout_s: float = CONNECT_S) -> bool:
        """Tells whether a GET gives a good answer now. It holds the thread."""
        try:
            self.call("GET", path, timeout_s=timeout_s)
        except (ServerLost, RequestRefused, ConfigError):
            return False
        return True

    def hang_up(self) -> None:
        """Breaks every connection: requests under way raise ServerLost, those that come make new ones. Any thread may
        call it.
        """
        with self._lock:
            calls, idle, self._idle = list(self._under_way), self._idle, []
        for call in calls:
            call.hang_up()
        for connection in idle:
            connection.end()

    def close(self) -> None:
        """Hangs up for good: later requests raise ServerLost too."""
        with self._lock:
            self._closed = True
        self.hang_up()

    async def _good(
        self, method: str, path: str, body: bytes | None, kind: str, terms: tuple[float, int, bool]
    ) -> HttpAnswer:
        """Returns an answer that says yes. `terms`: its time in seconds, its size in bytes, and whether the connection
        is kept.
        """
        headers = {**self._headers, "Content-Type": kind}
        request = self._address.request(method, path, headers, body, keep=terms[2])
        answer = await self._unless_hung_up(path, self._answer(path, request, *terms[:2]))
        if answer.status == 401:
            raise ConfigError(f"{self.url} {self._refused}")
        said = f"{self.url}{path} answered {answer.status}: {_shown(answer)}"
        if 400 <= answer.status < 500 and answer.status not in BUSY:
            raise RequestRefused(said)
        if not 200 <= answer.status < 300:
            raise ServerLost(said, retry_after_s=_retry_after_s(answer))
        return answer

    async def _unless_hung_up(self, path: str, work: Coroutine[Any, Any, HttpAnswer]) -> HttpAnswer:
        """Runs a request that `hang_up` ends."""
        call = _Call(asyncio.get_running_loop(), asyncio.ensure_future(work))
        with self._lock:
            closed = self._closed
            if not closed:
                self._under_way.add(call)
        if closed:
            call.task.cancel()
            raise ServerLost(f"{self.url}: this client of it was closed")
        try:
            return await call.task
        except asyncio.CancelledError:
            if call.hung_up:
                raise ServerLost(f"{self.url}{path}: the connection was broken off") from None
            raise
        finally:
            with self._lock:
                self._under_way.discard(call)

    async def _answer(self, path: str, request: Request, timeout_s: float, max_bytes: int) -> HttpAnswer:
        """Returns the answer to a request, whatever it says. Raises ServerLost."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._kept() or await self._connect(timeout_s)
                try:
                    answer, again = await connection.exchange(request, max_bytes)
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError as error:
            raise ServerLost(f"{self.url}{path}: no answer within {timeout_s:g} s") from error
        except TooLongError as error:
            said = f"{self.url}{path} answered more than {max_bytes} bytes: that is no answer to this"
            raise ServerLost(said) from error
        except (WireError, OSError, ValueError) as error:  # ValueError: a host's name that cannot be encoded
            raise ServerLost(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        if again:
            self._keep(connection)
        else:
            connection.close()
        return answer

    async def _connect(self, timeout_s: float) -> Connection:
        limit_s = min(CONNECT_S, timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                return await Connection.open(self._address)
        except TimeoutError as error:
            raise ServerLost(f"{self.url}: no connection within {limit_s:g} s") from error

    def _kept(self) -> Connection | None:
        """Takes a connection that waits to be used again, in this loop."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                self._idle = [each for each in self._idle if not each.loop.is_closed()]
                own = next((each for each in reversed(self._idle) if each.loop is loop), None)
                if own is None:
                    return None
                self._idle.remove(own)
            if own.expiry is not None:
                own.expiry.cancel()
            if own.usable:
                return own
            own.close()

    def _keep(self, connection: Connection) -> None:
        """Keeps a connection for a moment. Servers close theirs after five seconds, perhaps while a request is on its
        way.
        """
        with self._lock:
            closed = self._closed
            if not closed:
                self._idle.append(connection)
                connection.expiry = connection.loop.call_later(KEPT_S, self._drop, connection)
        if closed:
            connection.close()

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            if connection not in self._idle:
                return
            self._idle.remove(connection)
        connection.close()


class _Call:
    """A request under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Future[HttpAnswer]) -> None:
        self.task, self.hung_up = task, False
        self._loop = loop

    def hang_up(self) -> None:
        self.hung_up = True
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the request with it
            self._loop.call_soon_threadsafe(self.task.cancel)


def _retry_after_s(answer: HttpAnswer) -> float:
    """Returns how long a server asks to be left alone: by its header, if it has one in seconds."""
    told = answer.headers.get("retry-after", "")
    if told.isdecimal() and len(told) < 7:
        return float(told)
    return TOO_MANY_S if answer.status == 429 else 0.0


def _shown(answer: HttpAnswer) -> str:
    """Returns the beginning of an answer's text, in one line."""
    return " ".join(answer.data[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]
