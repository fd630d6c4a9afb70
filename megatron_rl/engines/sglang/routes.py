"""The route of an SGLang server for rollouts and scoring. It returns SGLang's response in binary form.

SGLang's response is JSON with a list for every token. Parsing this JSON takes seconds per million tokens. This
middleware moves the parsing from the driver to the server. The module runs inside the server and needs only numpy.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.engines.auth_middleware import Application, Message, Receive, Send
from megatron_rl.lib.frames import CONTENT_TYPE, Arrays, pack_parts

# PATH: route that this module adds to the server; OWN: SGLang's route to which requests to PATH are forwarded
PATH, OWN = "/megatron_rl/generate", "/generate"
# Arrays of log-probs. {name in the response: (name in SGLang's `meta_info`, whether each token has a list there)}
# If each token has a list, the log-prob is the first element of the list.
LOGPROBS = {
    # log-probs at the sampling temperature (1 for greedy completions), before truncation by top_k, top_p and min_p
    "scaled": ("output_token_logprobs", True),
    "drawn": ("output_token_sampling_logprobs", False),  # log-probs after truncation, if requested
    "prompt": ("input_token_logprobs", True),  # log-probs of the prompt's tokens, if requested; nan for the first token
}
# Key in `meta_info` of a list: the most likely tokens at each position of the prompt (null at the first position).
TOP = "input_top_logprobs"
# Keys of the most likely tokens at each position of the completion: their log-probs and their ids, as base64 of float32
# and int32, and the shape of both.
FLAT_TOP, FLAT_TOP_IDS = "output_top_logprobs_val_flat_b64", "output_top_logprobs_idx_flat_b64"
FLAT_SHAPE = "output_top_logprobs_shape"


class Framed:
    """An ASGI application that wraps SGLang's application. A request to PATH is forwarded to `/generate`, and SGLang's
    response is returned as a frame (frames.py).

    The frame has one part for each completion. Every part has the fields `finish_reason`, `stop_reason` and
    `weight_versions`, as in vLLM's route (engines/vllm/routes.py), and the int32 array `tokens`. A part has these
    float32 or int32 arrays only if the request asks for them:

    - the float32 arrays whose names are the keys of `LOGPROBS`;
    - `top_ids` int32 [T - 1, k], the ids of the k most likely tokens at each position of the prompt except the first,
      and `top` float32 [T - 1, k], the log-probs of these tokens. T is the length of the prompt. In a response to a
      request for completions, both arrays are [T, k] and belong to the T tokens of the completion.
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
            # The conversion runs in a separate thread, so that the server can process other requests meanwhile.
            content = await asyncio.to_thread(framed, content)
            headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def framed(answer: bytes) -> bytes:
    """Converts the body of SGLang's response to a frame (a binary message, see frames.py). Raises KeyError or TypeError
    if the response is malformed.
    """
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
        if FLAT_TOP in about:
            for name, key, kind in (("top", FLAT_TOP, np.float32), ("top_ids", FLAT_TOP_IDS, np.int32)):
                own[name] = np.frombuffer(base64.b64decode(about[key]), kind).reshape(about[FLAT_SHAPE])
        reason, spans = about.get("finish_reason") or {}, about.get("weight_versions") or ()
        versions = [[span["start"], span["version"]] for span in spans]
        told = {"finish_reason": reason.get("type"), "stop_reason": reason.get("matched"), "weight_versions": versions}
        parts.append((told, own))
    return bytes(pack_parts(parts))


def _numbers(told: Sequence[Any], listed: bool) -> np.ndarray:
    """Converts T numbers of a response to a float32 array [T]. null becomes nan. `told`: the numbers in the response.
    `listed`: whether `told` has T lists, of which the first element is the number.
    """
    numbers = [entry[0] for entry in told] if listed else told
    return np.array(numbers, object).astype(np.float32)
