"""Opens engines of models that are not trained: the models of an evaluation, or a teacher.

The engines of a training run are opened by open_engines.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_rl.algorithms.tandem_authors import boundaries
from megatron_rl.cluster.host_address import address_among_ranks, own_address
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
from megatron_rl.messages.world import World
from megatron_rl.session.launch_ranks import LOCAL
from megatron_rl.session.server_connection import cuda_variables, gpus_of, start_server, token_file
from megatron_rl.spec.run_spec import EngineSpec, RoleSpec
from megatron_rl.texts.chat_template import tokenizer_of
from megatron_rl.weights import hf_model


@dataclass(frozen=True)
class OpenModels:
    """The opened models of an evaluation. A model that has several roles is opened once. Used on the driver (rank 0)
    only."""

    engines: Mapping[Model, Engine]
    readers: Mapping[Model, EmbeddedEngine]  # engines of the models whose token distributions are compared
    tokenizers: Mapping[Model, Any]


def open_models(
    engines: EngineSpec, read: Sequence[Model], world: World, stack: contextlib.ExitStack,
    environment: Mapping[str, str],
) -> OpenModels:  # fmt: skip
    """Opens the engines of the specification `engines`. On the driver (rank 0), also loads the models in `read`, whose
    token distributions will be compared.

    Embedded engines are loaded in this process. Servers are started, and end when `stack` closes. `environment`:
    environment variables of the servers. Collective.
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
    environment: Mapping[str, str], *, local_rank: int = 0,
) -> dict[str, Engine]:  # fmt: skip
    """Returns {role: engine} with the weights of the roles' model directories. Collective.

    The engines are used on the driver (rank 0). If the engines are servers, other ranks get an empty dict. Servers that
    this function starts end when `stack` closes. If servers are on several hosts (`engines.hosts`), the rank with
    `local_rank` 0 of each host starts an equal share of the servers. `environment`: environment variables of the
    servers. Raises ConfigError for invalid settings, and StartError for a server that does not start.
    """
    settings, out = engines.settings, dict[str, Engine]()
    if isinstance(settings, Embedded):
        for name, role in engines.opened.items():
            own = embedded_engine(role.model, settings, tokenizers[name])
            own.load_pretrained()
            out[name] = DataParallelEngine(world, name, own)
        return out
    alone = settings.host == LOCAL and engines.hosts > 1  # the driver may be on another host, which cannot reach LOCAL
    host = address_among_ranks(environment) if alone else own_address(settings.host)
    starter = _Starter(engines, replace(settings, host=host), stack, environment)
    urls = settings.urls if engines.hosts == 1 or settings.urls else starter.on_hosts(world, local_rank)
    if world.rank != 0:
        return out
    if urls and (wrong := set(urls) ^ engines.opened.keys()):
        raise ConfigError(
            f"engine.urls: {', '.join(sorted(wrong))}: give servers for each of {', '.join(engines.opened)}"
        )
    for name, role in engines.opened.items():
        facts = model_facts(role, tokenizers[name])
        if urls:
            token, timeout_s = make_token(token_file(engines, settings)), engines.refit.timeout_s
            servers = [kind_of(settings).client(url, token, settings, timeout_s, facts) for url in urls[name]]
        else:
            servers = starter.start(name, range(settings.replicas), facts)
        out[name] = engine = given(name, servers, replace(Limits.of(settings), servers=len(servers)))
        stack.callback(engine.close)
    return out


def embedded_engine(model: Model, settings: Embedded | Servers, tokenizer: Any, **more: Any) -> EmbeddedEngine:
    """Returns an embedded engine (an engine in this process) for a model. The engine's weights are not loaded yet.
    `more`: further arguments of EmbeddedEngine."""
    graphs = not isinstance(settings, Embedded) or settings.cuda_graphs
    return EmbeddedEngine(
        model.path, max_batch=settings.max_batch, dtype=getattr(torch, model.dtype), tokenizer=tokenizer,
        cuda_graphs=graphs, **more,
    )  # fmt: skip


def model_facts(role: RoleSpec, tokenizer: Any) -> ModelFacts:
    """Returns facts about a server's model that the server's client needs: end tokens, vocabulary size, and the tokens
    at which Tandem RL may change the author."""
    directory = hf_model.local_directory(role.model.path)
    architecture = hf_model.read_architecture(directory)
    ends = hf_model.eos_tokens(directory, architecture.config, tokenizer)
    found = None if role.tandem is None else functools.cache(functools.partial(boundaries, tokenizer))
    return ModelFacts(ends=ends, vocab=architecture.vocab, boundaries=found)


@dataclass(frozen=True)
class _Starter:
    """Starts servers on this host. The servers end when `stack` closes. `environment`: the servers' environment
    variables."""

    engines: EngineSpec
    settings: Servers
    stack: contextlib.ExitStack
    environment: Mapping[str, str]

    def start(self, role: str, replicas: Iterable[int], facts: ModelFacts) -> list[Server]:
        """Starts servers of a role one after the other. Returns their clients when all servers are ready. `replicas`:
        indices of the servers."""
        servers = []
        for replica in replicas:
            own = cuda_variables(gpus_of(self.engines, self.settings, role, replica), self.environment)
            process, server = start_server(
                self.engines, self.settings, role, replica, {**self.environment, **own}, facts
            )
            self.stack.callback(process.stop)
            process.wait_until(server.ready, self.settings.start_timeout_s)
            servers.append(server)
        return servers

    def on_hosts(self, world: World, local_rank: int) -> dict[str, list[str]]:
        """Starts an equal share of the servers on each host. Returns {role: addresses of all its servers}. Collective.

        Raises ConfigError on the driver (rank 0) if the ranks are not on exactly `engines.hosts` hosts."""
        share, roles = self.settings.replicas // self.engines.hosts, self.engines.server_roles

        def start(host: int) -> list[list[str]]:
            own = range(host * share, (host + 1) * share) if local_rank == 0 else ()
            return [[server.url for server in self.start(role, own, ModelFacts())] for role in roles]

        def everywhere() -> dict[str, list[str]]:
            firsts = world.call_all("engines/first", [None] * world.size)
            if sum(firsts) != self.engines.hosts:
                raise ConfigError(
                    f"job.nodes = {self.engines.hosts}, and the ranks are on {sum(firsts)} hosts (in so many is "
                    "LOCAL_RANK 0): start one rank on each of job.nodes hosts"
                )
            found = world.call_all("engines/start", [sum(firsts[:rank]) for rank in range(world.size)])
            urls = [[url for own in found if own for url in own[place]] for place in range(len(roles))]
            return dict(zip(roles, urls, strict=True))

        world.serve("engines/first", lambda _: local_rank == 0)
        world.serve("engines/start", start)
        return world.from_driver(everywhere)
