"""Starts one server of a run and connects to it, for `train`, `serve`, `eval` and `generate`.

This module must be fast to import, because the supervisor process of every server imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


def connect(
    settings: Servers, token: str, refit_timeout_s: float, facts: ModelFacts | None = None
) -> Callable[[Listing], Server]:
    """Returns a function that creates a client for a server, given the server's entry in the server registry."""
    client, known = kind_of(settings).client, facts or ModelFacts()
    return lambda listing: client(listing.url, token, settings, refit_timeout_s, known)


@dataclass(frozen=True)
class HostServer:
    """One server of a run that runs on this host, identified by its role and replica index."""

    engines: EngineSpec
    settings: Servers  # the settings of `engines`, with `host` replaced by the address at which the server listens
    role: str
    replica: int
    environment: Mapping[str, str]  # the server's environment variables
    gpus: Sequence[int] = ()  # indices of the GPUs of this host that the server uses; if empty, those in engine.gpus

    @property
    def log(self) -> Path:
        return self.engines.directory.resolve() / "logs" / f"engine_{self.role}_{self.replica}.log"

    @contextlib.contextmanager
    def running(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[ServerProcess, Server]]:
        """Context manager that starts the server, waits until it is ready or `stop` returns True, and ends it on exit.
        Yields (process of the server, client of the server); the client requests no completions.

        Raises ConfigError for invalid settings, and StartError if the server does not start."""
        engines, settings, kind = self.engines, self.settings, kind_of(self.settings)
        gpus = self.gpus or gpus_of(engines, settings, self.role, self.replica)
        environment = {**self.environment, **cuda_variables(gpus, self.environment)}
        start = self._start(on_gpu=has_gpu(environment))
        url, token = f"http://{settings.host}:{start.port}", make_token(start.token_file)
        client = kind.client(url, token, settings, engines.refit.timeout_s, ModelFacts())
        process = ServerProcess(
            kind.command(settings, start), self.log, {**environment, **user_families.variables(engines.families)},
            imports=engines.directory.resolve() / ENGINES / "imports",
        )  # fmt: skip
        try:
            process.wait_until(client.ready, settings.start_timeout_s, stop)
            yield process, client
        finally:
            process.stop()
            client.close()

    def _start(self, *, on_gpu: bool) -> ServerStart:
        """Returns the properties of the server, with a port that is free now."""
        engines, settings, role = self.engines, self.settings, self.engines.roles[self.role]
        model = local_model(f"roles.{self.role}.model.path", role.model.path)
        loras = [other.lora for other in engines.opened.values() if other.servers == self.role]
        start = ServerStart(
            python=kind_of(settings).interpreter(settings), model=model, dtype=role.model.dtype,
            port=free_port(settings.host), token_file=token_file(engines, settings), on_gpu=on_gpu,
            tells_experts=role.router_replay, by_priority=engines.by_priority,
            quantization=settings.quantization if role.has_policy and engines.trains else None,
            adapter_ranks=tuple(lora.rank for lora in loras if lora is not None and settings.serves_adapters),
        )  # fmt: skip
        if role.tandem is None:
            return start
        junior = local_model(f"roles.{self.role}.tandem.junior", role.tandem.junior or model)
        tokenizer = local_model(f"roles.{self.role}.model.tokenizer", role.model.tokenizer or model)
        return replace(start, junior=junior, tokenizer=tokenizer)


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
