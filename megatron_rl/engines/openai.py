"""An engine that uses any OpenAI-compatible endpoint. Prompts are sent to /v1/completions, as token ids if the endpoint
accepts them.

The settings `roles.NAME.endpoint` describe how endpoints differ. The run never changes the weights of the endpoint's
model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import ConfigError, EndpointConfig
from megatron_rl.engines import response_parsing, sampling_seeds
from megatron_rl.engines.http import RequestRefused
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import ServerEngine, given
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, TopScores, empty
from megatron_rl.engines.server import Server
from megatron_rl.types import Stop

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
# Names under which /v1/models may report the context length.
CONTEXT_NAMES = ("max_model_len", "context_length", "max_context_length")
TOKEN_ID = "token_id:"  # prefix of a token's id if the endpoint reports tokens as ids (`return_tokens_as_token_ids`)
# Upper bound of a model's vocabulary size: the size of the tokenizer, rounded up to a multiple of this number.
VOCAB_MULTIPLE = 1024


def open_endpoint(
    role: str, endpoint: EndpointConfig, tokenizer: Any, *, ends: Collection[int], environment: Mapping[str, str]
) -> ServerEngine:
    """Returns an engine that sends the requests of a role to an OpenAI-compatible endpoint.

    `tokenizer`: the tokenizer of the endpoint's model.
    `ends`: the end-of-sequence tokens of the model.

    Raises ConfigError if the API key is missing.
    """
    limits = Limits(
        servers=1, at_once=endpoint.at_once, attempts=endpoint.attempts, request_timeout_s=endpoint.request_timeout_s
    )
    return given(role, [OpenAiServer(endpoint, tokenizer, ends=ends, key=api_key(endpoint, environment))], limits)


def api_key(endpoint: EndpointConfig, environment: Mapping[str, str]) -> str | None:
    """Returns the endpoint's API key, or None if the settings name no key. Raises ConfigError if the key file or the
    environment variable that the settings name cannot be read.
    """
    if endpoint.key_file is not None:
        try:
            return Path(endpoint.key_file).expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"key_file = {endpoint.key_file}: {error.strerror}; write the API key there") from error
    if endpoint.key_variable is None:
        return None
    if not environment.get(endpoint.key_variable):
        raise ConfigError(f"key_variable = {endpoint.key_variable}: there is no such environment variable; export it")
    return environment[endpoint.key_variable].strip()


class OpenAiServer(Server):
    """A client of an OpenAI-compatible endpoint. Verified with the OpenAI-compatible server of vLLM 0.32.

    If a response has no token ids, the text of the response is tokenized, and the log-probs of the completion are nan.
    Endpoints report log-probs under the model's distribution at temperature 1. If tokens are sampled from another
    distribution, the log-probs of the completion are nan.
    """

    health, speaker, retry_after_s = MODELS, "a completion", 0.5

    def __init__(self, endpoint: EndpointConfig, tokenizer: Any, *, ends: Collection[int], key: str | None) -> None:
        super().__init__(
            endpoint.url.rstrip("/").removesuffix("/v1"), {} if key is None else {"Authorization": f"Bearer {key}"},
            ends=ends, vocab=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            refused="refuses the API key: see key_file or key_variable",
        )  # fmt: skip
        self._endpoint, self._tokenizer = endpoint, tokenizer
        self._asking: asyncio.Future[None] | None = None  # the request for the context length
        self._context: float | None = None  # the model's context length; inf if the endpoint does not report it

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float, priority: int = 0
    ) -> list[Completion]:
        """Implements `Server.generate`. If a prompt fills the context, its completions are empty, provided that the
        endpoint reports its context length.
        """
        self._check(prompt, sampling)
        room = min(sampling.max_tokens, await self._context_length(timeout_s) - len(prompt))
        if room <= 0:
            return [empty(sampling)] * sampling.n
        n = 1 if sampling.greedy else sampling.n
        body = self._request(prompt, sampling, n, seed, int(room))
        size = response_parsing.FREE_BYTES + n * body["max_tokens"] * response_parsing.JSON_TOKEN_BYTES
        choices = await self._ask(body, n, timeout_s, size)
        with self._understood():
            return [self._drawn(choice, sampling, body["max_tokens"]) for choice in choices] * (sampling.n // n)

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Implements `Server.score`. Raises EngineError if the endpoint does not return the log-probs of prompts, or
        identifies the most likely tokens only by their text.
        """
        problem = None
        if not self._endpoint.token_prompts:
            problem = "takes text alone (token_prompts: false): it cannot score tokens"
        elif k and not self._endpoint.extensions:
            problem = (
                "names the likeliest tokens by their text (extensions: false), which does not tell which they are; set "
                "extensions: true for a server of vLLM's, or give the role an engine of its own"
            )
        if problem is not None:
            raise EngineError(f"{self.url} {problem}")
        longer = [tokens.tolist() for tokens in sequences if len(tokens) > 1]
        body = {"model": self._endpoint.model, "prompt": longer, "echo": True, "max_tokens": 0, "temperature": 1.0}
        body |= {"logprobs": max(1, k)} | ({"return_token_ids": True} if self._endpoint.extensions else {})
        body |= {"return_tokens_as_token_ids": True} if k else {}
        try:
            size = response_parsing.FREE_BYTES + sum(map(len, longer)) * (
                response_parsing.JSON_TOKEN_BYTES + k * response_parsing.ENTRY_BYTES
            )
            choices = iter(await self._ask(body, len(longer), timeout_s, size) if longer else [])
        except RequestRefused as error:
            asked = f"`echo` with `logprobs: {max(1, k)}`"
            raise EngineError(f"{self.url} does not score prompts ({asked}): {error}") from error
        with self._understood():
            return [self._text_scores(next(choices) if len(tokens) > 1 else None, tokens, k) for tokens in sequences]

    def _check(self, prompt: np.ndarray, sampling: Sampling) -> None:
        """Checks a request. Raises ValueError for an invalid sampling setting, and RequestRefused for a prompt or a
        setting that the endpoint cannot handle.
        """
        sampling_seeds.check(sampling)
        beyond = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop_tokens": sampling.stop_tokens}
        asked = [name for name, value in beyond.items() if value and not self._endpoint.extensions]
        problem = None
        if not len(prompt) or prompt.min() < 0:
            problem = f"a prompt is empty or has tokens below 0: {prompt[:10].tolist()} ..."
        elif sampling.tandem is not None:
            problem = "sampling.tandem: an endpoint has one model; a tandem needs engine.kind=vllm or embedded"
        elif sampling.top:
            problem = "sampling.top: the most likely tokens beside sampled ones are not read from endpoints"
        elif asked:
            problem = f"sampling.{asked[0]}: OpenAI's own parameters have no such word; set extensions: true"
        if problem is not None:
            raise RequestRefused(problem)

    def _request(self, prompt: np.ndarray, sampling: Sampling, n: int, seed: int, max_tokens: int) -> dict[str, Any]:
        greedy, endpoint = sampling.greedy, self._endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "prompt": prompt.tolist(),
            "n": n,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "seed": seed,
        }
        if not endpoint.token_prompts:
            body["prompt"] = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        body |= {"stop": list(sampling.stop_strings)} if sampling.stop_strings else {}
        body |= {"logprobs": 1} if sampling.logprobs else {}  # some endpoints treat 0 as no log-probs
        if endpoint.extensions:
            body |= {
                "top_k": 0 if greedy else sampling.top_k,
                "min_p": 0.0 if greedy else sampling.min_p,
                "stop_token_ids": self._stops(sampling),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "add_special_tokens": False,
                "return_token_ids": True,
            }
        return body

    async def _ask(self, body: Mapping[str, Any], count: int, timeout_s: float, max_bytes: int) -> list[Any]:
        """Sends a completion request. Returns the choices of the response by index. Raises the errors of `Http.ask`."""
        answer = await self._http.ask("POST", COMPLETIONS, body, timeout_s=timeout_s, max_bytes=max_bytes)
        with self._understood():
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            self._check_count(choices, count)
        return choices

    def _drawn(self, choice: Mapping[str, Any], sampling: Sampling, room: int) -> Completion:
        """Parses one choice of a response as a completion of at most `room` tokens. Raises AnswerError, or another
        error that `_understood` converts to ServerLost, for a malformed choice.
        """
        # Only vLLM reports whether a stop string or the end of the text ended a completion (`stop_reason`).
        # For other endpoints, a stop string is assumed to have ended the completion if the request has stop strings.
        about: dict[str, Any] = {"stop_reason": "a stop string" if sampling.stop_strings else None}
        about |= {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
        told = None
        if choice.get("token_ids") is not None:
            tokens = response_parsing.read_tokens(choice["token_ids"], self._vocab, room)
            told = _logprobs(choice) if sampling.logprobs else None
        else:
            ids = self._tokenizer.encode(choice["text"], add_special_tokens=False)[: sampling.max_tokens]
            end = self._tokenizer.eos_token_id
            ended = self._stop(about["finish_reason"], about["stop_reason"], sampling) is Stop.EOS
            tokens = np.array(ids + [end] * (ended and end is not None and ids[-1:] != [end]), np.int32)
        return self._completion(
            about,
            tokens,
            sampling,
            drawn=told if sampling.plain else None,
            model=told if sampling.plain or sampling.greedy else None,
        )

    def _text_scores(self, choice: Mapping[str, Any] | None, tokens: np.ndarray, k: int) -> TopScores:
        logprobs, ids = np.zeros((len(tokens), 1 + k), np.float32), np.zeros((len(tokens), k), np.int32)
        if choice is not None:
            logprobs[1:, 0] = self._own(choice, tokens)
            for place in range(1, len(tokens) if k else 0):
                ids[place], logprobs[place, 1:] = self._likeliest(choice, place, k)
        return self._scores(logprobs, ids)

    def _likeliest(self, choice: Mapping[str, Any], place: int, k: int) -> tuple[list[int], list[float]]:
        """Returns the ids and log-probs of the k most likely tokens at a position. Raises EngineError if the endpoint
        reports fewer than k tokens, or reports them without ids.
        """
        told = (choice["logprobs"].get("top_logprobs") or [])[place : place + 1]
        found = sorted((told[0] or {}).items(), key=lambda entry: -entry[1])[:k] if told else []
        if len(found) < k or not all(name.startswith(TOKEN_ID) for name, _ in found):
            raise EngineError(
                f"{self.url} told {len(found)} of the {k} likeliest tokens at a place, or not their ids: "
                f"{dict(found[:3])}; ask for fewer, or give the role an engine that tells them"
            )
        return [int(name.removeprefix(TOKEN_ID)) for name, _ in found], [logprob for _, logprob in found]

    def _own(self, choice: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
        """Returns the log-probs [T - 1] of all tokens of a sequence except the first. Raises EngineError if the
        endpoint does not report them.
        """
        told = _logprobs(choice)
        if told is None or len(told) < len(tokens):
            raise EngineError(
                f"{self.url} told {0 if told is None else len(told)} log-probs of a prompt of {len(tokens)} tokens: "
                "it does not score prompts (`echo` with `logprobs`); give the role an engine that does"
            )
        return told[1 : len(tokens)]

    async def _context_length(self, timeout_s: float) -> float:
        """Returns the model's context length in tokens, or inf if the endpoint does not report it.

        All concurrent callers share one request to the endpoint. If this request fails, all of them get the error.
        Without sharing, callers would wait one after the other for the error of an endpoint that is slow to refuse.
        """
        if self._context is None:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask_context(timeout_s))
            # if this caller is cancelled, the request continues for the other callers
            await asyncio.shield(self._asking)
        assert self._context is not None
        return self._context

    async def _ask_context(self, timeout_s: float) -> None:
        listed = None
        with contextlib.suppress(RequestRefused):  # the endpoint has no such route
            listed = await self._http.ask("GET", MODELS, timeout_s=timeout_s)
        entries = listed.get("data") if isinstance(listed, dict) else None
        told = [
            entry.get(name)
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and entry.get("id") == self._endpoint.model
            for name in CONTEXT_NAMES
        ]
        self._context = next((length for length in told if isinstance(length, int)), math.inf)


def _logprobs(choice: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the log-probs of a choice's tokens, [T] float32, nan where a token has none. Returns None if the choice
    has no log-probs.
    """
    told = (choice.get("logprobs") or {}).get("token_logprobs")
    return None if told is None else np.array(told, object).astype(np.float32)  # null becomes nan
