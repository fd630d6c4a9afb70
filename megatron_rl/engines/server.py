"""What the pool needs of one server of rollouts, and the ways in which it can fail; HTTP that tells these apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import httpx

from megatron_rl.config import ConfigError
from megatron_rl.engines.base import Completion, Sampling
from megatron_rl.engines.guard import HEADER

CONNECT_S = 5.0
CONTROL_S = 60.0  # a control route's answer
SHOWN = 400  # characters of a server's error text


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

    def join(self, host: str, port: int, replica: int) -> None:
        """Takes a seat at the trainer's refit board."""
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


class Http:
    """JSON over HTTP to one server, with the job's token."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        self._client = httpx.Client(base_url=self.url, headers={HEADER: token}, limits=limits, trust_env=False)

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, says: bool = True) -> Any:
        """The answer's JSON, None for an empty one, or when what it `says` is of no interest. Raises ServerLost, RequestRefused, and
        ConfigError for a wrong token."""
        try:
            timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
            answer = self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise ServerLost(f"{self.url}{path}: no answer within {timeout_s:.0f} s") from error
        except httpx.TransportError as error:
            raise ServerLost(f"{self.url}{path}: {error or type(error).__name__}") from error
        if answer.status_code == 401:
            raise ConfigError(f"{self.url} refuses the job's token: was it started by another run?")
        if answer.status_code >= 500:
            raise ServerLost(f"{self.url}{path} answered {answer.status_code}: {answer.text[:SHOWN]}")
        if answer.status_code >= 400:
            raise RequestRefused(f"{self.url}{path} answered {answer.status_code}: {answer.text[:SHOWN]}")
        try:
            return answer.json() if says and answer.content else None
        except json.JSONDecodeError as error:
            raise ServerLost(f"{self.url}{path} answered something that is not JSON: {answer.text[:SHOWN]!r}") from error

    def answers(self, path: str, *, timeout_s: float = CONNECT_S) -> bool:
        """Whether a GET gives a good answer now."""
        try:
            self.call("GET", path, timeout_s=timeout_s)
        except (ServerLost, RequestRefused):
            return False
        return True

    def close(self) -> None:
        self._client.close()
