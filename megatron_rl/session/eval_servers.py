"""Servers for an evaluation or a teacher: started here from model directories, or found at given addresses with the
models they have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.cluster.address import free_port, own_address
from megatron_rl.config.schema import ConfigError, EvalConfig, Model, Servers
from megatron_rl.engines.kind import ModelFacts, ServerStart, kind_of
from megatron_rl.engines.launch import ServerProcess, make_token
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.pool import ServerEngine, given
from megatron_rl.engines.roster import Listing
from megatron_rl.engines.server import Server
from megatron_rl.session.launch import has_gpu
from megatron_rl.session.servers import ENGINES, TOKEN, connect
from megatron_rl.session.serving import visible_gpus
from megatron_rl.weights import hf

CONTROL_S = 600.0  # of verbs other than generate; an evaluation uses none that waits


def start(
    settings: Servers, names: Mapping[Model, str], tokenizers: Mapping[Model, Any], directory: Path,
    stack: contextlib.ExitStack, environment: Mapping[str, str],
) -> dict[Model, ServerEngine]:  # fmt: skip
    """Returns the engines of the models in `names`, on the driver. Servers that are started here end with `stack`.

    `names`: those that engine.urls and the logs have for the models. `directory`: where the token and the logs go.
    Raises ConfigError, and StartError for a server that does not come.
    """
    settings = replace(settings, host=own_address(settings.host))
    directory = directory.resolve() / ENGINES
    token = make_token(Path(settings.token_file) if settings.token_file else directory / TOKEN)
    if settings.urls and (wrong := set(settings.urls) ^ set(names.values())):
        raise ConfigError(
            f"engine.urls: {', '.join(sorted(wrong))}: give servers for each of {', '.join(names.values())}"
        )
    engines = {}
    for number, model in enumerate(names):
        local = hf.local_directory(model.path)
        architecture = hf.read_architecture(local)
        own = tokenizers[model].eos_token_id
        ends = hf.eos_tokens(local, architecture) | (frozenset() if own is None else {own})
        client = connect(settings, token, CONTROL_S, ModelFacts(ends=ends, vocab=architecture.vocab))
        if settings.urls:
            servers = [client(_listing(names[model], i, url)) for i, url in enumerate(settings.urls[names[model]])]
        else:
            starter = _Starter(settings, directory, environment, stack)
            places = range(number * settings.replicas, (number + 1) * settings.replicas)
            servers = [starter.start(names[model], place, client, local, model.dtype) for place in places]
        limits = replace(Limits.of(settings), servers=len(servers))
        engines[model] = given(names[model], servers, limits)
        stack.callback(engines[model].close)
    return engines


def names_of(config: EvalConfig) -> dict[Model, str]:
    """Returns the names that engine.urls has for the models of an evaluation: those of their settings; the first of a
    model with two parts.
    """
    judging = None if config.verifier is None else config.verifier.model
    parts = {"model": config.model, "junior": config.junior, "verifier": judging}
    names: dict[Model, str] = {}
    for name, model in parts.items():
        if model is not None:
            names.setdefault(model, name)
    return names


@dataclass(frozen=True)
class _Starter:
    """Makes server processes that end with `stack`."""

    settings: Servers
    directory: Path
    environment: Mapping[str, str]
    stack: contextlib.ExitStack

    def start(self, name: str, number: int, client: Callable[[Listing], Server], model: Path, dtype: str) -> Server:
        """Waits until it answers. Raises ConfigError, StartError."""
        settings, kind = self.settings, kind_of(self.settings)
        gpus = settings.gpus[number * settings.tp : (number + 1) * settings.tp]
        environment = {**self.environment, **visible_gpus(gpus, self.environment)}
        port = free_port(settings.host)
        start = ServerStart(
            python=kind.interpreter(settings), model=model, dtype=dtype, port=port, on_gpu=has_gpu(environment),
            token_file=Path(settings.token_file) if settings.token_file else self.directory / TOKEN,
        )  # fmt: skip
        log = self.directory.parent / "logs" / f"engine_{name}_{number}.log"
        process = ServerProcess(kind.command(settings, start), log, environment, imports=self.directory / "imports")
        self.stack.callback(process.stop)
        server = client(_listing(name, number, f"http://{settings.host}:{port}"))
        process.wait_until(server.ready, settings.start_timeout_s)
        return server


def _listing(name: str, number: int, url: str) -> Listing:
    return Listing(role=name, replica=number, url=url, incarnation="", log="")
