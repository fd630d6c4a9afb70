"""Starts SGLang servers. This module does not import SGLang, which is installed only in the servers' environment."""

from __future__ import annotations

import json

from megatron_rl.config.base import ConfigError
from megatron_rl.config.model import WEIGHT_BYTES
from megatron_rl.engines.auth_middleware import TOKEN_FILE
from megatron_rl.engines.kind import Command, EngineKind, ServerStart
from megatron_rl.engines.sglang.client import SglangServer
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.weights import hf_model
from megatron_rl.weights.quantisation import config_of


def command(settings: Sglang, start: ServerStart) -> Command:
    """Returns the command line and environment of a server. Raises ConfigError for settings that SGLang does not
    support.
    """
    words = [
        start.python, "-P", "-m", "megatron_rl.engines.sglang.worker", "--model-path", str(start.model),
        "--host", settings.host, "--port", str(start.port), "--dtype", start.dtype, "--tp-size", str(settings.tp),
        "--max-running-requests", str(settings.max_batch),
        "--sampling-defaults", "openai",  # ignores the model directory's temperature and penalties
        "--skip-server-warmup",  # SGLang's warm-up requests do not send the job's token
        "--log-level-http", "warning",
    ]  # fmt: skip
    words += ["--context-length", str(settings.max_model_len)] if settings.max_model_len else []
    words += ["--ep-size", str(settings.tp)] if settings.expert_parallel else []
    words += ["--kv-cache-dtype", settings.kv_cache_dtype] if settings.kv_cache_dtype != "auto" else []
    if start.quantization:
        about = config_of(start.quantization, hf_model.read_architecture(start.model))
        # The model's files are not quantised and are not read: the first weight sync (refit) sends all weights.
        words += ["--quantization", start.quantization, "--load-format", "dummy"]
        words += ["--json-model-override-args", json.dumps({"quantization_config": about})]
    if start.by_priority:
        # Requests without a priority number, such as scoring requests, are served first.
        # Running requests are not interrupted for more urgent requests: this would compute their tokens again.
        words += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
        words += ["--default-priority-value", "0", "--disable-priority-preemption"]
    if not start.on_gpu and (start.quantization or settings.cache_width):
        raise ConfigError(
            "engine.quantization or engine.kv_cache_dtype without a GPU: SGLang has 8-bit kernels for GPUs only; leave "
            "both settings out"
        )
    if settings.colocate:
        if not start.on_gpu:
            raise ConfigError(
                "engine.colocate without a GPU: SGLang's memory saver needs CUDA; set engine.colocate to false"
            )
        # The weights are copied to host memory, because SGLang would lose them when it releases GPU memory.
        words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    environment = {
        TOKEN_FILE: str(start.token_file),
        "HF_HUB_OFFLINE": "1",
        # /health needs no authentication, so it must not generate text. It must also not fail during a refit.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if start.on_gpu:
        words += ["--mem-fraction-static", str(settings.memory_share)]
    else:
        more, threads = _on_cpu(settings, start)
        words, environment = words + more, environment | threads
    return Command([*words, *settings.args], environment)


def _on_cpu(settings: Sglang, start: ServerStart) -> tuple[list[str], dict[str, str]]:
    """Returns the additional command-line arguments and environment variables of a server on a CPU."""
    sizes = hf_model.read_architecture(start.model)
    token_bytes = sizes.num_layers * sizes.cached * sizes.cache_copies(settings.tp) * WEIGHT_BYTES[start.dtype]
    words = [
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--disable-overlap-schedule",
        "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
        "--max-total-tokens", str(int(settings.kv_cache_gib * 2**30) // token_bytes),
    ]  # fmt: skip
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
    if settings.tp > 1:  # without this setting, SGLang requires one NUMA node per rank
        firsts = range(0, settings.tp * settings.threads, settings.threads)
        cores = "|".join(f"{first}-{first + settings.threads - 1}" for first in firsts)
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    return words, environment


ENGINE = EngineKind(name="sglang", make_target="engines-sglang", command=command, client=SglangServer)
