"""The routes of a vLLM server that rollouts are asked of and scored by: tokens in, tokens and log-probs out, as bytes.

vLLM has such a route (`/inference/v1/generate`). What the web layer around it costs (validation, an object for every
token, metrics of routes) is more than the engine's own work for short completions of a small model
(docs/benchmarks.md), so these go past it to the engine client, which is public and does its own checks. They are
middleware, an extension point of vLLM's: `--middleware`. Runs inside the server: torch and the rest of this project are
not imported.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import numpy as np

from megatron_rl.engines.auth_middleware import Application, Message, Receive, Send
from megatron_rl.frames import CONTENT_TYPE, Arrays, pack, pack_parts, unpack

PATH, SCORE_PATH = "/megatron_rl/generate", "/megatron_rl/score"
_log = logging.getLogger("vllm.megatron_rl.route")  # below vLLM's, which writes
Answer = tuple[int, bytes]  # status, and a frame (200) or an error as JSON


class Routes:
    """An ASGI application around another: answers PATH and SCORE_PATH, hands on what else comes. Bodies are frames
    (frames.py).

    PATH takes `tokens` int32 [T], the prompt, with vLLM's sampling parameters, and with `lora`, the name, number,
    directory and version of the adapter to compute with, if there is one. Each sample is a part of the answer, with
    `finish_reason`, `stop_reason` and `weight_versions` as [first token, version], and with the arrays `tokens` int32,
    `logprobs` float32 when asked for, and `experts` int16 [rows, layers, k] when the server returns them.

    SCORE_PATH takes `tokens` of sequences one after the
    other, their `lengths` and `top_k`, a number k, and `lora`; it answers with `logprobs` float32 [tokens, 1 + k] in
    the same order, those of the model at temperature 1, of the token and of the k likeliest at its place, and with
    `ids` int32 [tokens, k], which these are; 0 for the first of each. Status 400 for what the engine refuses.
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
                return None  # nobody waits for it: cancelled, the engine drops the request
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
        adapter = parameters.pop("lora", None)
        result = await self._ask(engine, tokens.tolist(), parameters, adapter)
        parts = [_told(output) for output in sorted(result.outputs, key=lambda output: output.index)]
        if adapter is not None:  # vLLM tells the version of the model, which stays
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
        """Returns the log-probs [T, 1 + k] of a token and of the likeliest at its place, and the ids [T, k] of these.

        The last token is not part of the prompt, so that a sequence may fill the context: it is one of the tokens whose
        log-probs the one draw tells. A draw that tells those of named tokens does not tell the likeliest: another does,
        which finds its prompt in the cache.
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
            top = result.outputs[0].logprobs  # the drawn token's first
            logprobs[-1], ids[-1] = top.logprobs, top.token_ids
        logprobs[-1, 0] = drawn.logprobs[drawn.token_ids.index(last)]
        return logprobs, ids[:, 1:]

    async def _ask(self, engine: Any, prompt: list[int], parameters: dict[str, Any], adapter: list[Any] | None) -> Any:
        """Returns vLLM's RequestOutput. Raises _Refused, and what the engine raises."""
        # pyright takes the folder of this file for the library.
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
            (result,) = [
                one async for one in engine.generate(inputs, params, f"rollout-{next(self._numbers)}", lora_request=own)
            ]
        except VLLMClientError as error:
            raise _Refused(f"{type(error).__name__}: {error}") from error
        if any(output.finish_reason == "error" for output in result.outputs):
            raise RuntimeError(f"the engine ended request {result.request_id} with an error: see the server's log")
        return result


class _Refused(Exception):
    """The request is wrong; the message says why."""


async def _answer(verb: Any) -> Answer:
    """Awaits what a verb gives -> the answer, also of one that fails: the client must hear of it, whatever it is."""
    try:
        return 200, await verb
    except _Refused as error:
        return 400, _error(str(error))
    except Exception as error:
        _log.exception("a request for rollouts failed")
        cause = error.__cause__ or error  # vLLM's own wrapper has no text
        return 500, _error(f"{type(cause).__name__}: {cause}")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def _unpacked(body: bytes) -> tuple[Any, np.ndarray]:
    """Returns what a request's frame says about its tokens, and these. Raises _Refused."""
    try:
        about, arrays = unpack(body)
        return about, arrays["tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise _Refused(f"{type(error).__name__}: {error}") from error


def _told(output: Any) -> tuple[dict[str, Any], Arrays]:
    """Returns what an answer says of one sample, and the sample's arrays."""
    arrays: Arrays = {"tokens": np.array(output.token_ids, np.int32)}
    if output.logprobs is not None:  # one a token: `logprobs` is 0
        arrays["logprobs"] = np.array(output.logprobs.logprobs, np.float32)
    if output.routed_experts is not None:
        arrays["experts"] = np.asarray(output.routed_experts).astype(np.int16)
    about = {
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "weight_versions": [[span.start, span.version] for span in output.weight_versions or []],
    }
    return about, arrays


async def _read(receive: Receive) -> bytes | None:
    """Returns a request's body, None when whoever sent it is gone."""
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
