"""The route of an SGLang server that rollouts are asked of and scored by: SGLang's own answer, as bytes.

SGLang answers in JSON with a list for every token, which costs its reader seconds per million tokens. This middleware
takes that work from the driver to the server. Runs inside the server: it needs numpy alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.engines.auth_middleware import Application, Message, Receive, Send
from megatron_rl.frames import CONTENT_TYPE, Arrays, pack_parts

PATH, OWN = "/megatron_rl/generate", "/generate"  # ours, and SGLang's own
# Names in a frame -> names in SGLang's `meta_info`, and whether each token has a list of its own there.
LOGPROBS = {
    "scaled": ("output_token_logprobs", True),  # after temperature, before truncation; of greedy answers at 1
    "drawn": ("output_token_sampling_logprobs", False),  # after truncation, when asked for
    "prompt": ("input_token_logprobs", True),  # of the prompt's tokens, when asked for; nan for the first
}
TOP = "input_top_logprobs"  # in `meta_info`: at each place of the prompt the likeliest tokens, null at the first
ABOUT = ("finish_reason", "weight_versions")  # what else is handed on of `meta_info`


class Framed:
    """An ASGI application around SGLang's: what is posted to PATH goes to `/generate`, its answer is sent as a frame.

    Each completion is a part of the frame: its `finish_reason` and `weight_versions`, and the arrays `tokens` int32
    and, as far as asked for, the float32 of `LOGPROBS`, and of the likeliest tokens at each position of the prompt but
    the first `top` float32 [T - 1, k], their log-probs, and `top_ids` int32.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            return await self._app(scope, receive, send)
        status, headers, parts = 500, [], list[bytes]()

        async def keep(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], message.get("headers", [])
            else:
                parts.append(message.get("body", b""))

        await self._app({**scope, "path": OWN, "raw_path": OWN.encode()}, receive, keep)
        content = b"".join(parts)
        if status == 200:
            content = await asyncio.to_thread(framed, content)  # other requests go on meanwhile
            headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def framed(answer: bytes) -> bytes:
    """Turns SGLang's answer into a frame. Raises KeyError or TypeError for an answer of another shape."""
    said, parts = json.loads(answer), []
    for each in said if isinstance(said, list) else [said]:
        about = each["meta_info"]
        own: Arrays = {"tokens": np.array(each["output_ids"], np.int32)}
        for name, (theirs, listed) in LOGPROBS.items():
            if theirs in about:
                own[name] = _numbers(about[theirs] or [], listed)
        if places := (about.get(TOP) or [])[1:]:
            own["top"] = np.array([[entry[0] for entry in place] for place in places], np.float32)
            own["top_ids"] = np.array([[entry[1] for entry in place] for place in places], np.int32)
        parts.append(({name: about.get(name) for name in ABOUT}, own))
    return bytes(pack_parts(parts))


def _numbers(told: Sequence[Any], listed: bool) -> np.ndarray:
    """Returns [T] float32 of [T] numbers, or of [T] lists that begin with one; null becomes nan."""
    numbers = [entry[0] for entry in told] if listed else told
    return np.array(numbers, object).astype(np.float32)
