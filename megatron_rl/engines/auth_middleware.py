"""ASGI middleware that rejects requests without the job's token. Only the health check routes are open.

The module runs inside the server (vLLM's `--middleware`), so it imports only the standard library and a
module that does so too.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from megatron_rl.lib.regular_files import read_own

# Name of the environment variable with the path of the token file. Only the owner of the token file may read the file.
TOKEN_FILE = "MEGATRON_RL_TOKEN_FILE"
HEADER = "x-megatron-rl-token"
OPEN = frozenset({"/health", "/ping"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application that wraps another application and checks the token of each request.

    The constructor raises KeyError, OSError or ValueError if there is no token, and UntrustedFile if another user owns
    the token file or if it is a link. A server therefore never starts unprotected by mistake.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._token = read_own(Path(os.environ[TOKEN_FILE])).strip().encode()
        if not self._token:
            raise ValueError(f"{os.environ[TOKEN_FILE]} is empty: it must hold the job's token")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope.get("headers", ()) if name == HEADER.encode()]
        knows = len(given) == 1 and hmac.compare_digest(given[0], self._token)
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or knows:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "wrong or missing token"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
