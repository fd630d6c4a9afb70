"""A vLLM server: how it is started, and a client of it. vLLM itself is imported by nothing here: it lives in the
server's environment.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.authors import fingerprint, replay
from megatron_rl.config.base import read_object
from megatron_rl.config.schema import ConfigError, Strategy, Vllm
from megatron_rl.engines import answers, frames, sampler
from megatron_rl.engines.base import Completion, Sampling, TandemSampling, TopScores
from megatron_rl.engines.guard import HEADER, TOKEN_FILE
from megatron_rl.engines.launch import Command
from megatron_rl.engines.server import CONTROL_S, Adapters, Http, RequestRefused, ServerLost
from megatron_rl.engines.vllm_route import PATH as GENERATE
from megatron_rl.engines.vllm_route import SCORE_PATH as SCORE
from megatron_rl.types import Stop

TANDEM = "tandem"  # what vllm_tandem.py finds its settings under: the server's, and a request's
ARCHITECTURE = "MegatronRlTandem"
ADAPTER = "lora"  # what a request's adapter stands under: its name, number, directory and version
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the greatest ranks that vLLM makes room for
MARGIN_S = 30.0  # beyond what a refit may take, before its request is given up
NOTHING = np.empty(0)
Boundaries = Callable[[Strategy], frozenset[int]]


def command(
    settings: Vllm, *, python: str, model: Path, dtype: str, port: int, token_file: Path, on_gpu: bool
) -> Command:
    """The server's command line and environment. `python`: interpreter of an environment that has vLLM. Raises
    ConfigError.
    """
    if settings.colocate and not on_gpu:
        raise ConfigError(
            "engine.colocate without a GPU: vLLM's sleep mode, which gives the trainer its memory back, needs CUDA; "
            "set engine.colocate to false"
        )
    if settings.expert_parallel and not on_gpu:
        raise ConfigError(
            "engine.expert_parallel without a GPU: vLLM's kernels for CPUs end with a fault; "
            "set it to false, tp cuts experts too"
        )
    words = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", settings.host,
        "--port", str(port), "--dtype", dtype, "--tensor-parallel-size", str(settings.tp),
        "--logprobs-mode", "processed_logprobs",  # of the distribution that was sampled from
        "--max-logprobs", "-1",  # of a place: as many of the likeliest tokens as a request for scores asks for
        "--middleware", "megatron_rl.engines.vllm_route.Routes",
        "--middleware", "megatron_rl.engines.guard.Guard",  # the last stands before all others
        "--worker-extension-cls", "megatron_rl.engines.vllm_worker.Extension",
        "--weight-transfer-config", json.dumps({"backend": "megatron_rl"}),
        "--generation-config", "vllm",  # not the model directory's idea of temperature and lengths
        "--max-num-seqs", str(settings.max_batch), "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    words += ["--max-model-len", str(settings.max_model_len)] if settings.max_model_len else []
    words += ["--enable-expert-parallel"] if settings.expert_parallel else []
    words += ["--enable-sleep-mode"] if settings.colocate else []
    environment = {
        TOKEN_FILE: str(token_file),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": settings.host,
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if on_gpu:
        words += ["--gpu-memory-utilization", str(settings.memory_share)]
    else:
        # A request with a seed whose prompt is prefilled in parts ends vLLM 0.32 on a CPU:
        # "CPU Generator does not use offset".
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        # On a processor with AMX vLLM would take kernels for attention through latents that refuse float32. This
        # backend runs on any processor and in any dtype; attention without latents ignores the word.
        words += ["--attention-backend", "CPU_MLA"]
        if settings.tp == 1:
            # vLLM would put the model into a further process, for a process to have OpenMP's settings before its start.
            # Here the whole server has them, and one process less starts sooner and answers faster.
            words += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib))), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.threads), "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }  # fmt: skip
    return Command([*words, *settings.args], environment)


def with_tandem(start: Command, *, model: Path, junior: Path, tokenizer: Path) -> Command:
    """The command of a server whose model is a senior (`model`) and a frozen junior. Its imports need vLLM's plug-in:
    launch.PLUGIN. Raises ConfigError for a model that does not name its class.
    """
    architectures = read_object(model / "config.json").get("architectures")
    if not architectures:
        raise ConfigError(
            f"{model}/config.json has no `architectures`: "
            "a tandem must be told the senior's class, such as Qwen2ForCausalLM"
        )
    settings = {"architectures": architectures, "junior": str(junior), "tokenizer": str(tokenizer)}
    words = [
        "--hf-overrides", json.dumps({"architectures": [ARCHITECTURE]}),
        "--additional-config", json.dumps({TANDEM: settings}),
        "--logits-processors", "megatron_rl.engines.vllm_tandem:Authors",
    ]  # fmt: skip
    words += [] if "--enforce-eager" in start.words else ["--enforce-eager"]
    # Its second model runner has no logits processors of this kind.
    return Command([*start.words, *words], {**start.environment, "VLLM_USE_V2_MODEL_RUNNER": "0"})


def with_adapters(start: Command, *, rank: int, roles: int) -> Command:
    """The command of a server that computes with adapters of up to `rank` beside its model: of each of its `roles` the
    newest one, and that of requests which began before. Raises ConfigError for a rank that vLLM has no room for.
    """
    if rank > RANKS[-1]:
        raise ConfigError(
            f"lora.rank = {rank} with engine.adapters = 'served': vLLM takes up to {RANKS[-1]}; set merged"
        )
    room = next(own for own in RANKS if own >= rank)
    words = ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(2 * roles)]
    return Command([*start.words, *words], start.environment)


def with_experts(start: Command, *, on_gpu: bool) -> Command:
    """The command of a server that tells which experts it chose for each token. Raises ConfigError without a GPU."""
    if not on_gpu:
        raise ConfigError(
            "router_replay without a GPU: of vLLM's two model runners one tells the experts, "
            "and that one needs Triton; set it to false"
        )
    return Command(
        [*start.words, "--enable-return-routed-experts"], {**start.environment, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    )


class VllmServer:
    """Implements server.Server. Verified with vLLM 0.32."""

    def __init__(
        self, url: str, token: str, settings: Vllm, *, ends: Collection[int], vocab: int, refit_timeout_s: float,
        boundaries: Boundaries | None = None,
    ) -> None:  # fmt: skip
        """`ends`: the model's end-of-sequence tokens. `vocab`: how many tokens it has, 0 where that is not known.
        `boundaries`: gives those of a tandem's strategies.
        """
        self._http, self.url = Http(url, {HEADER: token}), url
        self._pause, self._refit_timeout_s, self._at_once = settings.pause, refit_timeout_s, settings.max_batch
        self._sleeps = settings.colocate  # between refits it sleeps, and is paused by that
        self._ends, self._vocab = frozenset(ends), vocab
        self._context: int | None = None
        self._boundaries = boundaries
        self._agreed: dict[Strategy, frozenset[int]] = {}  # boundaries that the server has too

    def ready(self) -> bool:
        return self._http.answers("/health")

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float
    ) -> list[Completion]:
        """See server.Server. Raises ValueError for impossible sampling settings. A prompt that fills the context comes
        back empty.
        """
        sampler.check(sampling)
        room = await self._room() - len(prompt)
        if room <= 0:
            authors = None if sampling.tandem is None else NOTHING
            empty = Completion(tokens=NOTHING, logprobs=NOTHING, stop=Stop.LENGTH, authors=authors)
            return [empty] * sampling.n
        if sampling.tandem is not None:
            await self._agree(sampling.tandem.rule.strategy)
        at_once = self._at_once if sampling.temperature > 0 else 1  # vLLM draws a greedy answer once
        if sampling.temperature == 0 and sampling.tandem is None:
            return await self._draw(prompt, sampling, 1, seed, room, timeout_s) * sampling.n
        out: list[Completion] = []
        while len(out) < sampling.n:  # sample j has seed + j, in vLLM too
            n = min(sampling.n - len(out), at_once)
            out += await self._draw(prompt, sampling, n, seed + len(out), room, timeout_s)
        return out

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """See server.Server. vLLM reads nothing from its prefix cache for it."""
        lengths = [len(tokens) for tokens in sequences]
        asked = {"lengths": lengths, "top_k": k} | self._adapter()
        longest = answers.FREE_BYTES + sum(lengths) * (1 + k) * answers.ENTRY_BYTES
        _, found = await self._exchange(SCORE, asked, np.concatenate(sequences), timeout_s, longest)
        with self._understood():
            logprobs = answers.read_logprobs(found["logprobs"], (sum(lengths), 1 + k)).copy()
            ids = found["ids"].copy()  # [N, k]
            if ids.shape != (sum(lengths), k):
                raise answers.AnswerError(f"ids {ids.shape} of the {k} likeliest of {sum(lengths)} tokens")
            answers.check_ids(ids, self._vocab)
        ends = np.cumsum(lengths)[:-1]
        parts = zip(np.split(logprobs, ends), np.split(ids, ends), strict=True)
        return [TopScores(logprobs=own[:, 0].copy(), ids=top, top_logprobs=own[:, 1:].copy()) for own, top in parts]

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        self._post(
            "/init_weight_transfer_engine",
            {"init_info": {"host": host, "port": port, "secret": secret, "replica": replica}},
        )

    def pause(self) -> None:
        if self._sleeps:
            self._wake("?tags=weights")
        else:
            self._post(f"/pause?mode={self._pause}", None, timeout_s=self._refit_timeout_s)

    def update(self, version: int, wait_s: float) -> None:
        self._post("/start_weight_update", {})
        info = {"update_info": {"version": version, "wait_s": wait_s}}
        self._post("/update_weights", info, timeout_s=wait_s + self._refit_timeout_s + MARGIN_S)
        self._post("/finish_weight_update", {"weight_version": str(version)})
        self._forget_prefixes()  # their keys know tokens, not weights: old entries would be read
        found = self.version()
        if found != version:
            raise ServerLost(f"{self.url} has version {found} of the weights after a refit to {version}")

    def resume(self) -> None:
        if not self._sleeps:  # it would write into a cache that is not there; vLLM goes on by itself when all is awake
            self._post("/resume", None)

    def sleep(self, *, discard: bool) -> None:
        """See server.Server. Level 2 drops the weights and keeps the model's buffers, level 1 copies both to the host.
        Either empties the prefix cache.
        """
        level = 2 if discard else 1
        answer = self._http.call("POST", f"/sleep?level={level}&mode=abort", timeout_s=self._refit_timeout_s)
        self._expect(answer, "sleeping", "sleep")

    def wake(self) -> None:
        """See server.Server. Raises ServerLost also where a part of it still sleeps."""
        self._expect(self._wake(""), "awake", "wake up")

    def _wake(self, tags: str) -> Any:
        return self._http.call("POST", f"/wake_up{tags}", timeout_s=self._refit_timeout_s)

    def _expect(self, answer: Any, status: str, what: str) -> None:
        with self._understood():
            found = answer["status"]
        if found != status:
            raise ServerLost(f"{self.url} did not {what}: its status is {found!r}")

    def _forget_prefixes(self) -> None:
        """Empties the prefix cache, also of the requests under way: vLLM computes anew what these have read.

        Without that word vLLM empties nothing while requests are kept, and answers as if it had.
        """
        self._post("/reset_prefix_cache?reset_running_requests=true", None)

    def version(self) -> int:
        answer = self._http.call("GET", "/weight_info")
        with self._understood():
            return _version(answer["weight_version"])

    def hang_up(self) -> None:
        self._http.hang_up()

    def close(self) -> None:
        self._http.close()

    def _adapter(self) -> dict[str, Any]:
        """Returns what a request says of the adapter that it is computed with: nothing, of merged weights."""
        return {}

    async def _draw(
        self, prompt: np.ndarray, sampling: Sampling, n: int, seed: int, room: int, timeout_s: float
    ) -> list[Completion]:
        parameters = self._parameters(sampling, n, seed, room) | self._adapter()
        room = parameters["max_tokens"]
        longest = answers.FREE_BYTES + n * (len(prompt) + room) * answers.FRAME_TOKEN_BYTES
        choices, arrays = await self._exchange(GENERATE, parameters, prompt, timeout_s, longest)
        with self._understood():
            completions = [
                self._completion(choice, part, sampling, len(prompt), room) for choice, part in _parts(choices, arrays)
            ]
        if len(completions) != n:
            raise ServerLost(f"{self.url} sent {len(completions)} completions, not {n}")
        if sampling.tandem is not None:
            return [self._with_authors(c, sampling.tandem, prompt, seed + j) for j, c in enumerate(completions)]
        return completions

    def _parameters(self, sampling: Sampling, n: int, seed: int, room: int) -> dict[str, Any]:
        """Returns vLLM's sampling parameters."""
        greedy = sampling.temperature == 0  # truncation would not change its tokens, but the model's log-probs
        parameters: dict[str, Any] = {
            "n": n,
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "min_p": 0.0 if greedy else sampling.min_p,
            "seed": seed,
            "logprobs": 0 if sampling.logprobs else None,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": sorted(self._ends.union(sampling.stop_tokens)),
            "detokenize": bool(sampling.stop_strings),
            "include_stop_str_in_output": True,
        }
        if sampling.tandem is not None:
            settings = asdict(sampling.tandem)
            parameters["extra_args"] = {TANDEM: {name: value for name, value in settings.items() if value is not None}}
        return parameters

    async def _exchange(
        self, path: str, about: Any, tokens: np.ndarray, timeout_s: float, max_bytes: int
    ) -> tuple[Any, frames.Arrays]:
        """Sends tokens and what is said about them -> what the answer says, and its arrays."""
        body = frames.pack(about, {"tokens": tokens})
        answer = await self._http.exchange(path, body, frames.KIND, timeout_s=timeout_s, max_bytes=max_bytes)
        with self._understood():
            return frames.unpack(answer)

    def _with_authors(
        self, completion: Completion, tandem: TandemSampling, prompt: np.ndarray, seed: int
    ) -> Completion:
        """vLLM's answers have no room for authors: they are a function of seed and tokens, and are worked out again."""
        before, ids = prompt[len(prompt) - tandem.written :], self._agreed[tandem.rule.strategy]
        written = np.concatenate([before, completion.tokens]).tolist()
        authors = replay(tandem.rule, ids, seed if tandem.seed is None else tandem.seed, written)
        return replace(completion, authors=np.asarray(authors, np.bool_)[len(before) :])

    async def _agree(self, strategy: Strategy) -> None:
        """Checks once that the server has a junior, and the same boundaries. Raises RequestRefused; another vLLM would
        ignore what is asked.
        """
        if strategy in self._agreed:
            return
        if self._boundaries is None:
            raise RequestRefused("sampling.tandem without boundaries: roles.NAME.tandem gives them to the client")
        ids = self._boundaries(strategy)
        answer = await self._http.ask("POST", "/collective_rpc", {"method": "tandem_boundaries", "args": [strategy]})
        with self._understood():
            found = set(answer["results"])
        if found != {fingerprint(ids)}:
            raise RequestRefused(
                f"{self.url} is no tandem, or has another tokenizer: its boundaries are {found}; "
                "start it by this config"
            )
        self._agreed[strategy] = ids

    def _post(self, path: str, body: Any, *, timeout_s: float = CONTROL_S) -> None:
        self._http.call("POST", path, body, timeout_s=timeout_s)

    async def _room(self) -> int:
        """Returns how many tokens fit into the server's context."""
        if self._context is None:
            answer = await self._http.ask("GET", "/v1/models")
            with self._understood():
                self._context = answers.read_whole(answer["data"][0]["max_model_len"], 1)
        return self._context

    def _completion(
        self, choice: Mapping[str, Any], part: frames.Arrays, sampling: Sampling, prompt: int, room: int
    ) -> Completion:
        """Returns a completion of at most `room` tokens. Raises what `_understood` turns into ServerLost."""
        tokens = answers.read_tokens(part["tokens"], self._vocab, room)
        told = answers.read_logprobs(part["logprobs"], (len(tokens),)) if sampling.logprobs else None
        plain = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
        greedy = sampling.temperature == 0
        if greedy:
            logprobs = np.zeros(len(tokens), np.float32)  # greedy decoding draws from a point mass
        else:
            logprobs = np.full(len(tokens), np.nan, np.float32) if told is None else told
        experts = part.get("experts")
        if experts is not None and (experts.ndim != 3 or (experts.size and experts.min() < 0)):
            raise answers.AnswerError(f"experts {experts.shape}, or some below 0")
        spans = [(start, _version(version)) for start, version in choice["weight_versions"]]
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            stop=_stop(choice, self._ends),
            model_logprobs=told if plain or greedy else None,
            # Not those of which the server has not all, as after an abort.
            experts=experts if experts is not None and 0 < len(experts) == prompt + len(tokens) - 1 else None,
            versions=answers.read_versions(spans, len(tokens)),
        )

    def _understood(self) -> contextlib.AbstractContextManager[None]:
        """Takes an answer of another shape than vLLM's for none at all."""
        return answers.understood(self.url, "vLLM's")


class AdapterServer(VllmServer):
    """A server whose model stays as it is. The weights of a version are the adapter in `adapters.directory`/v{version}.

    Several roles may share the server, each with a client of its own. A refit of one then leaves the requests of all
    alone: those under way end with the adapter that they began with.
    """

    def __init__(self, url: str, token: str, settings: Vllm, *, adapters: Adapters, **known: Any) -> None:
        super().__init__(url, token, settings, **known)
        self._adapters, self._version = adapters, -1
        # vLLM's prefix cache knows an adapter by its name and path. A server may outlive a trainer, whose next start
        # writes other weights under the same version: these must have another name.
        self._start = secrets.token_hex(4)

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """Adapters come as files: there is no board to join."""

    def pause(self) -> None:
        if self._adapters.roles == 1:
            super().pause()

    def update(self, version: int, wait_s: float) -> None:
        answer = self._http.call(
            "POST", "/collective_rpc", {"method": "take_adapter", "args": self._named(version)},
            timeout_s=wait_s + MARGIN_S,
        )  # fmt: skip
        with self._understood():
            if {str(result) for result in answer["results"]} != {"True"}:  # vLLM writes each rank's answer as a text
                raise ServerLost(f"{self.url} could not load the adapter of version {version}: see its log")
        self._version = version

    def resume(self) -> None:
        if self._adapters.roles == 1:
            super().resume()

    def version(self) -> int:
        return self._version

    def _adapter(self) -> dict[str, Any]:
        if self._version < 0:
            raise ServerLost(f"{self.url} has no adapter yet: a refit brings the first")
        return {ADAPTER: [*self._named(self._version), self._version]}

    def _named(self, version: int) -> list[Any]:
        """Returns (name, number, directory) of the adapter of a version. vLLM tells adapters apart by number, from 1
        on: those of roles that share the server take turns."""
        own = self._adapters
        number = version * own.roles + own.place + 1
        return [f"{self._start}-v{version}", number, str(own.directory / f"v{version}")]


def _parts(choices: Sequence[Mapping[str, Any]], arrays: frames.Arrays) -> Iterator[tuple[Any, frames.Arrays]]:
    """Yields each choice with its own part of the arrays. Raises ValueError for parts that do not fill them."""
    kept = {name: arrays[name] for name in ("tokens", "logprobs", "experts") if name in arrays}
    rows = {name: "expert_rows" if name == "experts" else "length" for name in kept}
    begins = dict.fromkeys(kept, 0)
    for choice in choices:
        part = {}
        for name, array in kept.items():
            end = begins[name] + answers.read_whole(choice[rows[name]], 0)
            part[name] = array[begins[name] : end].copy()  # without the rest of the answer, and writable
            begins[name] = end
        yield choice, part
    if any(begins[name] != len(array) for name, array in kept.items()):
        raise ValueError(f"its choices have {begins} rows, its arrays { ({n: len(a) for n, a in kept.items()}) }")


def _stop(choice: Mapping[str, Any], ends: Collection[int]) -> Stop:
    match choice["finish_reason"], choice["stop_reason"]:
        case "stop", None:
            return Stop.EOS
        case "stop", by:
            return Stop.EOS if by in ends else Stop.STOP
        case "length", _:
            return Stop.LENGTH
        case "abort", _:
            return Stop.ABORTED
        case other:
            raise ServerLost(f"vLLM ended a completion for an unknown reason: {other}")


def _version(text: str) -> int:
    """vLLM's name for the weights it started with is "default"."""
    return -1 if text == "default" else int(text)
