"""The route of an SGLang server that rollouts are asked of and scored by: SGLang's own answer, as bytes.

SGLang answers in JSON with a list for every token, which costs its reader seconds per million tokens. This middleware
takes that work from the driver to the server. Runs inside the server: it needs numpy alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.engines.auth_middleware import Application, Message, Receive, Send
from megatron_rl.frames import CONTENT_TYPE, pack

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

    The frame tells of each completion its `lengths` by array, its `finish_reason` and its `weight_versions`. The
    arrays have those of all completions one after the other: `tokens` int32 and, as far as asked for, the float32 of
    `LOGPROBS`, and of the likeliest tokens at each place of the prompt but the first `top` float32 [T - 1, k], their
    log-probs, and `top_ids` int32.
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
    """Turns SGLang's answer into a frame. Raises KeyError or TypeError for one that is not SGLang's."""
    said = json.loads(answer)
    found, about = dict[str, list[np.ndarray]](), []
    for each in said if isinstance(said, list) else [said]:
        own: dict[str, np.ndarray] = {"tokens": np.array(each["output_ids"], np.int32)}
        for name, (theirs, listed) in LOGPROBS.items():
            if theirs in each["meta_info"]:
                own[name] = _numbers(each["meta_info"][theirs] or [], listed)
        if places := (each["meta_info"].get(TOP) or [])[1:]:
            own["top"] = np.array([[entry[0] for entry in place] for place in places], np.float32)
            own["top_ids"] = np.array([[entry[1] for entry in place] for place in places], np.int32)
        for name, array in own.items():
            found.setdefault(name, []).append(array)
        lengths = {name: len(array) for name, array in own.items()}
        about.append({"lengths": lengths} | {name: each["meta_info"].get(name) for name in ABOUT})
    return bytes(pack(about, {name: np.concatenate(arrays) for name, arrays in found.items()}))


def parts(about: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the arrays of each completion of a frame. Raises KeyError or ValueError for lengths that do not fit."""
    out: list[dict[str, np.ndarray]] = [{} for _ in about]
    for name, array in arrays.items():
        begin = 0
        for own, each in zip(out, about, strict=True):
            end = begin + each["lengths"].get(name, 0)
            own[name], begin = array[begin:end].copy(), end  # without the rest of the answer, and writable
        if begin != len(array):
            raise ValueError(f"{len(array)} {name} for completions of {begin}")
    return out


def _numbers(told: Sequence[Any], listed: bool) -> np.ndarray:
    """Returns [T] float32 of [T] numbers, or of [T] lists that begin with one; null becomes nan."""
    numbers = [entry[0] for entry in told] if listed else told
    return np.array(numbers, object).astype(np.float32)
