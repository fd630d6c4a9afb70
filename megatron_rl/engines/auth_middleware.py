"""Middleware in front of an engine's own routes: who has not the job's token gets nothing but the health check.

Runs inside the server (vLLM's `--middleware`), so it imports the standard library alone.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TOKEN_FILE = (
    "MEGATRON_RL_TOKEN_FILE"  # environment variable of the server: where the token stands, readable by its owner alone
)
HEADER = "x-megatron-rl-token"
OPEN = frozenset({"/health", "/ping"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application around another. Raises KeyError or OSError at start when there is no token, or another user
    wrote it: a server is never open by mistake.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        with Path(os.environ[TOKEN_FILE]).open("rb") as file:
            if (owner := os.fstat(file.fileno()).st_uid) not in (os.geteuid(), 0):
                raise PermissionError(f"{os.environ[TOKEN_FILE]} belongs to user {owner}: remove it")
            self._token = file.read().strip()
        if not self._token:
            raise ValueError(f"{os.environ[TOKEN_FILE]} is empty: it must hold the job's token")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "wrong or missing token"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Message) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == HEADER.encode()]
        return len(given) == 1 and hmac.compare_digest(given[0], self._token)
