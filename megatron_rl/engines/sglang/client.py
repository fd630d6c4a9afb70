"""A client of an SGLang server. It does not import SGLang, which is installed only in the server's environment."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.engines import response_parsing, sampling_seeds
from megatron_rl.engines.auth_middleware import HEADER
from megatron_rl.engines.http import JSON, RequestRefused, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, TopScores, empty
from megatron_rl.engines.server import MARGIN_S, Server
from megatron_rl.engines.sglang.routes import PATH as GENERATE
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.lib.frames import Arrays, unpack_parts

FACTS = "/server_info"
FLUSH_S = 30.0  # maximum seconds to wait until the last batch has finished, so that the KV cache can be emptied
# {value of engine.pause: SGLang's pause mode}. A retracted request recomputes its KV cache with the new weights.
PAUSES = {"abort": "abort", "wait": "retract", "keep": "retract"}
RESERVED = 5  # number of tokens that SGLang keeps free after the longest prompt that it accepts


@dataclass(frozen=True)
class _Facts:
    """Facts about a server that the server reports at /server_info."""

    longest_prompt: int
    longest_mask: int  # maximum size of SGLang's sampling mask, the list of tokens that top_k, top_p and min_p leave
    heeds_seeds: bool


class SglangServer(Server):
    """A client of an SGLang server. Verified with SGLang 0.5.23 with stubs in place of its GPU kernels
    (docs/reference/engines_sglang.md).

    Only a server with `--enable-deterministic-inference` (in engine.args) uses the seeds of requests; other servers
    sample all requests from one random stream. With top_p, top_k or min_p, log-probs require a top_k of at most
    `--sampling-mask-max-tokens`; otherwise SGLang returns only the model's log-probs before truncation.
    """

    # route that stays available: /health fails while a weight sync or a pause blocks the scheduler
    health, speaker, version_route = "/ping", "SGLang's", "/model_info"

    def __init__(self, url: str, token: str, settings: Sglang, refit_timeout_s: float, facts: ModelFacts) -> None:
        super().__init__(url, {HEADER: token}, ends=facts.ends, vocab=facts.vocab)
        self._pause, self._refit_timeout_s = settings.pause, refit_timeout_s
        self._sleeps, self._tp = settings.colocate, settings.tp
        # kinds of memory (SGLang's tags) that are released now; SGLang exits if it is asked to release a kind twice
        self._away: frozenset[str] = frozenset()
        self._known: _Facts | None = None
        self._change, self._under_way = threading.Condition(), 0

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float, priority: int = 0
    ) -> list[Completion]:
        """Implements `Server.generate`. Also raises ValueError for truncation settings for which SGLang does not return
        log-probs. SGLang keeps a few tokens of the context free.
        """
        sampling_seeds.check(sampling)
        self._check_tokens(prompt)
        facts = await self._facts()
        if len(prompt) >= facts.longest_prompt:
            return [empty(sampling)] * sampling.n
        n = 1 if sampling.greedy else sampling.n
        body = self._request(prompt.tolist(), sampling, n, seed, facts)
        if priority:  # SGLang can be configured to refuse priorities, so the default 0 is not sent
            body["priority"] = priority
        room = min(sampling.max_tokens, facts.longest_prompt + RESERVED)
        longest = response_parsing.longest_answer(n, len(prompt) + room, sampling.num_top)
        found = await self._ask(body, n, timeout_s, longest)
        with self._understood():
            return [self._drawn(about, own, sampling, room) for about, own in found] * (sampling.n // n)

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Implements `Server.score`. Raises RequestRefused for a sequence longer than SGLang's longest prompt, which is
        a few tokens shorter than the context.
        """
        if k > self._vocab:
            raise EngineError(f"the {k} likeliest tokens were asked for: {self.url} has {self._vocab} in all")
        longest = (await self._facts()).longest_prompt
        for tokens in sequences:
            self._check_tokens(tokens)
            if len(tokens) > longest:
                raise RequestRefused(
                    f"a sequence of {len(tokens)} tokens: {self.url} scores at most {longest}; "
                    "raise engine.max_model_len"
                )
        body = {
            "input_ids": [tokens.tolist() for tokens in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        } | ({"top_logprobs_num": k} if k else {})
        size = response_parsing.FREE_BYTES + sum(map(len, sequences)) * (1 + k) * response_parsing.ENTRY_BYTES
        found = await self._ask(body, len(sequences), timeout_s, size)
        with self._understood():
            return [self._text_scores(*answer, tokens, k) for answer, tokens in zip(found, sequences, strict=True)]

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        order = {"verb": "join", "replica": replica, "address": [host, port, secret]}
        self._in_session(order, None, self._refit_timeout_s)

    def pause(self) -> None:
        if self._sleeps:
            return self._take_back("weights")
        if self._pause == "wait":
            with self._change:
                if not self._change.wait_for(lambda: self._under_way == 0, self._refit_timeout_s):
                    raise ServerLost(
                        f"{self.url}: {self._under_way} requests did not end within {self._refit_timeout_s:.0f} s"
                    )
        self._post("/pause_generation", {"mode": PAUSES[self._pause]}, timeout_s=self._refit_timeout_s)

    def update(self, version: int, wait_s: float) -> None:
        order = {"verb": "take part", "version": version, "wait_s": wait_s}
        self._in_session(order, version, wait_s + self._refit_timeout_s + MARGIN_S)
        # SGLang finds cache entries by tokens, not by weights, so it would reuse entries of the old weights.
        self._flush()
        self._check_version(version)

    def resume(self) -> None:
        if not self._sleeps:
            self._post("/continue_generation", {})

    def sleep(self, *, discard: bool) -> None:
        """Implements `Server.sleep`. The weights are copied to the host even if `discard` is set, because SGLang makes
        this choice when it starts. SGLang must be idle when it releases memory, otherwise SGLang's scheduler exits.
        """
        self._post("/pause_generation", {"mode": "abort"}, timeout_s=self._refit_timeout_s)
        tags = [tag for tag in ("kv_cache", "weights") if tag not in self._away]
        if "kv_cache" in tags:
            self._flush()  # empties the cache, which also waits until the last batch has finished
        if tags:
            self._post("/release_memory_occupation", {"tags": tags}, timeout_s=self._refit_timeout_s)
            self._away = self._away.union(tags)

    def wake(self) -> None:
        self._take_back("weights", "kv_cache")
        self._post("/continue_generation", {})

    def _take_back(self, *tags: str) -> None:
        """Allocates released memory again. `tags`: kinds of memory; a kind that is not released is skipped."""
        if due := [tag for tag in tags if tag in self._away]:
            self._post("/resume_memory_occupation", {"tags": due}, timeout_s=self._refit_timeout_s)
            self._away = self._away.difference(due)

    def _request(self, prompt: list[int], sampling: Sampling, n: int, seed: int, facts: _Facts) -> dict[str, Any]:
        parameters = {
            "max_new_tokens": max(0, min(sampling.max_tokens, facts.longest_prompt + RESERVED - len(prompt) - 1)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": self._stops(sampling),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        body: dict[str, Any] = {"return_logprob": True}
        if sampling.num_top:
            body |= {
                "top_logprobs_num": sampling.num_top,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
            }
        if sampling.truncated:
            if not 1 <= sampling.top_k <= facts.longest_mask:
                raise ValueError(
                    f"sampling.top_k = {sampling.top_k} with top_p = {sampling.top_p} and min_p = {sampling.min_p}: "
                    "SGLang tells the log-probs of what it draws then only under a top_k of 1 to "
                    f"{facts.longest_mask}; set one, or leave truncation off"
                )
            body["return_sampling_mask"] = True
        # SGLang's "n" supports only one seed, and fails with sampling masks
        if facts.heeds_seeds or sampling.truncated:
            drawn = [parameters | {"sampling_seed": seed + j} for j in range(n)]
            return body | {"input_ids": [prompt] * n, "sampling_params": drawn}
        # With "n", the prompt is prefilled once for all n samples.
        return body | {"input_ids": prompt, "sampling_params": parameters | {"n": n}}

    async def _ask(
        self, body: dict[str, Any], count: int, timeout_s: float, max_bytes: int
    ) -> list[tuple[Mapping[str, Any], Arrays]]:
        """Sends a request. Returns (description, arrays) of each completion or sequence in the response."""
        with self._counted():
            asked = json.dumps(body).encode()
            answer = await self._http.exchange(GENERATE, asked, JSON, timeout_s=timeout_s, max_bytes=max_bytes)
        with self._understood():
            found = unpack_parts(answer)
            self._check_count(found, count)
        return found

    def _check_tokens(self, tokens: np.ndarray) -> None:
        """Raises RequestRefused for an empty prompt and for token ids outside the vocabulary, because SGLang does not
        refuse such prompts: it crashes or accepts them.
        """
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self._vocab:
            raise RequestRefused(
                f"a prompt is empty or has tokens outside of 0 to {self._vocab - 1}: {tokens[:10].tolist()} ..."
            )

    def _drawn(self, about: Mapping[str, Any], own: Arrays, sampling: Sampling, room: int) -> Completion:
        """Parses one completion of at most `room` tokens. For a malformed response, raises AnswerError, or another
        error that `_understood` converts to ServerLost.
        """
        tokens = response_parsing.read_tokens(own["tokens"], self._vocab, room)
        scaled = response_parsing.read_logprobs(own["scaled"], tokens.shape)
        drawn = own.get("drawn", ()) if sampling.truncated else scaled
        model = scaled if sampling.greedy or sampling.temperature == 1 else None
        return self._completion(about, tokens, sampling, drawn=drawn, model=model, arrays=own)

    def _text_scores(self, about: Mapping[str, Any], own: Arrays, tokens: np.ndarray, k: int) -> TopScores:
        told = own["prompt"][1:]  # the first token has no log-prob
        valid = about["finish_reason"] != "abort" and len(told) == len(tokens) - 1
        response_parsing.require(valid, f"scored {len(told)} of {len(tokens)} tokens: {about['finish_reason']}")
        logprobs, ids = np.zeros((len(tokens), 1 + k), np.float32), np.zeros((len(tokens), k), np.int32)
        logprobs[1:, 0] = told
        if k and len(told):
            if own["top"].shape != (len(told), k):
                raise EngineError(
                    f"{self.url} told {own['top'].shape} of the {k} likeliest tokens of {len(told)} places"
                )
            logprobs[1:, 1:], ids[1:] = own["top"], own["top_ids"]
        return self._scores(logprobs, ids)

    def _in_session(self, order: dict[str, Any], version: int | None, timeout_s: float) -> None:
        """Sends an order (see worker.Refits) to every rank of the server. Before the order, SGLang restores the weights
        to the form in which they were loaded. After the order, SGLang processes the weights again.
        """
        packed = base64.b64encode(pickle.dumps(order)).decode()  # numbers and strings, so unpickling imports nothing
        body = {"serialized_named_tensors": [packed] * self._tp, "flush_cache": False, "selector": "target"}
        body |= {"weight_version": str(version)} if version is not None else {}
        try:
            self._post("/begin_weight_update", {"selector": "target"})
        # An earlier run ended during a refit, so SGLang is still in its weight update, which has to be ended first.
        except RequestRefused:
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {"selector": "target"})
        try:
            self._post("/update_weights_from_tensor", body, timeout_s=timeout_s)
        except RequestRefused:
            self._post("/end_weight_update", {})
            raise
        self._post("/end_weight_update", {})

    def _flush(self) -> None:
        """Empties the KV cache. Retries until the last batch has finished, at most FLUSH_S seconds. The timeout
        parameter of SGLang's route is not used, because it makes SGLang wait also for requests that a pause retracted.
        """
        end = time.monotonic() + FLUSH_S
        while True:
            try:
                return self._http.call("POST", "/flush_cache", says=False)
            except RequestRefused as error:
                if time.monotonic() > end:
                    raise ServerLost(
                        f"{self.url} kept the cache of the old weights for {FLUSH_S:.0f} s: {error}"
                    ) from error
            time.sleep(0.1)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._change:
            self._under_way += 1
        try:
            yield
        finally:
            with self._change:
                self._under_way -= 1
                self._change.notify_all()

    async def _facts(self) -> _Facts:
        """Returns the facts that the server reports about itself. The server is asked only once."""
        if self._known is None:
            told = await self._http.ask("GET", FACTS)
            with self._understood():
                self._known = _Facts(
                    longest_prompt=response_parsing.read_whole(told["max_req_input_len"], 0),
                    longest_mask=response_parsing.read_whole(told["sampling_mask_max_tokens"] or 0, 0),
                    heeds_seeds=bool(told["enable_deterministic_inference"]),
                )
        return self._known
