"""The routes of a vLLM server for rollouts and scoring. A request contains tokens. The response contains tokens and
log-probs in binary form.

vLLM has a similar route (`/inference/v1/generate`). For short completions of a small model, vLLM's web layer
(validation, an object for every token, metrics of routes) costs more than the engine itself
(docs/experiments/benchmarks.md). Therefore, the routes of this module call vLLM's public engine client, which checks
requests too. The routes are installed as middleware, one of vLLM's extension points (`--middleware`). The module runs
inside the server. It does not import torch, and imports only auth_middleware.py and frames.py of this project.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import numpy as np

from megatron_rl.engines.auth_middleware import Application, Message, Receive, Send
from megatron_rl.lib.frames import CONTENT_TYPE, Arrays, pack, pack_parts, unpack

PATH, SCORE_PATH = "/megatron_rl/generate", "/megatron_rl/score"
# A child of vLLM's logger, so that vLLM's log handlers write its messages.
_log = logging.getLogger("vllm.megatron_rl.route")
Answer = tuple[int, bytes]  # HTTP status, and the body: a frame if the status is 200, otherwise an error as JSON


class Routes:
    """An ASGI application that wraps another application. It handles requests to PATH and SCORE_PATH, and forwards all
    other requests. The bodies of requests and responses are frames (binary messages, see frames.py).

    A request to PATH has the prompt `tokens` int32 [T], vLLM's sampling parameters, and optionally `priority` and
    `lora`. If the server has `--scheduling-policy priority`, requests with a lower `priority` are served first. `lora`
    is the name, id, directory and version of a LoRA adapter. Each sample is a part of the response, with
    `finish_reason`, `stop_reason` and `weight_versions` as [first token, version], and with these arrays:

    - `tokens` int32 [T];
    - `logprobs` float32 [T] if the request has `logprobs`;
    - `top_ids` int32 [T, k] and `top` float32 [T, k], the k most likely tokens at each position and their log-probs, if
      the request's `logprobs` is k above 0. A log-prob is -inf if the sampling parameters remove the token;
    - `experts` int16 [rows, layers, k] if the server returns them.

    A request to SCORE_PATH has the concatenated `tokens` of several sequences, their `lengths`, `top_k` (an integer k),
    and optionally `lora`. The response has `logprobs` float32 [tokens, 1 + k] in the same order: the log-prob at
    temperature 1 of the token and of the k most likely tokens at its position. `ids` int32 [tokens, k] are the k most
    likely tokens. Both arrays are 0 for the first token of each sequence.

    The HTTP status is 400 if the engine refuses a request.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (PATH, SCORE_PATH):
            return await self._app(scope, receive, send)
        body = await _read(receive)
        if body is None:
            return None
        verb = self._generate if scope["path"] == PATH else self._score
        work = asyncio.create_task(_answer(verb(scope["app"].state.engine_client, body)))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None  # The client has disconnected. The task is cancelled, so that the engine drops the request.
        finally:
            gone.cancel()
            work.cancel()
        status, content = work.result()
        kind = CONTENT_TYPE if status == 200 else "application/json"
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _generate(self, engine: Any, body: bytes) -> bytes:
        parameters, tokens = _unpacked(body)
        adapter, priority = parameters.pop("lora", None), parameters.pop("priority", 0)
        result = await self._ask(engine, tokens.tolist(), parameters, adapter, priority)
        parts = [_told(output) for output in sorted(result.outputs, key=lambda output: output.index)]
        # vLLM reports the version of the unchanging base model: replace it by the version of the adapter.
        if adapter is not None:
            for about, _ in parts:
                about["weight_versions"] = [[0, adapter[3]]]
        return bytes(pack_parts(parts))

    async def _score(self, engine: Any, body: bytes) -> bytes:
        asked, tokens = _unpacked(body)
        sequences, k = np.split(tokens, np.cumsum(asked["lengths"])[:-1]), asked["top_k"]
        scores = await asyncio.gather(
            *(self._score_one(engine, sequence.tolist(), k, asked.get("lora")) for sequence in sequences)
        )
        logprobs = np.concatenate([np.empty((0, 1 + k), np.float32), *(own for own, _ in scores)])
        ids = np.concatenate([np.empty((0, k), np.int32), *(own for _, own in scores)])
        return bytes(pack(None, {"logprobs": logprobs, "ids": ids}))

    async def _score_one(
        self, engine: Any, tokens: list[int], k: int, adapter: list[Any] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log-probs [T, 1 + k] of each token and of the k most likely tokens at its position, and the ids
        [T, k] of the most likely tokens.

        The prompt of the request is the sequence without its last token, so that a sequence may fill the context. The
        request samples one token, and asks for the log-prob of the sequence's last token at the sampled position by
        token id. A request with token ids does not return the most likely tokens at the sampled position, so a second
        request asks for them. vLLM has the prompt of the second request in the prefix cache.
        """
        logprobs, ids = np.zeros((len(tokens), 1 + k), np.float32), np.zeros((len(tokens), 1 + k), np.int32)
        if len(tokens) < 2:
            return logprobs, ids[:, 1:]
        *prompt, last = tokens
        asked = {"max_tokens": 1, "detokenize": False}
        result = await self._ask(engine, prompt, asked | {"prompt_logprobs": k, "logprob_token_ids": [last]}, adapter)
        drawn, told = result.outputs[0].logprobs, result.prompt_logprobs
        if len(told.logprobs) != (len(prompt) - 1) * (1 + k) or last not in drawn.token_ids:
            raise RuntimeError(f"the engine told {len(told.logprobs)} log-probs of a prompt of {len(prompt)} tokens")
        logprobs[1:-1], ids[1:-1] = (np.reshape(part, (-1, 1 + k)) for part in (told.logprobs, told.token_ids))
        if k:
            result = await self._ask(engine, prompt, asked | {"logprobs": k}, adapter)
            top = result.outputs[0].logprobs  # the sampled token's entry comes first
            logprobs[-1], ids[-1] = top.logprobs, top.token_ids
        logprobs[-1, 0] = drawn.logprobs[drawn.token_ids.index(last)]
        return logprobs, ids[:, 1:]

    async def _ask(
        self, engine: Any, prompt: list[int], parameters: dict[str, Any], adapter: list[Any] | None, priority: int = 0
    ) -> Any:
        """Runs a request in vLLM's engine and returns the RequestOutput. Raises _Refused for a request that vLLM
        refuses, RuntimeError for a request that ended with an error, and other exceptions of the engine.
        """
        # pyright resolves `vllm` to the folder of this file instead of the library.
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        try:
            params = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)
            inputs = tokens_input(prompt)
            own = None if adapter is None else LoRARequest(*adapter[:3])
        except (TypeError, ValueError, VLLMClientError) as error:
            raise _Refused(f"{type(error).__name__}: {error}") from error
        try:
            name = f"rollout-{next(self._numbers)}"
            answers = engine.generate(inputs, params, name, lora_request=own, priority=priority)
            (result,) = [one async for one in answers]
        except VLLMClientError as error:
            raise _Refused(f"{type(error).__name__}: {error}") from error
        if any(output.finish_reason == "error" for output in result.outputs):
            raise RuntimeError(f"the engine ended request {result.request_id} with an error: see the server's log")
        return result


class _Refused(Exception):
    """Raised when a request is invalid. The message states the reason."""


async def _answer(verb: Any) -> Answer:
    """Awaits the coroutine that handles a request. Returns (HTTP status, body). An exception becomes a response with
    status 400 or 500, so that the client gets every error message.
    """
    try:
        return 200, await verb
    except _Refused as error:
        return 400, _error(str(error))
    except Exception as error:
        _log.exception("a request for rollouts failed")
        cause = error.__cause__ or error  # vLLM's wrapper exception has no text
        return 500, _error(f"{type(cause).__name__}: {cause}")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def _unpacked(body: bytes) -> tuple[Any, np.ndarray]:
    """Returns the JSON description and the tokens in the frame of a request. Raises _Refused if the frame is
    invalid.
    """
    try:
        about, arrays = unpack(body)
        return about, arrays["tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise _Refused(f"{type(error).__name__}: {error}") from error


def _told(output: Any) -> tuple[dict[str, Any], Arrays]:
    """Converts one sample of vLLM to the JSON description and the arrays that the response contains for it."""
    arrays: Arrays = {"tokens": np.array(output.token_ids, np.int32)}
    if output.logprobs is not None:
        # the request has `logprobs` = k: vLLM returns 1 + k entries per token, first the entry of the sampled token
        rows = max(1, len(output.token_ids)), -1
        logprobs = np.array(output.logprobs.logprobs, np.float32).reshape(rows)
        arrays["logprobs"] = logprobs[: len(output.token_ids), 0] if logprobs.size else np.empty(0, np.float32)
        if logprobs.shape[1] > 1:
            arrays["top"] = logprobs[:, 1:]
            arrays["top_ids"] = np.array(output.logprobs.token_ids, np.int32).reshape(rows)[:, 1:]
    if output.routed_experts is not None:
        arrays["experts"] = np.asarray(output.routed_experts).astype(np.int16)
    about = {
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "weight_versions": [[span.start, span.version] for span in output.weight_versions or []],
    }
    return about, arrays


async def _read(receive: Receive) -> bytes | None:
    """Returns the body of a request, or None if the client has disconnected."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
