"""A vLLM server: how it is started, and a client of it. vLLM itself is imported by nothing here: it lives in the server's environment."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.authors import fingerprint, replay
from megatron_rl.config.schema import ConfigError, Strategy, Vllm
from megatron_rl.engines import sampler
from megatron_rl.engines.base import Completion, Sampling, Tandem
from megatron_rl.engines.guard import TOKEN_FILE
from megatron_rl.engines.launch import Command
from megatron_rl.engines.server import Http, RequestRefused, ServerLost
from megatron_rl.engines.vllm_route import PATH as GENERATE
from megatron_rl.types import Stop

TANDEM = "tandem"  # what vllm_tandem.py finds its settings under: the server's, and a request's
ARCHITECTURE = "MegatronRlTandem"
MARGIN_S = 30.0  # beyond what a refit may take, before its request is given up
Boundaries = Callable[[Strategy], frozenset[int]]


def command(
    settings: Vllm, *, python: str, model: Path, dtype: str, port: int, token_file: Path, on_gpu: bool
) -> Command:
    """The server's command line and environment. `python`: interpreter of an environment that has vLLM. Raises ConfigError."""
    if settings.expert_parallel and not on_gpu:
        raise ConfigError(
            "engine.expert_parallel without a GPU: vLLM's kernels for CPUs end with a fault; set it to false, tp cuts experts too"
        )
    words = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", settings.host, "--port", str(port),
        "--dtype", dtype, "--tensor-parallel-size", str(settings.tp),
        "--logprobs-mode", "processed_logprobs",  # of the distribution that was sampled from
        "--middleware", "megatron_rl.engines.vllm_route.Generate",
        "--middleware", "megatron_rl.engines.guard.Guard",  # the last stands before all others
        "--worker-extension-cls", "megatron_rl.engines.vllm_worker.Extension",
        "--weight-transfer-config", json.dumps({"backend": "megatron_rl"}),
        "--generation-config", "vllm",  # not the model directory's idea of temperature and lengths
        "--max-num-seqs", str(settings.max_batch), "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    words += ["--max-model-len", str(settings.max_model_len)] if settings.max_model_len else []
    words += ["--enable-expert-parallel"] if settings.expert_parallel else []
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
        # A request with a seed whose prompt is prefilled in parts ends vLLM 0.32 on a CPU: "CPU Generator does not use offset".
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib))), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.threads), "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }  # fmt: skip
    return Command([*words, *settings.args], environment)


def with_tandem(start: Command, *, model: Path, junior: Path, tokenizer: Path) -> Command:
    """The command of a server whose model is a senior (`model`) and a frozen junior. Its imports need vLLM's plug-in: launch.PLUGIN.
    Raises ConfigError for a model that does not name its class."""
    architectures = json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures")
    if not architectures:
        raise ConfigError(
            f"{model}/config.json has no `architectures`: a tandem must be told the senior's class, such as Qwen2ForCausalLM"
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


def with_experts(start: Command, *, on_gpu: bool) -> Command:
    """The command of a server that tells which experts it chose for each token. Raises ConfigError without a GPU."""
    if not on_gpu:
        raise ConfigError(
            "router_replay without a GPU: of vLLM's two model runners one tells the experts, and that one needs Triton; set it to false"
        )
    return Command(
        [*start.words, "--enable-return-routed-experts"], {**start.environment, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    )


class VllmServer:
    """Implements server.Server. Verified with vLLM 0.32."""

    def __init__(
        self, url: str, token: str, settings: Vllm, *, ends: Collection[int], refit_timeout_s: float,
        boundaries: Boundaries | None = None,
    ) -> None:  # fmt: skip
        """`ends`: the model's end-of-sequence tokens. `boundaries`: of a tandem's strategies."""
        self._http, self.url = Http(url, token), url
        self._pause, self._refit_timeout_s, self._at_once = settings.pause, refit_timeout_s, settings.max_batch
        self._ends = frozenset(ends)
        self._context: int | None = None
        self._boundaries = boundaries
        self._agreed: dict[Strategy, frozenset[int]] = {}  # boundaries that the server has too

    def ready(self) -> bool:
        return self._http.answers("/health")

    def generate(self, prompt: Sequence[int], sampling: Sampling, *, seed: int, timeout_s: float) -> list[Completion]:
        """See server.Server. Raises ValueError for impossible sampling settings. A prompt that fills the context comes back empty."""
        sampler.check(sampling)
        room = self._room() - len(prompt)
        if room <= 0:
            authors = None if sampling.tandem is None else []
            return [Completion(tokens=[], logprobs=[], stop=Stop.LENGTH, authors=authors) for _ in range(sampling.n)]
        if sampling.tandem is not None:
            self._agree(sampling.tandem.rule.strategy)
        at_once = self._at_once if sampling.temperature > 0 else 1  # vLLM draws a greedy answer once
        if sampling.temperature == 0 and sampling.tandem is None:
            return self._draw(prompt, sampling, 1, seed, room, timeout_s) * sampling.n
        out: list[Completion] = []
        while len(out) < sampling.n:  # sample j has seed + j, in vLLM too
            out += self._draw(prompt, sampling, min(sampling.n - len(out), at_once), seed + len(out), room, timeout_s)
        return out

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        self._post(
            "/init_weight_transfer_engine",
            {"init_info": {"host": host, "port": port, "secret": secret, "replica": replica}},
        )

    def pause(self) -> None:
        self._post(f"/pause?mode={self._pause}", None, timeout_s=self._refit_timeout_s)

    def update(self, version: int, wait_s: float) -> None:
        self._post("/start_weight_update", {})
        info = {"update_info": {"version": version, "wait_s": wait_s}}
        self._post("/update_weights", info, timeout_s=wait_s + self._refit_timeout_s + MARGIN_S)
        self._post("/finish_weight_update", {"weight_version": str(version)})
        self._post("/reset_prefix_cache", None)  # its keys know tokens, not weights: old entries would be read
        found = self.version()
        if found != version:
            raise ServerLost(f"{self.url} has version {found} of the weights after a refit to {version}")

    def resume(self) -> None:
        self._post("/resume", None)

    def version(self) -> int:
        answer = self._http.call("GET", "/weight_info")
        with self._understood():
            return _version(answer["weight_version"])

    def hang_up(self) -> None:
        self._http.hang_up()

    def close(self) -> None:
        self._http.close()

    def _draw(
        self, prompt: Sequence[int], sampling: Sampling, n: int, seed: int, room: int, timeout_s: float
    ) -> list[Completion]:
        greedy = (
            sampling.temperature == 0
        )  # truncation would not change its tokens, but the log-probs that stand for the model's
        parameters = {
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
            settings = asdict(replace(sampling.tandem, junior_weight=0.0))
            parameters["extra_args"] = {TANDEM: {name: value for name, value in settings.items() if value is not None}}
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        answer = self._http.call("POST", GENERATE, body, timeout_s=timeout_s)
        with self._understood():
            completions = [
                _completion(c, sampling, self._ends, len(prompt))
                for c in sorted(answer["choices"], key=lambda c: c["index"])
            ]
        if len(completions) != n:
            raise ServerLost(f"{self.url} sent {len(completions)} completions, not {n}")
        if sampling.tandem is not None:
            return [self._with_authors(c, sampling.tandem, prompt, seed + j) for j, c in enumerate(completions)]
        return completions

    def _with_authors(self, completion: Completion, tandem: Tandem, prompt: Sequence[int], seed: int) -> Completion:
        """vLLM's answers have no room for authors: they are a function of seed and tokens, and are worked out again."""
        before, ids = list(prompt[len(prompt) - tandem.written :]), self._agreed[tandem.rule.strategy]
        authors = replay(tandem.rule, ids, seed if tandem.seed is None else tandem.seed, before + completion.tokens)
        return replace(completion, authors=authors[len(before) :])

    def _agree(self, strategy: Strategy) -> None:
        """Once: the server has a junior, and the same boundaries. Raises RequestRefused; another vLLM would ignore what is asked."""
        if strategy in self._agreed:
            return
        if self._boundaries is None:
            raise RequestRefused("sampling.tandem without boundaries: roles.NAME.tandem gives them to the client")
        ids = self._boundaries(strategy)
        answer = self._http.call("POST", "/collective_rpc", {"method": "tandem_boundaries", "args": [strategy]})
        with self._understood():
            found = set(answer["results"])
        if found != {fingerprint(ids)}:
            raise RequestRefused(
                f"{self.url} is no tandem, or has another tokenizer: its boundaries are {found}; start it by this config"
            )
        self._agreed[strategy] = ids

    def _post(self, path: str, body: Any, **options: float) -> None:
        self._http.call("POST", path, body, **options)

    def _room(self) -> int:
        """Tokens that fit into the server's context."""
        if self._context is None:
            answer = self._http.call("GET", "/v1/models")
            with self._understood():
                self._context = int(answer["data"][0]["max_model_len"])
        return self._context

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """JSON of another shape than vLLM's is as bad as none."""
        try:
            yield
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerLost(f"{self.url} sent an answer that is not vLLM's: {type(error).__name__} {error}") from error


def _completion(choice: Mapping[str, Any], sampling: Sampling, ends: Collection[int], prompt: int) -> Completion:
    tokens = [int(token) for token in choice["token_ids"]]
    told = [float(logprob) for logprob in choice["logprobs"]] if sampling.logprobs else None
    logprobs = [math.nan] * len(tokens) if told is None else told
    if len(logprobs) != len(tokens):
        raise ServerLost(f"vLLM sent {len(logprobs)} log-probs for {len(tokens)} tokens")
    if told is not None and not all(map(math.isfinite, told)):
        raise ServerLost("vLLM sent log-probs that are not numbers: are the weights?")
    plain = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    greedy = sampling.temperature == 0
    return Completion(
        tokens=tokens,
        logprobs=[0.0] * len(tokens) if greedy else logprobs,  # greedy decoding draws from a point mass
        stop=_stop(choice, ends),
        model_logprobs=told if plain or greedy else None,
        experts=_experts(choice["routed_experts"], prompt + len(tokens) - 1),
        versions=[(start, _version(version)) for start, version in choice["weight_versions"]],
    )


def _experts(text: str | None, rows: int) -> Tensor | None:
    """The server's .npy file in base64 -> [rows, layers, k]; None where it has not all of them, as after an abort."""
    if text is None:
        return None
    found = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return torch.from_numpy(found.astype(np.int16)) if found.ndim == 3 and len(found) == rows else None


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
