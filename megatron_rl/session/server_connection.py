"""Starts one server of a run and connects to it, for `train`, `serve`, `eval` and `generate`.

This module must be fast to import, because the supervisor process of every server imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.cluster.host_address import free_port
from megatron_rl.config.base import ConfigError, refuse, refusing
from megatron_rl.config.engines import Servers
from megatron_rl.engines import user_families
from megatron_rl.engines.kind import ModelFacts, ServerStart, kind_of
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_process import ServerProcess, make_token
from megatron_rl.engines.server_registry import Listing
from megatron_rl.session.launch_ranks import has_gpu, visible_gpus
from megatron_rl.spec import server_gpus
from megatron_rl.spec.run_spec import EngineSpec

ENGINES, TOKEN = "engines", "token"  # folder of the server registry in a run directory; token file in this folder


def token_file(engines: EngineSpec, settings: Servers) -> Path:
    """Returns the path of the file with the authentication token that every request to the servers must contain."""
    return Path(settings.token_file).resolve() if settings.token_file else engines.directory.resolve() / ENGINES / TOKEN


def log_of(engines: EngineSpec, role: str, replica: int) -> Path:
    """Returns the path of the log file of one server, identified by its role and replica index."""
    return engines.directory.resolve() / "logs" / f"engine_{role}_{replica}.log"


def connect(
    settings: Servers, token: str, refit_timeout_s: float, facts: ModelFacts | None = None
) -> Callable[[Listing], Server]:
    """Returns a function that creates a client for a server, given the server's entry in the server registry."""
    client, known = kind_of(settings).client, facts or ModelFacts()
    return lambda listing: client(listing.url, token, settings, refit_timeout_s, known)


def start_server(
    engines: EngineSpec, settings: Servers, role: str, replica: int, environment: Mapping[str, str],
    facts: ModelFacts | None = None,
) -> tuple[ServerProcess, Server]:  # fmt: skip
    """Starts a server of a role. Returns (process of the server, client of the server). The server may not be ready
    yet.

    `settings`: the settings of `engines`, with `host` replaced by the address at which the server listens.
    `environment`: the server's environment variables, including CUDA_VISIBLE_DEVICES. Raises ConfigError for invalid
    settings, and StartError if the server cannot be started.
    """
    kind, own = kind_of(settings), engines.roles[role]
    model = local_model(f"roles.{role}.model.path", own.model.path)
    loras = [other.lora for other in engines.opened.values() if other.servers == role]
    start = ServerStart(
        python=kind.interpreter(settings), model=model, dtype=own.model.dtype, port=free_port(settings.host),
        token_file=token_file(engines, settings), on_gpu=has_gpu(environment), tells_experts=own.router_replay,
        by_priority=engines.by_priority,
        quantization=settings.quantization if own.has_policy and engines.trains else None,
        adapter_ranks=tuple(lora.rank for lora in loras if lora is not None and settings.serves_adapters),
    )  # fmt: skip
    if own.tandem is not None:
        junior = local_model(f"roles.{role}.tandem.junior", own.tandem.junior or model)
        tokenizer = local_model(f"roles.{role}.model.tokenizer", own.model.tokenizer or model)
        start = replace(start, junior=junior, tokenizer=tokenizer)
    url, token = f"http://{settings.host}:{start.port}", make_token(start.token_file)
    client = kind.client(url, token, settings, engines.refit.timeout_s, facts or ModelFacts())
    process = ServerProcess(
        kind.command(settings, start), log_of(engines, role, replica),
        {**environment, **user_families.variables(engines.families)},
        imports=engines.directory.resolve() / ENGINES / "imports",
    )  # fmt: skip
    return process, client


def local_model(setting: str, path: str | Path) -> Path:
    """Returns the local directory of a model, given its path or its Hugging Face Hub name.

    `setting`: name of the setting, used in the error message. Raises ConfigError if the model is not on this machine.
    """
    path = Path(path)
    if path.is_dir():
        return path.resolve()
    # imported here because the import takes seconds and is only needed for hub names
    from megatron_rl.weights import hf_model

    with refusing(lambda error: f"{setting}: {error}", FileNotFoundError):
        return hf_model.local_directory(path)


def cuda_variables(numbers: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns {"CUDA_VISIBLE_DEVICES": ...}, which restricts a server to some GPUs, or {} if `numbers` is empty.

    `numbers`: indices into the GPUs that this process sees. With CUDA_VISIBLE_DEVICES=4,5, index 1 is GPU 5. Raises
    ConfigError for an index out of range.
    """
    if not numbers:
        return {}
    names = visible_gpus(environment)
    if names is not None and max(numbers) >= len(names):
        listed = environment["CUDA_VISIBLE_DEVICES"]
        raise ConfigError(f"engine.gpus names GPU {max(numbers)}: CUDA_VISIBLE_DEVICES = {listed} has {len(names)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(n) if names is None else names[n] for n in numbers)}


def gpus_of(engines: EngineSpec, settings: Servers, role: str, replica: int) -> Sequence[int]:
    """Returns the GPU indices of one server: the server's `tp` entries of engine.gpus. The setting engine.gpus lists
    the GPUs of all servers of a host, ordered by role and then by replica.

    Raises ConfigError if two servers share a GPU, or if there are too few GPUs.
    """
    refuse(*server_gpus.number_problems(engines))
    share = settings.replicas // engines.hosts
    first = (engines.server_roles.index(role) * share + replica % share) * settings.tp
    return settings.gpus[first : first + settings.tp]


def check_gpus(engines: EngineSpec, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if the servers cannot use the GPUs of this host, or if engine.colocate is set and the host has
    no GPU."""
    if has_gpu(environment):
        refuse(*server_gpus.device_problems(engines, 1))
    elif isinstance(engines.settings, Servers) and engines.settings.colocate:
        raise ConfigError(
            f"engine.colocate without a GPU: the sleep mode of {engines.settings.kind}, which gives the trainer its "
            "memory back, needs CUDA; set engine.colocate to false"
        )
