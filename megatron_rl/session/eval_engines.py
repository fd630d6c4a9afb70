"""Opens engines of models that are not trained: the models of an evaluation, or a teacher.

The engines of a training run are opened by open_engines.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_rl.algorithms.tandem_authors import boundaries
from megatron_rl.chat_template import tokenizer_of
from megatron_rl.cluster.host_address import own_address
from megatron_rl.config.base import ConfigError
from megatron_rl.config.engines import Embedded, Servers
from megatron_rl.config.model import Model
from megatron_rl.engines.data_parallel_engine import DataParallelEngine
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.kind import ModelFacts, kind_of
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import given
from megatron_rl.engines.protocol import Engine
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_process import make_token
from megatron_rl.session.server_connection import gpus_of, start_server, token_file, visible_gpus
from megatron_rl.spec.run_spec import EngineSpec, RoleSpec
from megatron_rl.weights import hf_model
from megatron_rl.world import World


@dataclass(frozen=True)
class OpenModels:
    """The opened models of an evaluation. A model with several roles is opened once. Used on the driver (rank 0)
    only."""

    engines: Mapping[Model, Engine]
    readers: Mapping[Model, EmbeddedEngine]  # engines of the models whose token distributions are compared
    tokenizers: Mapping[Model, Any]


def open_models(
    engines: EngineSpec, read: Sequence[Model], world: World, stack: contextlib.ExitStack,
    environment: Mapping[str, str],
) -> OpenModels:  # fmt: skip
    """Opens the engines of the specification `engines`. Also loads the models `read`, whose token distributions are
    compared, on the driver (rank 0).

    Embedded engines are loaded in this process. Servers are started and end when `stack` closes. `environment`: the
    environment of the servers. Collective.
    """
    models = {name: role.model for name, role in engines.opened.items()}
    tokenizers = {model: tokenizer_of(model) for model in dict.fromkeys([*models.values(), *read])}
    opened = open_fixed_engines(
        engines, {name: tokenizers[model] for name, model in models.items()}, world, stack, environment
    )
    readers = {
        models[name]: engine.local
        for name, engine in opened.items()
        if isinstance(engine, DataParallelEngine) and models[name] in read
    }
    for model in dict.fromkeys(read) if world.rank == 0 else []:
        if model not in readers:
            readers[model] = embedded_engine(model, engines.settings, tokenizers[model])
            readers[model].load_pretrained()
    return OpenModels({models[name]: engine for name, engine in opened.items()}, readers, tokenizers)


def open_fixed_engines(
    engines: EngineSpec, tokenizers: Mapping[str, Any], world: World, stack: contextlib.ExitStack,
    environment: Mapping[str, str],
) -> dict[str, Engine]:  # fmt: skip
    """Returns the engine of each role, with the weights of the role's model directory.

    The engines are used on the driver (rank 0). If the engines are servers, other ranks get an empty dict. Servers that
    this function starts end when `stack` closes. `environment`: the environment of the servers. Collective. Raises
    ConfigError for settings that cannot be used, and StartError for a server that does not start.
    """
    settings, out = engines.settings, dict[str, Engine]()
    if isinstance(settings, Embedded):
        for name, role in engines.opened.items():
            own = embedded_engine(role.model, settings, tokenizers[name])
            own.load_pretrained()
            out[name] = DataParallelEngine(world, name, own)
        return out
    if world.rank != 0:
        return out
    settings = replace(settings, host=own_address(settings.host))
    if settings.urls and (wrong := set(settings.urls) ^ engines.opened.keys()):
        raise ConfigError(
            f"engine.urls: {', '.join(sorted(wrong))}: give servers for each of {', '.join(engines.opened)}"
        )
    for name, role in engines.opened.items():
        servers = _servers(engines, settings, name, model_facts(role, tokenizers[name]), stack, environment)
        out[name] = engine = given(name, servers, replace(Limits.of(settings), servers=len(servers)))
        stack.callback(engine.close)
    return out


def embedded_engine(model: Model, settings: Embedded | Servers, tokenizer: Any, **more: Any) -> EmbeddedEngine:
    """Returns the embedded engine of a model (an engine in this process), before its weights are loaded. `more`:
    further arguments of EmbeddedEngine."""
    graphs = not isinstance(settings, Embedded) or settings.cuda_graphs
    return EmbeddedEngine(
        model.path, max_batch=settings.max_batch, dtype=getattr(torch, model.dtype), tokenizer=tokenizer,
        cuda_graphs=graphs, **more,
    )  # fmt: skip


def model_facts(role: RoleSpec, tokenizer: Any) -> ModelFacts:
    """Returns what a client must know about the model of a server: end tokens, vocabulary size and boundary tokens."""
    directory = hf_model.local_directory(role.model.path)
    architecture, own = hf_model.read_architecture(directory), tokenizer.eos_token_id
    ends = hf_model.eos_tokens(directory, architecture) | (frozenset() if own is None else {own})
    found = None if role.tandem is None else functools.cache(functools.partial(boundaries, tokenizer))
    return ModelFacts(ends=ends, vocab=architecture.vocab, boundaries=found)


def _servers(
    engines: EngineSpec, settings: Servers, role: str, facts: ModelFacts, stack: contextlib.ExitStack,
    environment: Mapping[str, str],
) -> list[Server]:  # fmt: skip
    """Returns clients of a role's servers. The servers are those at engine.urls, or are started by this function, which
    waits until they are ready."""
    if settings.urls:
        token, timeout_s = make_token(token_file(engines, settings)), engines.refit.timeout_s
        return [kind_of(settings).client(url, token, settings, timeout_s, facts) for url in settings.urls[role]]
    servers = []
    for replica in range(settings.replicas):
        own = visible_gpus(gpus_of(engines, settings, role, replica), environment)
        process, server = start_server(engines, settings, role, replica, {**environment, **own}, facts)
        stack.callback(process.stop)
        process.wait_until(server.ready, settings.start_timeout_s)
        servers.append(server)
    return servers
