"""An SGLang server: how it is started, and a client of it. SGLang is imported by nothing here: it lives in the server's
environment.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import ConfigError, Sglang
from megatron_rl.engines import answers, sampler
from megatron_rl.engines.base import Completion, EngineError, Sampling, TopScores
from megatron_rl.engines.frames import Arrays, unpack
from megatron_rl.engines.guard import HEADER, TOKEN_FILE
from megatron_rl.engines.launch import Command
from megatron_rl.engines.server import CONTROL_S, JSON, Http, RequestRefused, ServerLost
from megatron_rl.engines.sglang_route import PATH as GENERATE
from megatron_rl.engines.sglang_route import parts
from megatron_rl.types import Stop
from megatron_rl.weights import hf

MARGIN_S = 30.0  # beyond what a refit may take, before its request is given up
FACTS = "/server_info"
FLUSH_S = 30.0  # for the last batch to leave, before the cache is emptied
PAUSES = {
    "abort": "abort",
    "wait": "retract",
    "keep": "retract",
}  # retracted requests go on with caches that the new weights write
RESERVED = 5  # tokens that SGLang keeps free behind the longest prompt it takes
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
NOTHING = np.empty(0)


def command(
    settings: Sglang, *, python: str, model: Path, dtype: str, port: int, token_file: Path, on_gpu: bool
) -> Command:
    """The server's command line and environment. This package must be importable for `python` too (launch.ServerProcess
    sees to it).
    """
    words = [
        python, "-m", "megatron_rl.engines.sglang_worker", "--model-path", str(model), "--host", settings.host,
        "--port", str(port), "--dtype", dtype, "--tp-size", str(settings.tp),
        "--max-running-requests", str(settings.max_batch),
        "--sampling-defaults", "openai",  # not the model directory's idea of temperature and penalties
        "--skip-server-warmup",  # its requests do not have the token
        "--log-level-http", "warning",
    ]  # fmt: skip
    words += ["--context-length", str(settings.max_model_len)] if settings.max_model_len else []
    words += ["--ep-size", str(settings.tp)] if settings.expert_parallel else []
    if settings.colocate:
        if not on_gpu:
            raise ConfigError(
                "engine.colocate without a GPU: SGLang's memory saver needs CUDA; set engine.colocate to false"
            )
        words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]  # without a backup released weights are gone
    environment = {TOKEN_FILE: str(token_file), "HF_HUB_OFFLINE": "1"}
    environment |= {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"
    }  # /health needs no token: it must not generate, nor fail in a refit
    if on_gpu:
        words += ["--mem-fraction-static", str(settings.memory_share)]
    else:
        words += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--disable-overlap-schedule",
            "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
            "--max-total-tokens", str(_cache_tokens(settings, model, dtype)),
        ]  # fmt: skip
        cores = "|".join(
            f"{rank * settings.threads}-{(rank + 1) * settings.threads - 1}" for rank in range(settings.tp)
        )
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
        environment |= (
            {"SGLANG_CPU_OMP_THREADS_BIND": cores} if settings.tp > 1 else {}
        )  # else it wants a NUMA node for each rank
    return Command([*words, *settings.args], environment)


@dataclass(frozen=True)
class _Facts:
    """Facts about a server, from /server_info."""

    tp: int
    longest_prompt: int
    longest_mask: int  # tokens of which it says whether a truncated distribution held them
    heeds_seeds: bool


class SglangServer:
    """Implements server.Server. Verified with SGLang 0.5.23 on stubbed kernels (docs/engines_sglang.md).

    Its answers are JSON of its own route: it has no extension point for another one that speaks bytes. Seeds are heeded
    by a server with `--enable-deterministic-inference` (engine.args) alone; others draw from one stream for all. Under
    top_p, top_k or min_p log-probs need top_k, of at most what `--sampling-mask-max-tokens` says: of the rest SGLang
    tells only what the model thought before the truncation.
    """

    def __init__(
        self, url: str, token: str, settings: Sglang, *, ends: Collection[int], vocab: int, refit_timeout_s: float
    ) -> None:
        """`ends`: the model's end-of-sequence tokens. `vocab`: how many tokens it has."""
        self._http, self.url = Http(url, {HEADER: token}), url
        self._pause, self._refit_timeout_s = settings.pause, refit_timeout_s
        self._sleeps = settings.colocate
        self._away: frozenset[str] = frozenset()  # tags of released memory: SGLang ends when one is released twice
        self._ends, self._vocab = frozenset(ends), vocab
        self._known: _Facts | None = None
        self._change, self._under_way = threading.Condition(), 0

    def ready(self) -> bool:
        """Asks /ping: /health would say no while a refit or a pause holds the scheduler."""
        return self._http.answers("/ping")

    def hang_up(self) -> None:
        self._http.hang_up()

    def close(self) -> None:
        self._http.close()

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float
    ) -> list[Completion]:
        """See server.Server. Raises ValueError for impossible sampling settings, and for truncation whose log-probs
        SGLang does not tell. A prompt that fills the context (SGLang keeps a few tokens of it back) comes back empty.
        """
        sampler.check(sampling)
        self._check_tokens(prompt)
        facts = await self._facts_soon()
        if len(prompt) >= facts.longest_prompt:
            return [Completion(tokens=NOTHING, logprobs=NOTHING, stop=Stop.LENGTH)] * sampling.n
        n = 1 if sampling.temperature == 0 else sampling.n
        body = self._request(prompt.tolist(), sampling, n, seed, facts)
        room = min(sampling.max_tokens, facts.longest_prompt + RESERVED)
        longest = answers.FREE_BYTES + n * (len(prompt) + room) * answers.FRAME_TOKEN_BYTES
        found = await self._ask(body, n, timeout_s, longest)
        with self._understood():
            return [self._completion(about, own, sampling, room) for about, own in found] * (sampling.n // n)

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """See server.Server. Raises RequestRefused for a sequence that is longer than SGLang's longest prompt, which is
        a few tokens shorter than the context.
        """
        if k > self._vocab:
            raise EngineError(f"the {k} likeliest tokens were asked for: {self.url} has {self._vocab} in all")
        longest = (await self._facts_soon()).longest_prompt
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
        size = answers.FREE_BYTES + sum(map(len, sequences)) * (1 + k) * answers.ENTRY_BYTES
        found = await self._ask(body, len(sequences), timeout_s, size)
        with self._understood():
            return [self._scores(*answer, tokens, k) for answer, tokens in zip(found, sequences, strict=True)]

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        order = {"verb": "join", "host": host, "port": port, "secret": secret, "replica": replica}
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
        self._flush()  # its keys know tokens, not weights: old entries would be read
        found = self.version()
        if found != version:
            raise ServerLost(f"{self.url} has version {found} of the weights after a refit to {version}")

    def resume(self) -> None:
        if not self._sleeps:
            self._post("/continue_generation", {})

    def sleep(self, *, discard: bool) -> None:
        """See server.Server. Weights go to the host also where they could be dropped: SGLang decides that when it is
        started. It must have nothing to do, or its scheduler ends.
        """
        self._post("/pause_generation", {"mode": "abort"}, timeout_s=self._refit_timeout_s)
        tags = [tag for tag in ("kv_cache", "weights") if tag not in self._away]
        if "kv_cache" in tags:
            self._flush()  # waits for the last batch to leave
        if tags:
            self._post("/release_memory_occupation", {"tags": tags}, timeout_s=self._refit_timeout_s)
            self._away = self._away.union(tags)

    def wake(self) -> None:
        self._take_back("weights", "kv_cache")
        self._post("/continue_generation", {})

    def _take_back(self, *tags: str) -> None:
        """Resumes the memory of some tags, as far as it is released."""
        if due := [tag for tag in tags if tag in self._away]:
            self._post("/resume_memory_occupation", {"tags": due}, timeout_s=self._refit_timeout_s)
            self._away = self._away.difference(due)

    def version(self) -> int:
        answer = self._http.call("GET", "/model_info")
        with self._understood():
            return _version(answer["weight_version"])

    def _request(self, prompt: list[int], sampling: Sampling, n: int, seed: int, facts: _Facts) -> dict[str, Any]:
        parameters = {
            "max_new_tokens": max(0, min(sampling.max_tokens, facts.longest_prompt + RESERVED - len(prompt) - 1)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": sorted(self._ends.union(sampling.stop_tokens)),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        body: dict[str, Any] = {"return_logprob": True}
        if _truncated(sampling):
            if not 1 <= sampling.top_k <= facts.longest_mask:
                raise ValueError(
                    f"sampling.top_k = {sampling.top_k} with top_p = {sampling.top_p} and min_p = {sampling.min_p}: "
                    "SGLang tells the log-probs of what it draws then only under a top_k of 1 to "
                    f"{facts.longest_mask}; set one, or leave truncation off"
                )
            body["return_sampling_mask"] = True
        if facts.heeds_seeds or _truncated(sampling):  # "n" knows one seed, and fails with masks
            drawn = [parameters | {"sampling_seed": seed + j} for j in range(n)]
            return body | {"input_ids": [prompt] * n, "sampling_params": drawn}
        return body | {
            "input_ids": prompt,
            "sampling_params": parameters | {"n": n},
        }  # the prompt is worked through once for all n

    async def _ask(
        self, body: dict[str, Any], count: int, timeout_s: float, max_bytes: int
    ) -> list[tuple[Mapping[str, Any], Arrays]]:
        """Returns what the server says of each completion, and its arrays."""
        with self._counted():
            asked = json.dumps(body).encode()
            answer = await self._http.exchange(GENERATE, asked, JSON, timeout_s=timeout_s, max_bytes=max_bytes)
        with self._understood():
            about, arrays = unpack(answer)
            found = list(zip(about, parts(about, arrays), strict=True))
        if len(found) != count:
            raise ServerLost(f"{self.url} sent {len(found)} completions, not {count}")
        return found

    def _check_tokens(self, tokens: np.ndarray) -> None:
        """Raises RequestRefused for what SGLang would die of, or take."""
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self._vocab:
            raise RequestRefused(
                f"a prompt is empty or has tokens outside of 0 to {self._vocab - 1}: {tokens[:10].tolist()} ..."
            )

    def _completion(self, about: Mapping[str, Any], own: Arrays, sampling: Sampling, room: int) -> Completion:
        """Returns a completion of at most `room` tokens. Raises what `_understood` turns into ServerLost."""
        tokens = answers.read_tokens(own["tokens"], self._vocab, room)
        scaled = answers.read_logprobs(own["scaled"], (len(tokens),))
        drawn = answers.read_logprobs(own.get("drawn", NOTHING), (len(tokens),)) if _truncated(sampling) else scaled
        greedy = sampling.temperature == 0
        spans = [(span["start"], _version(span["version"])) for span in about["weight_versions"] or []]
        return Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens)) if greedy else drawn,  # greedy decoding draws from a point mass
            stop=self._stop(about["finish_reason"], sampling),
            model_logprobs=scaled if greedy or sampling.temperature == 1 else None,
            versions=answers.read_versions(spans, len(tokens)),
        )

    def _scores(self, about: Mapping[str, Any], own: Arrays, tokens: np.ndarray, k: int) -> TopScores:
        told = own["prompt"][1:]  # nothing is told of the first token
        if about["finish_reason"]["type"] == "abort" or len(told) != len(tokens) - 1:
            raise ServerLost(f"{self.url} scored {len(told)} of {len(tokens)} tokens: {about['finish_reason']}")
        logprobs, ids = np.zeros((len(tokens), 1 + k), np.float32), np.zeros((len(tokens), k), np.int32)
        logprobs[1:, 0] = told
        if k and len(told):
            if own["top"].shape != (len(told), k):
                raise EngineError(
                    f"{self.url} told {own['top'].shape} of the {k} likeliest tokens of {len(told)} places"
                )
            logprobs[1:, 1:], ids[1:] = own["top"], own["top_ids"]
        answers.read_logprobs(logprobs, logprobs.shape)
        answers.check_ids(ids, self._vocab)
        return TopScores(logprobs=logprobs[:, 0].copy(), ids=ids, top_logprobs=logprobs[:, 1:].copy())

    def _understood(self) -> contextlib.AbstractContextManager[None]:
        """Takes an answer of another shape than SGLang's for none at all."""
        return answers.understood(self.url, "SGLang's")

    def _stop(self, reason: Mapping[str, Any], sampling: Sampling) -> Stop:
        match reason["type"], reason.get("matched"):
            case "stop", int(token) if token in self._ends or token not in sampling.stop_tokens:
                return Stop.EOS
            case "stop", _:
                return Stop.STOP
            case "length", _:
                return Stop.LENGTH
            case "abort", _:
                return Stop.ABORTED
            case other:
                raise ServerLost(f"SGLang ended a completion for an unknown reason: {other}")

    def _in_session(self, order: dict[str, Any], version: int | None, timeout_s: float) -> None:
        """Hands an order to every rank (sglang_worker.Refits), between the calls that undo and redo what SGLang makes
        of loaded weights.
        """
        packed = base64.b64encode(
            pickle.dumps(order)
        ).decode()  # of numbers and text alone: SGLang unpickles nothing else
        body = {"serialized_named_tensors": [packed] * self._facts().tp, "flush_cache": False, "selector": "target"}
        body |= {"weight_version": str(version)} if version is not None else {}
        self._begin_session()
        try:
            self._post("/update_weights_from_tensor", body, timeout_s=timeout_s)
        except RequestRefused:
            self._post("/end_weight_update", {})
            raise
        self._post("/end_weight_update", {})

    def _begin_session(self) -> None:
        try:
            self._post("/begin_weight_update", {"selector": "target"})
        except RequestRefused:  # one is open: of a run that ended in the middle
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {"selector": "target"})

    def _flush(self) -> None:
        """Again until the last batch has left. Not by the route's own timeout: with that it waits for what a pause
        retracted, too.
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

    def _post(self, path: str, body: Any, *, timeout_s: float = CONTROL_S) -> None:
        self._http.call("POST", path, body, timeout_s=timeout_s)

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

    def _facts(self) -> _Facts:
        """Returns what the server says of itself; it holds the thread."""
        return self._known or self._read_facts(self._http.call("GET", FACTS))

    async def _facts_soon(self) -> _Facts:
        return self._known or self._read_facts(await self._http.ask("GET", FACTS))

    def _read_facts(self, told: Any) -> _Facts:
        with self._understood():
            self._known = _Facts(
                tp=answers.read_whole(told["tp_size"], 1),
                longest_prompt=answers.read_whole(told["max_req_input_len"], 0),
                longest_mask=answers.read_whole(told["sampling_mask_max_tokens"] or 0, 0),
                heeds_seeds=bool(told["enable_deterministic_inference"]),
            )
        return self._known


def _truncated(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0)


def _version(text: str) -> int:
    """SGLang's name for the weights it started with is "default"."""
    return int(text) if text.lstrip("-").isdigit() else -1


def _cache_tokens(settings: Sglang, model: Path, dtype: str) -> int:
    """Returns how many tokens' keys and values engine.kv_cache_gib holds."""
    sizes = hf.read_architecture(model)
    bytes_of_one = sizes.num_layers * sizes.cached * sizes.cache_copies(settings.tp) * ITEM_BYTES[dtype]
    return int(settings.kv_cache_gib * 2**30) // bytes_of_one
