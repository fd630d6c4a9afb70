"""Answers of servers: changed at random, they give completions that make sense, or are the server's failure."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
from fuzzing import Tally, tally
from toys import characters

from megatron_rl.config.schema import EndpointConfig
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.openai import OpenAiServer
from megatron_rl.engines.protocol import Completion, EngineError, Sampling
from megatron_rl.engines.sglang.client import SglangServer
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.lib.frames import pack

VOCAB, ROOM = 97, 6
ODD = [
    None,
    True,
    -1,
    97,
    2**40,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    0.5,
    "",
    "x",
    "²",
    [],
    [[]],
    {},
    [None],
    {"a": 1},
]
SAMPLINGS = [
    Sampling(max_tokens=ROOM),
    Sampling(max_tokens=ROOM, temperature=0.0),
    Sampling(max_tokens=ROOM, n=2, top_k=5),
]
PROMPT = np.array([1, 2, 3], np.int32)


def fuzz(seed: int, count: int) -> Tally:
    """Tries answers at the clients of vLLM, SGLang and OpenAI-compatible endpoints."""
    tokenizer = characters()
    clients = {
        "vllm": VllmServer("http://nobody", "t", Vllm(), 1, ModelFacts(ends=frozenset({7}), vocab=VOCAB)),
        "sglang": SglangServer("http://nobody", "t", Sglang(), 1, ModelFacts(ends=frozenset({7}), vocab=VOCAB)),
        "endpoint": OpenAiServer(EndpointConfig(url="http://nobody", model="m"), tokenizer, ends={7}, key=None),
    }
    return tally(seed, count, lambda rng: one(rng, *rng.choice([*clients.items()])))


def one(rng: random.Random, kind: str, client: Any) -> str:
    """Tries one answer, or one of the answers that a client asks for before it."""
    sampling = rng.choice(SAMPLINGS)

    async def told(method: str, path: str, *_: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, answer(rng, kind, path, sampling)

    client._http._answer = told
    client._known = client._context = None  # what it learned of a server, by kind
    try:
        if rng.random() < 0.25:
            found = asyncio.run(client.score([PROMPT], 2 if rng.random() < 0.5 else 0, timeout_s=1.0))
            assert all(np.isfinite(score.logprobs).all() and (score.logprobs <= 1e-3).all() for score in found)
            assert all(((score.ids >= 0) & (score.ids < 1024)).all() for score in found)
            return f"{kind} scored"
        found = asyncio.run(client.generate(PROMPT, sampling, seed=1, timeout_s=1.0))
    except (ServerLost, EngineError, RequestRefused) as error:
        return f"{kind} {type(error).__name__}"
    except ValueError as error:
        if "SGLang tells the log-probs" in str(error):  # the server said that it knows few
            return f"{kind} ValueError"
        raise
    assert len(found) == sampling.n
    for completion in found:
        check(completion, 1024 if kind == "endpoint" else VOCAB)
    return f"{kind} taken"


def check(completion: Completion, vocab: int) -> None:
    """Asserts that a completion makes sense."""
    tokens, logprobs = completion.tokens, completion.logprobs
    assert len(tokens) == len(logprobs) <= ROOM and ((tokens >= 0) & (tokens < vocab)).all()
    told = logprobs[~np.isnan(logprobs)] if np.isnan(logprobs).all() else logprobs  # nan throughout: not known
    assert (told <= 1e-3).all() and not np.isinf(told).any()
    assert all(type(number) is int for span in completion.versions for number in span)


def answer(rng: random.Random, kind: str, path: str, sampling: Sampling) -> bytes:
    """Returns an answer to a path, mostly changed."""
    if rng.random() < 0.05:
        return rng.choice([b"", b"{", b"[" * 5000, rng.randbytes(40), b"null", b"\xff\xff\xff\xff{}"])
    made = right(kind, path, sampling)
    arrays = {}
    if isinstance(made, tuple):
        made, arrays = made
    for _ in range(rng.choice([0, 1, 1, 2])):
        if arrays and rng.random() < 0.4:
            name = rng.choice([*arrays])
            arrays[name] = spoil(rng, arrays[name])
        else:
            made = changed(rng, made)
    try:
        return pack(made, arrays) if arrays else json.dumps(made).encode()
    except (TypeError, ValueError, KeyError):
        return b"{}"


def spoil(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """Returns an array with another length, kind, shape or value."""
    if rng.random() < 0.4 or not array.size:
        other = (
            array[:-1],
            np.concatenate([array, array]),
            array[:, None],
            array.astype(np.int16),
            array.astype(np.float32),
        )
        return rng.choice(other)
    array = array.copy()
    array.flat[rng.randrange(array.size)] = rng.choice(
        [-1, 97, 30000, 1] if array.dtype.kind == "i" else [np.nan, np.inf, 1, -np.inf]
    )
    return array


def changed(rng: random.Random, value: Any) -> Any:
    """Returns JSON with one of its parts replaced or left out."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
        copy = value.copy()
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = changed(rng, value[key])
        return copy
    return rng.choice(ODD)


def right(kind: str, path: str, sampling: Sampling) -> Any:
    """Returns a correct answer of a kind of server: JSON, or what a frame tells with its arrays."""
    n = 1 if sampling.temperature == 0 else sampling.n
    if path == "/v1/models":
        return {"data": [{"id": "m", "max_model_len": 100}]}
    if path == "/server_info":
        return {
            "tp_size": 1,
            "max_req_input_len": 90,
            "sampling_mask_max_tokens": 50,
            "enable_deterministic_inference": True,
        }
    tokens, logprobs = np.arange(4, dtype=np.int32), np.full(4, -0.5, np.float32)
    if kind == "vllm" and "score" in path:
        k = 2
        return None, {"logprobs": np.zeros((3, 1 + k), np.float32), "ids": np.ones((3, k), np.int32)}
    if kind == "vllm":
        about = {
            "finish_reason": "length",
            "stop_reason": None,
            "weight_versions": [[0, "3"]],
        }
        return [about] * n, named(n, {"tokens": tokens, "logprobs": logprobs})
    if kind == "sglang":
        about = {"finish_reason": "length", "stop_reason": None, "weight_versions": [[0, "3"]]}
        top = {"top": np.full((2, 2), -0.5, np.float32), "top_ids": np.ones((2, 2), np.int32)}
        told = {"tokens": tokens, "scaled": logprobs, "drawn": logprobs, "prompt": np.full(3, -0.5, np.float32)}
        return [about] * n, named(n, told | top)
    choice = {"index": 0, "text": "ab", "finish_reason": "stop", "stop_reason": None, "token_ids": [1, 2]}
    choice |= {"logprobs": {"token_logprobs": [-0.5, -1.5], "top_logprobs": [{"token_id:4": -1.0}] * 3}}
    return {"choices": [choice | {"index": i} for i in range(n)]}


def named(n: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of n equal completions, as the parts of a frame name them."""
    return {f"{number}/{name}": array for number in range(n) for name, array in arrays.items()}
