"""Starts vLLM servers. This module does not import vLLM, which is installed only in the servers' environment."""

from __future__ import annotations

import json

from megatron_rl.config.base import ConfigError, read_object
from megatron_rl.engines.auth_middleware import TOKEN_FILE
from megatron_rl.engines.kind import Command, EngineKind, ServerStart
from megatron_rl.engines.vllm.client import open_client
from megatron_rl.engines.vllm.names import ARCHITECTURE, TANDEM
from megatron_rl.engines.vllm.settings import LORA_RANKS, Vllm
from megatron_rl.weights import hf_model
from megatron_rl.weights.quantisation import config_of

PLUGIN = "[vllm.general_plugins]\nmegatron_rl = megatron_rl.engines.vllm.tandem:register\n"


def command(settings: Vllm, start: ServerStart) -> Command:
    """Returns the command line and environment of a server. Raises ConfigError for settings that vLLM does not support;
    some settings are unsupported only without a GPU.
    """
    if not start.on_gpu:
        _refuse_without_gpu(settings, start)
    words = [
        start.python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(start.model),
        "--host", settings.host,
        "--port", str(start.port), "--dtype", start.dtype, "--tensor-parallel-size", str(settings.tp),
        # With "processed_logprobs", vLLM returns log-probs under the distribution from which tokens are sampled.
        "--logprobs-mode", "processed_logprobs",
        # -1: no limit on the number of most likely tokens per position that a scoring request may ask for
        "--max-logprobs", "-1",
        "--middleware", "megatron_rl.engines.vllm.routes.Routes",
        # named last, because vLLM passes a request first to the last middleware
        "--middleware", "megatron_rl.engines.auth_middleware.Guard",
        "--worker-extension-cls", "megatron_rl.engines.vllm.worker.Extension",
        "--weight-transfer-config", json.dumps({"backend": "megatron_rl"}),
        "--generation-config", "vllm",  # ignores the model directory's temperature and lengths
        "--max-num-seqs", str(settings.max_batch), "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    words += ["--max-model-len", str(settings.max_model_len)] if settings.max_model_len else []
    words += ["--enable-expert-parallel"] if settings.expert_parallel else []
    words += ["--enable-sleep-mode"] if settings.colocate else []
    words += ["--scheduling-policy", "priority"] if start.by_priority else []
    words += ["--kv-cache-dtype", settings.kv_cache_dtype] if settings.kv_cache_dtype != "auto" else []
    if start.quantization:
        about = config_of(start.quantization, hf_model.read_architecture(start.model))
        # The model's files are not quantised and are not read: the first weight sync (refit) sends all weights.
        words += ["--load-format", "dummy", "--hf-overrides", json.dumps({"quantization_config": about})]
    environment = {
        TOKEN_FILE: str(start.token_file),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": settings.host,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    on_gpu = ["--gpu-memory-utilization", str(settings.memory_share)], dict[str, str]()
    for more_words, variables in (on_gpu if start.on_gpu else _on_cpu(settings), _for_role(start)):
        words += more_words
        environment |= variables
    return Command([*words, *settings.args], environment, PLUGIN)


def _refuse_without_gpu(settings: Vllm, start: ServerStart) -> None:
    """Raises ConfigError for a setting that needs a GPU."""
    refused = {
        "engine.colocate without a GPU: vLLM's sleep mode, which gives the trainer its memory back, needs CUDA; set "
        "engine.colocate to false": settings.colocate,
        "engine.expert_parallel without a GPU: vLLM's kernels for CPUs end with a fault; set it to false, tp cuts "
        "experts too": settings.expert_parallel,
        "engine.quantization without a GPU: vLLM has 8-bit kernels for GPUs only; set it to null": bool(
            start.quantization
        ),
        "engine.kv_cache_dtype without a GPU: vLLM has 8-bit caches on GPUs only; set it to auto": settings.cache_width
        == 1,
        "router_replay without a GPU: of vLLM's two model runners one tells the experts, and that one needs Triton; "
        "set it to false": start.tells_experts,
    }
    for problem, asked in refused.items():
        if asked:
            raise ConfigError(problem)


def _on_cpu(settings: Vllm) -> tuple[list[str], dict[str, str]]:
    # On a CPU, chunked prefill of a request with a seed crashes vLLM 0.32: "CPU Generator does not use offset".
    words = ["--enforce-eager", "--no-enable-chunked-prefill"]
    # On a processor with AMX, vLLM would select latent attention kernels that do not support float32.
    # The backend CPU_MLA runs on any processor with any dtype. Attention without latents ignores the option.
    words += ["--attention-backend", "CPU_MLA"]
    if settings.tp == 1:
        # By default, vLLM runs the model in a separate process that starts with OpenMP's environment variables.
        # The separate process is not needed, because the whole server gets these variables. Without it, the server
        # starts sooner and answers faster.
        words += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    return words, {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib))), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads), "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }  # fmt: skip


def _for_role(start: ServerStart) -> tuple[list[str], dict[str, str]]:
    """Returns the command line arguments and environment variables for router replay, LoRA adapters or Tandem RL, if
    the server's role uses one of them. Raises ConfigError if the config.json of a Tandem RL senior does not name the
    model's class.
    """
    if start.tells_experts:
        return ["--enable-return-routed-experts"], {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if start.adapter_ranks:
        # Per role, vLLM holds two adapters: the newest adapter, and the previous adapter for requests in progress.
        room = next(rank for rank in LORA_RANKS if rank >= max(start.adapter_ranks))
        count = 2 * len(start.adapter_ranks)
        return ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(count)], {}
    if start.junior is None:
        return [], {}
    architectures = read_object(start.model / "config.json").get("architectures")
    if not architectures:
        raise ConfigError(
            f"{start.model}/config.json has no `architectures`: "
            "a tandem must be told the senior's class, such as Qwen2ForCausalLM"
        )
    settings = {"architectures": architectures, "junior": str(start.junior), "tokenizer": str(start.tokenizer)}
    words = [
        "--hf-overrides", json.dumps({"architectures": [ARCHITECTURE]}),
        "--additional-config", json.dumps({TANDEM: settings}),
        "--logits-processors", "megatron_rl.engines.vllm.tandem:Authors",
    ]  # fmt: skip
    words += ["--enforce-eager"] if start.on_gpu else []
    # vLLM's second model runner does not support the kind of logits processor that Tandem RL needs.
    return words, {"VLLM_USE_V2_MODEL_RUNNER": "0"}


ENGINE = EngineKind(name="vllm", make_target="engines", command=command, client=open_client)
