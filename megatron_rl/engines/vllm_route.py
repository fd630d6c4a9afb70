"""The route of a vLLM server that rollouts are asked of: tokens in, tokens and their log-probs out.

vLLM has such a route (`/inference/v1/generate`). What the web layer around it costs (validation, an object for every token, metrics of
routes) is more than the engine's own work for short completions of a small model (docs/benchmarks.md), so this one goes past it to the
engine client, which is public and does its own checks. It is
middleware, an extension point of vLLM's: `--middleware`. Runs inside the server: torch and the rest of this project are not imported.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

from megatron_rl.engines.guard import Application, Message, Receive, Send

PATH = "/megatron_rl/generate"
_log = logging.getLogger("vllm.megatron_rl.route")  # below vLLM's, which writes


class Generate:
    """An ASGI application around another: answers PATH, hands on what else comes.

    Body: `{"token_ids": [...], "sampling_params": {...}}`, vLLM's names. Answer: `{"choices": [...]}`, one for each of the n samples:
    `index`, `token_ids`, `logprobs` of the sampled tokens (null when not asked for), `finish_reason`, `stop_reason`, `weight_versions` as
    `[first token, version]`, `routed_experts` (null, or an .npy file in base64). Status 400 for what the engine refuses.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            return await self._app(scope, receive, send)
        body = await _read(receive)
        if body is None:
            return None
        work = asyncio.create_task(self._answer(scope["app"].state.engine_client, body))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None  # nobody waits for it: cancelled, the engine drops the request
        finally:
            gone.cancel()
            work.cancel()
        status, answer = work.result()
        content = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, engine: Any, body: bytes) -> tuple[int, Any]:
        """-> status, and what the answer says."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        try:
            asked = json.loads(body)
            params = SamplingParams(
                **asked["sampling_params"], output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True
            )
            prompt = tokens_input(asked["token_ids"])
        except (KeyError, TypeError, ValueError, VLLMClientError) as error:
            return _error(400, error)
        try:
            (result,) = [result async for result in engine.generate(prompt, params, f"rollout-{next(self._numbers)}")]
        except VLLMClientError as error:
            return _error(400, error)
        except Exception as error:  # whatever it is, the client must hear of it
            _log.exception("a request for rollouts failed")
            return _error(500, error.__cause__ or error)  # vLLM's own wrapper has no text
        if any(output.finish_reason == "error" for output in result.outputs):
            _log.error("the engine ended request %s with an error", result.request_id)
            return 500, {"error": "the engine ended the request with an error: see the server's log"}
        return 200, {"choices": [_choice(output) for output in result.outputs]}


def _error(status: int, error: BaseException) -> tuple[int, Any]:
    return status, {"error": f"{type(error).__name__}: {error}"}


def _choice(output: Any) -> dict[str, Any]:
    from vllm.utils.serial_utils import numpy2base64

    return {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "logprobs": None if output.logprobs is None else list(output.logprobs.logprobs),  # one a token: `logprobs` is 0
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "weight_versions": [[span.start, span.version] for span in output.weight_versions or []],
        "routed_experts": None if output.routed_experts is None else numpy2base64(output.routed_experts),
    }


async def _read(receive: Receive) -> bytes | None:
    """A request's body, None when whoever sent it is gone."""
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
