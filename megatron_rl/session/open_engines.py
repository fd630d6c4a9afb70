"""Opens the engines of every command that generates text, and the refits that transfer the trainer's weights to them.

An engine is embedded in the ranks, a set of server processes, or a third-party endpoint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.algorithms.tandem_authors import boundaries
from megatron_rl.cluster.host_address import address_among_ranks, own_address
from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.config.engines import Embedded, Servers
from megatron_rl.config.model import Model
from megatron_rl.engines.data_parallel_engine import DataParallelEngine
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.openai import open_endpoint
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import Pool, given
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import Engine
from megatron_rl.engines.server import Adapters, Server
from megatron_rl.engines.server_process import make_token
from megatron_rl.engines.server_registry import Listing, ServerRegistry
from megatron_rl.engines.static_servers import Addresses
from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World, all_gather
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.session.adapter_refit import AdapterFiles
from megatron_rl.session.colocated_servers import ColocatedServers, start_servers
from megatron_rl.session.launch_ranks import LOCAL
from megatron_rl.session.pool_refit import PoolRefit
from megatron_rl.session.server_connection import ENGINES, HostServer, check_gpus, connect, token_file
from megatron_rl.session.server_supervisors import Supervisor, end_supervisors, hopeless
from megatron_rl.spec.checks import quantisation_problems
from megatron_rl.spec.run_spec import EngineSpec
from megatron_rl.training.device_memory import leaving
from megatron_rl.weights.hf_model import eos_tokens, local_directory, read_architecture
from megatron_rl.weights.rank_layouts import EngineLayout

if TYPE_CHECKING:  # `eval` and `generate` do not import Megatron-core
    from megatron_rl.megatron.policy import MegatronPolicy
    from megatron_rl.session.run_setup import Driver


@dataclass
class RunEngines:
    """The engines of a command, and the refits: functions that send a policy's weights to the policy's engine.
    `engines` and `refits` are keyed by role.

    Servers and endpoints are in `engines` on rank 0 only. Refits are called by the driver.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    refits: dict[str, Callable[[int], None]] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)  # server pools by role, on the driver only
    colocated: ColocatedServers | None = None  # the servers that share the trainer's GPUs

    def loads(self) -> dict[str, dict[str, float]]:
        """Returns the state of each server, such as the number of running requests, keyed by server name."""
        return {name: load for pool in self.pools.values() for name, load in pool.members.loads().items()}

    def occupied_s(self) -> float | None:
        """Returns for how many seconds a slot was occupied so far, averaged over all slots. A slot is the place of one
        sequence in a server's batch. Returns None if there are no servers."""
        places = sum(pool.members.limits.places for pool in self.pools.values())
        return sum(pool.members.occupied_s() for pool in self.pools.values()) / places if places else None

    def served(self) -> bool:
        """Returns whether every server pool has a server that holds the pool's current weights. Pools that have not
        received weights yet are skipped."""
        return all(pool.members.serving() for pool in self.pools.values() if pool.version >= 0)

    def tend(self) -> None:
        """Sends the current weights to servers that were restarted. The driver (rank 0) calls this method while it
        waits for rollouts."""
        for engine in self.engines.values():
            engine.tend()


@dataclass(frozen=True)
class Supervised:
    """The servers of a training run. `megatron-rl serve` processes start and restart them: child processes of the run
    if `engine.start` is set. The run uses the servers that the server registry lists, or those of `engine.urls`.

    `leave` returns True if the run was asked to exit and should not wait for servers."""

    driver: Driver
    leave: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Direct:
    """The servers of `eval` and `generate`: those of `engine.urls`, or servers that the ranks start with the variables
    `environment` and do not restart.

    If the servers are on several hosts (`engines.hosts`), the rank with `local_rank` 0 of each host starts an equal
    share of them."""

    environment: Mapping[str, str]
    local_rank: int = 0


def open_engines(
    engines: EngineSpec, tokenizers: Mapping[str, Any], world: World, commands: Commands, stack: contextlib.ExitStack,
    *, servers: Supervised | Direct, sources: Mapping[str, MegatronPolicy] | None = None,
    ranks: Mapping[str, Sequence[int]] | None = None,
) -> RunEngines:  # fmt: skip
    """Opens an engine for each role that has a separate engine. Collective.

    `tokenizers`: {role: tokenizer}. `sources`: {role: this rank's part of the policy whose weights the refits of the
    role send}, in a training run only. `ranks`: {role: its ranks}; None: every role has all ranks. The engine of a role
    without a policy keeps the weights of its model directory. Engines, and servers that
    this function starts, end when `stack` closes. Raises ConfigError for invalid settings, and StartError for a direct
    server that does not start.
    """
    ranks = dict.fromkeys(engines.opened, range(world.size)) if ranks is None else ranks
    opener = _Opener(engines, tokenizers, world, commands, ranks, stack, sources or {}, RunEngines())
    settings = engines.settings
    environment = servers.environment if isinstance(servers, Direct) else os.environ
    for name, policy in opener.sources.items():
        if name in engines.opened:
            directory = local_directory(engines.opened[name].model.path)
            refuse(*quantisation_problems(engines, name, policy.arch, directory))
    if isinstance(settings, Embedded):
        opener.open_embedded(settings, servers)
    elif engines.opened:
        # on several hosts, the driver cannot reach the servers of another host at LOCAL
        unreachable = settings.host == LOCAL and engines.hosts > 1
        host = address_among_ranks(environment) if unreachable else own_address(settings.host)
        settings = replace(settings, host=host)
        if isinstance(servers, Direct):
            opener.open_direct(settings, servers)
        else:
            opener.open_pools(settings, servers)
    if world.rank == 0:
        opener.open_endpoints(environment)
    return opener.opened


def embedded_engine(model: Model, settings: Embedded | Servers, tokenizer: Any, **more: Any) -> EmbeddedEngine:
    """Returns an embedded engine (an engine in this process) for a model. The engine's weights are not loaded yet.
    `more`: further arguments of EmbeddedEngine."""
    graphs = not isinstance(settings, Embedded) or settings.cuda_graphs
    return EmbeddedEngine(
        model.path, max_batch=settings.max_batch, dtype=getattr(torch, model.dtype), tokenizer=tokenizer,
        cuda_graphs=graphs, **more,
    )  # fmt: skip


@dataclass(frozen=True)
class _Opener:
    """The arguments of `open_engines`, and the engines that are open so far."""

    engines: EngineSpec
    tokenizers: Mapping[str, Any]
    world: World
    commands: Commands
    ranks: Mapping[str, Sequence[int]]  # {role: its ranks}
    stack: contextlib.ExitStack
    sources: Mapping[str, MegatronPolicy]
    opened: RunEngines

    def open_endpoints(self, environment: Mapping[str, str]) -> None:
        """Opens the endpoints, on the driver (rank 0). The end tokens of an endpoint are those of an engine for the
        role's model if the model's directory is on this host, otherwise those of the tokenizer's directory."""
        for name, role in self.engines.roles.items():
            if role.endpoint is None:
                continue
            path, tokenizer = role.model.path, self.tokenizers[name]
            is_local = bool(path) and Path(path).is_dir()
            ends = eos_tokens(local_directory(path if is_local else role.model.tokenizer or path), None, tokenizer)
            engine = open_endpoint(name, role.endpoint, tokenizer, ends=ends, environment=environment)
            self.stack.callback(engine.close)
            self.opened.engines[name] = engine

    def open_embedded(self, settings: Embedded, servers: Supervised | Direct) -> None:
        """Creates an embedded engine for each role, on the role's ranks, and on rank 0 for the driver."""
        for name, role in self.engines.opened.items():
            ranks, member = self.ranks[name], self.world.rank in self.ranks[name]
            if not member and self.world.rank != 0:
                continue
            policy = self.sources.get(name)
            engine = embedded_engine(
                role.model, settings, self.tokenizers[name],
                junior=None if role.tandem is None else role.tandem.junior or role.model.path,
                tells_experts=role.has_policy and role.router_replay, quantization=settings.quantization,
            )  # fmt: skip
            if not role.has_policy and member:
                engine.load_pretrained()
            of_all = self.opened.engines[name] = DataParallelEngine(self.commands, name, engine, ranks)
            if not role.has_policy:
                of_all.version = 0
                continue
            assert isinstance(servers, Supervised), "only a training run has sources"
            if policy is not None:
                replicas = policy.export.trainer_layout.world
                layout = EngineLayout(replicas=replicas, whole=True, quantization=settings.quantization)
                hosts = all_gather(socket.gethostname(), policy.groups.control)
                # network address at which the role's other ranks reach the first one
                host = LOCAL if len({*hosts}) == 1 else address_among_ranks(os.environ)
                self.commands.serve(f"refit/{name}", self._trainer_side(name, policy, layout, host, engine))
            self.opened.refits[name] = functools.partial(self._refit_embedded, of_all, name, servers.driver)

    def _refit_embedded(self, engine: DataParallelEngine, name: str, driver: Driver, version: int) -> None:
        """Sends a role's weights to the embedded engine. Called by the driver."""
        command = self.commands.together(f"refit/{name}", version, version, self.ranks[name], about=name)
        driver.refitted({"role": name, "version": version, **command.result()})
        engine.version = version

    def open_pools(self, settings: Servers, servers: Supervised) -> None:
        """Starts the servers if engine.start is set. Creates the server pool of each role on the driver (rank 0). For
        each role with a source, creates the refit, which sends the trainer's weights to the role's servers."""
        engines, world = self.engines, self.world
        supervisors = self._start_supervisors(settings)
        shared = SharedGpus() if settings.colocate else None
        for name in engines.opened:
            pool = None
            if world.rank == 0:
                pool = self._pool(name, settings, supervisors, servers, shared)
                self.opened.engines[name] = self.opened.pools[name] = pool
            if not engines.opened[name].has_policy:
                continue
            policy, ranks, side, present = self.sources.get(name), self.ranks[name], None, nullcontext
            if policy is not None:
                side, present = self._pool_side(name, policy, settings)
            opened = None if side is None else (side.address[0], side.address[1], side.address[2])
            address = world.broadcast(opened, source=ranks[0])
            assert address is not None, "the first of the role's ranks has a side"
            self.opened.refits[name] = PoolRefit(
                self.commands, name, ranks, side, address, pool, servers.driver, engines.refit, present=present
            )
        if settings.colocate:
            # A weight sync of these roles sends all weights, so their servers may discard the weights when they sleep.
            discarding = [name for name, role in engines.opened.items() if role.has_policy and role.tandem is None]
            self.opened.colocated = ColocatedServers(
                self.commands,
                self.opened.pools,
                supervisors,
                discarding=discarding,
                start_timeout_s=settings.start_timeout_s,
            )

    def _pool_side(
        self, name: str, policy: MegatronPolicy, settings: Servers
    ) -> tuple[TrainerSide | AdapterFiles, Callable[[], contextlib.AbstractContextManager[None]]]:
        """Returns the object with which this rank sends a role's weights to the role's servers, and a function whose
        context manager keeps the weights on the GPU. Collective over the role's ranks."""
        if (adapters := self._adapter_files(name, settings)) is not None:
            return AdapterFiles(World(policy.groups.control), policy, adapters), nullcontext
        layout = EngineLayout(
            replicas=settings.replicas, tp=settings.tp, expert_parallel=settings.expert_parallel,
            quantization=settings.quantization,
        )  # fmt: skip
        present = functools.partial(leaving, policy.memory) if settings.colocate else nullcontext
        return self._trainer_side(name, policy, layout, settings.host), present

    def _start_supervisors(self, settings: Servers) -> list[Supervisor]:
        """Starts `megatron-rl serve` processes: on the driver (rank 0) for all servers, or on each rank for the servers
        whose first GPU is the rank's GPU. Starts none if engine.start is not set. Collective."""
        engines, world, supervisors = self.engines, self.world, list[Supervisor]()
        self.stack.callback(end_supervisors, supervisors)
        if settings.start:
            world.from_leader(check_gpus, engines, os.environ)
        if settings.colocate:
            for policy in self.sources.values():
                policy.memory.sleep(weights=True)
            world.barrier()  # a server measures the free GPU memory at its start, so all policies must be gone
            start_servers(engines, settings, world.rank, supervisors)
        elif settings.start and world.rank == 0:
            for role in engines.server_roles:
                for replica in range(settings.replicas):
                    supervisors.append(Supervisor(engines.directory, role, replica))
        return supervisors

    def _pool(
        self, name: str, settings: Servers, supervisors: list[Supervisor], servers: Supervised,
        shared: SharedGpus | None,
    ) -> Pool:  # fmt: skip
        """Returns the pool of the servers that generate for a role. The role may share the servers with other roles."""
        registry, client = ServerRegistry(self.engines.directory / ENGINES), self._connect(name, settings)
        listed, fixed = self.engines.roles[name].servers, not self.engines.roles[name].has_policy
        pool = Pool(name, settings, registry, client, fixed=fixed, listed=listed, shared=shared)
        if settings.urls:
            self.stack.callback(Addresses(registry, name, settings.urls[name], client).close)
        # If other ranks started some of the servers, this rank cannot know whether those servers may still start.
        of_pool = [supervisor for supervisor in supervisors if supervisor.role == listed]
        starting = of_pool if len(of_pool) == settings.replicas else []
        pool.members.hopeless = functools.partial(hopeless, starting, servers.leave)
        pool.members.waits = servers.driver.watch.beat
        self.stack.callback(pool.close)
        return pool

    def open_direct(self, settings: Servers, servers: Direct) -> None:
        """Creates an engine for each role on the driver (rank 0), with servers at given addresses or servers that are
        started now. Their weights never change."""
        urls = settings.urls or self._start_on_hosts(settings, servers)
        if self.world.rank != 0:
            return
        if wrong := set(urls) ^ self.engines.opened.keys():
            raise ConfigError(
                f"engine.urls: {', '.join(sorted(wrong))}: give servers for each of {', '.join(self.engines.opened)}"
            )
        for name in self.engines.opened:
            client = self._connect(name, settings)
            listings = [
                Listing(role=name, replica=replica, url=url, incarnation="", log="")
                for replica, url in enumerate(urls[name])
            ]
            limits = replace(Limits.of(settings), servers=len(listings))
            self.opened.engines[name] = engine = given(name, [*map(client, listings)], limits)
            self.stack.callback(engine.close)

    def _start_on_hosts(self, settings: Servers, servers: Direct) -> dict[str, list[str]]:
        """Starts an equal share of the servers on each host, one after the other. Returns {role: addresses of all its
        servers} when all are ready. Collective.

        Raises ConfigError on the driver (rank 0) if the ranks are not on exactly `engines.hosts` hosts."""
        engines, world, commands = self.engines, self.world, self.commands
        share = settings.replicas // engines.hosts

        def start(role: str, replica: int) -> str:
            server = HostServer(engines, settings, role, replica, servers.environment)
            return self.stack.enter_context(server.running())[1].url

        def start_share(host: int | None) -> dict[str, list[str]]:
            replicas = () if host is None else range(host * share, (host + 1) * share)
            return {role: [start(role, replica) for replica in replicas] for role in engines.server_roles}

        def start_all() -> dict[str, list[str]]:
            firsts = commands.each("engines/first", [None] * world.size)
            if sum(firsts) != engines.hosts:
                raise ConfigError(
                    f"job.nodes = {engines.hosts}, and the ranks are on {sum(firsts)} hosts (in so many is "
                    "LOCAL_RANK 0): start one rank on each of job.nodes hosts"
                )
            hosts = [sum(firsts[:rank]) if first else None for rank, first in enumerate(firsts)]
            shares = commands.each("engines/start", hosts)
            return {role: [url for urls in shares for url in urls[role]] for role in engines.server_roles}

        if engines.hosts == 1:  # in the main thread: the kernel ends a server when the thread that started it ends
            return world.from_leader(start_share, 0)
        commands.serve("engines/first", lambda _: servers.local_rank == 0)
        commands.serve("engines/start", start_share)
        return commands.drive(start_all)

    def _connect(self, name: str, settings: Servers) -> Callable[[Listing], Server]:
        """Returns a function that creates a client with which a role's requests go to a server."""
        role, tokenizer = self.engines.roles[name], self.tokenizers[name]
        directory = local_directory(role.model.path)
        architecture = read_architecture(directory)
        facts = ModelFacts(
            ends=eos_tokens(directory, architecture.config, tokenizer), vocab=architecture.vocab,
            # the tokens at which Tandem RL may change the author
            boundaries=None if role.tandem is None else functools.cache(functools.partial(boundaries, tokenizer)),
        )  # fmt: skip
        if (adapters := self._adapter_files(name, settings)) is not None:
            sharing = [user for user, spec in self.engines.opened.items() if spec.servers == role.servers]
            facts = replace(facts, adapters=Adapters(adapters, sharing.index(name), len(sharing)))
        return connect(settings, make_token(token_file(self.engines, settings)), self.engines.refit.timeout_s, facts)

    def _adapter_files(self, name: str, settings: Servers) -> Path | None:
        """Returns the directory from which the servers of a role load the versions of the role's LoRA adapter, or None
        if a refit sends all weights of the role."""
        serves_adapter = self.engines.roles[name].lora is not None and settings.serves_adapters
        return (self.engines.directory / ENGINES / "adapters" / name).resolve() if serves_adapter else None

    def _trainer_side(
        self, name: str, policy: MegatronPolicy, layout: EngineLayout, host: str,
        endpoint: EmbeddedEngine | None = None,
    ) -> TrainerSide:  # fmt: skip
        """Creates the object with which the trainer sends a role's weights to the role's engine. Collective.

        `host`: address of the refit store, a key-value store through which the trainer and the engine find each
        other."""
        topology = Topology(
            sizes=policy.arch, trainer=policy.export.trainer_layout, engines=layout,
            dtype=self.engines.roles[name].model.dtype,
        )  # fmt: skip
        side = TrainerSide(
            topology, self.engines.refit, policy.export.shards(), group=policy.groups.control, endpoint=endpoint,
            host=host, added=policy.export.added,
        )  # fmt: skip
        self.stack.callback(side.close)
        return side
