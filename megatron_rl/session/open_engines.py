"""Opens the engines of a training run, and the refits that transfer the trainer's weights to the engines.

An engine is embedded in the ranks, a pool of server processes, or a third-party endpoint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.cluster.host_address import address_among_ranks, own_address
from megatron_rl.config.base import refuse
from megatron_rl.config.schema import Embedded, Servers
from megatron_rl.engines.data_parallel_engine import DataParallelEngine
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.openai import open_endpoint
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.pool.shared_gpus import SharedGpus
from megatron_rl.engines.protocol import Engine
from megatron_rl.engines.server import Adapters
from megatron_rl.engines.server_process import make_token
from megatron_rl.engines.server_registry import ServerRegistry
from megatron_rl.engines.static_servers import Addresses
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World, all_gather
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.session.adapter_refit import AdapterFiles
from megatron_rl.session.colocated_servers import ColocatedServers, start_servers
from megatron_rl.session.eval_engines import embedded_engine, model_facts
from megatron_rl.session.pool_refit import PoolRefit
from megatron_rl.session.run_setup import Driver
from megatron_rl.session.server_connection import ENGINES, check_gpus, connect, token_file
from megatron_rl.session.server_supervisors import Supervisor, end_supervisors, hopeless
from megatron_rl.spec.checks import quantisation_problems
from megatron_rl.spec.run_spec import EngineSpec
from megatron_rl.texts.text import load_tokenizer
from megatron_rl.weights.hf_model import eos_tokens, local_directory
from megatron_rl.weights.rank_layouts import EngineLayout


@dataclass
class RunEngines:
    """The engines of a run, and the refits: functions that send a policy's weights to the policy's engine. `engines`
    and `refits` are keyed by role.

    Server pools and endpoints are in `engines` on the driver (rank 0) only. Refits are collective.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    refits: dict[str, Callable[[int], None]] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)  # server pools by role, on the driver only
    colocated: ColocatedServers | None = None  # the servers that share the trainer's GPUs

    def loads(self) -> dict[str, dict[str, float]]:
        """Returns the state of each server, such as the number of running requests, keyed by server name."""
        return {name: found for pool in self.pools.values() for name, found in pool.members.loads().items()}

    def occupied_s(self) -> float | None:
        """Returns for how many seconds a slot was occupied so far, averaged over all slots. A slot is the place of one
        sequence in a server's batch. Returns None if there are no servers."""
        members = [pool.members for pool in self.pools.values()]
        places = sum(one.limits.places for one in members)
        return sum(one.occupied_s() for one in members) / places if places else None

    def served(self) -> bool:
        """Returns whether every server pool has a server that holds the pool's current weights. Pools that have not
        received weights yet are skipped."""
        return all(pool.members.serving() for pool in self.pools.values() if pool.version >= 0)

    def tend(self) -> None:
        """Sends the current weights to servers that were restarted. The driver (rank 0) calls this method while it
        waits for rollouts."""
        for engine in self.engines.values():
            engine.tend()


@dataclass(frozen=True, kw_only=True)
class _Session:
    """The parts of a training run that the functions of this module need to open the engines."""

    engines: EngineSpec
    world: World
    tokenizers: Mapping[str, Any]
    policies: Mapping[str, MegatronPolicy]
    driver: Driver
    stack: contextlib.ExitStack  # closes the engines and servers when the run ends
    leave: Callable[[], bool]  # returns True if the run was asked to exit and should not wait for servers

    def adapters(self, role: str) -> Path:
        """Returns the directory from which the servers of a role load the versions of the role's LoRA adapter."""
        return (self.driver.directory.path / ENGINES / "adapters" / role).resolve()


def open_engines(
    engines: EngineSpec, world: World, tokenizers: Mapping[str, Any], policies: Mapping[str, MegatronPolicy],
    driver: Driver, stack: contextlib.ExitStack, leave: Callable[[], bool] = lambda: False,
) -> RunEngines:  # fmt: skip
    """Opens an engine for each role that has a separate engine. Collective.

    `stack` closes the engines. `leave` returns True if the run was asked to exit and should not wait for servers.
    """
    run_engines = RunEngines()
    session = _Session(
        engines=engines, world=world, tokenizers=tokenizers, policies=policies, driver=driver, stack=stack, leave=leave
    )
    settings = engines.settings
    for name, policy in policies.items():
        if name in engines.opened:
            directory = local_directory(engines.opened[name].model.path)
            refuse(*quantisation_problems(engines, name, policy.arch, directory))
    if isinstance(settings, Embedded):
        _open_embedded(session, settings, run_engines)
    elif engines.opened:
        _open_servers(session, replace(settings, host=own_address(settings.host)), run_engines)
    if world.rank == 0:
        _open_endpoints(session, run_engines)
    return run_engines


def _open_endpoints(session: _Session, run_engines: RunEngines) -> None:
    for name, role in session.engines.roles.items():
        if role.endpoint is None:
            continue
        tokenizer = session.tokenizers[name]
        ends = eos_tokens(local_directory(role.model.tokenizer or role.model.path), None, tokenizer)
        engine = open_endpoint(name, role.endpoint, tokenizer, ends=ends, environment=os.environ)
        session.stack.callback(engine.close)
        run_engines.engines[name] = engine


def _open_embedded(session: _Session, settings: Embedded, run_engines: RunEngines) -> None:
    """Creates an embedded engine for each role, in every rank.

    The engine of a role without a policy loads the weights of its model directory now and keeps them.
    """
    for name, role in session.engines.opened.items():
        own = embedded_engine(
            role.model, settings, session.tokenizers[name],
            junior=None if role.tandem is None else role.tandem.junior or role.model.path,
            tells_experts=name in session.policies and role.router_replay, quantization=settings.quantization,
        )  # fmt: skip
        run_engines.engines[name] = DataParallelEngine(session.world, name, own)
        policy = session.policies.get(name)
        if policy is None:
            own.load_pretrained()
            continue
        world = policy.export.trainer_layout.world
        layout = EngineLayout(replicas=world, whole=True, quantization=settings.quantization)
        hosts = all_gather(socket.gethostname(), policy.groups.control)
        # network address at which the other ranks reach rank 0
        host = "127.0.0.1" if len({*hosts}) == 1 else address_among_ranks(os.environ)
        side = _trainer_side(session, name, policy, layout, host, endpoint=own)

        def refit(version: int, name: str = name, side: TrainerSide = side) -> None:
            session.driver.refitted({"role": name, "version": version, **side(version)})

        run_engines.refits[name] = refit


def _trainer_side(
    session: _Session, name: str, policy: MegatronPolicy, layout: EngineLayout, host: str, *,
    endpoint: EmbeddedEngine | None = None,
) -> TrainerSide:  # fmt: skip
    """Creates the object with which the trainer sends a role's weights to the role's engine. Collective.

    `host`: address of the refit store, a key-value store through which the trainer and the engine find each other."""
    topology = Topology(
        sizes=policy.arch, trainer=policy.export.trainer_layout, engines=layout,
        dtype=session.engines.roles[name].model.dtype,
    )  # fmt: skip
    side = TrainerSide(
        topology, session.engines.refit, policy.export.shards(), group=policy.groups.control, endpoint=endpoint,
        host=host, added=policy.export.added,
    )  # fmt: skip
    session.stack.callback(side.close)
    return side


def _open_servers(session: _Session, settings: Servers, run_engines: RunEngines) -> None:
    """Starts the servers if engine.start is set. Creates the server pool of each role on the driver (rank 0). For each
    role with a policy, creates the refit, which sends the trainer's weights to the role's servers."""
    engines, driver = session.engines, session.driver
    started: dict[str, list[Supervisor]] = {name: [] for name in engines.server_roles}
    if settings.start:
        session.world.from_driver(check_gpus, engines, os.environ)
    if settings.colocate:
        _start_colocated(session, settings, started)
    elif session.world.rank == 0 and settings.start:
        session.stack.callback(end_supervisors, started)
        for name in started:
            started[name] += [Supervisor(driver.directory.path, name, replica) for replica in range(settings.replicas)]
    shared = SharedGpus() if settings.colocate else None
    for name, role in engines.opened.items():
        own = started[role.servers]
        pool = _pool(session, settings, name, own, shared) if session.world.rank == 0 else None
        if pool is not None:
            run_engines.engines[name] = run_engines.pools[name] = pool
        policy = session.policies.get(name)
        if policy is None:
            continue
        if role.lora is not None and settings.serves_adapters:
            side, present = AdapterFiles(session.world.work, policy, session.adapters(name)), contextlib.nullcontext
        else:
            layout = EngineLayout(
                replicas=settings.replicas, tp=settings.tp, expert_parallel=settings.expert_parallel,
                quantization=settings.quantization,
            )  # fmt: skip
            side, present = _trainer_side(session, name, policy, layout, settings.host), policy.memory.present
        run_engines.refits[name] = PoolRefit(session.world, name, side, pool, driver, engines.refit, present=present)
    if settings.colocate:
        # A weight sync of these roles sends all weights, so their servers may discard the weights when they sleep.
        discarding = [name for name, role in engines.opened.items() if role.has_policy and role.tandem is None]
        own = [supervisor for each in started.values() for supervisor in each]
        run_engines.colocated = ColocatedServers(
            session.world, run_engines.pools, own, discarding=discarding, start_timeout_s=settings.start_timeout_s
        )


def _start_colocated(session: _Session, settings: Servers, started: dict[str, list[Supervisor]]) -> None:
    """Moves all policies from the GPUs to host memory, and starts the servers whose first GPU is this rank's GPU.
    Collective.

    Appends the server supervisors of each role to `started[role]`."""
    for policy in session.policies.values():
        policy.memory.sleep(weights=True)
    session.world.barrier()  # a server measures the free GPU memory at its start, so all policies must be gone
    session.stack.callback(end_supervisors, started)
    run = session.driver.directory.path

    def make(role: str, replica: int, gpus: Sequence[int]) -> Supervisor:
        started[role].append(Supervisor(run, role, replica, gpus=gpus))
        return started[role][-1]

    start_servers(session.engines, settings, session.world.rank, make)


def _pool(
    session: _Session, settings: Servers, name: str, started: list[Supervisor], shared: SharedGpus | None
) -> Pool:
    """Returns the pool of the servers that generate for a role. The role may share the servers with other roles.

    Servers of a role without a policy keep the weights that they load at their start."""
    engines, directory = session.engines, session.driver.directory.path / ENGINES
    role = engines.roles[name]
    token = make_token(token_file(engines, settings))
    about = model_facts(role, load_tokenizer(role.model.tokenizer or role.model.path))
    if role.lora is not None and settings.serves_adapters:
        sharing = [other for other, own in engines.opened.items() if own.servers == role.servers]
        about = replace(about, adapters=Adapters(session.adapters(name), sharing.index(name), len(sharing)))
    client = connect(settings, token, engines.refit.timeout_s, about)
    pool = Pool(
        name, settings, ServerRegistry(directory), client, fixed=name not in session.policies,
        listed=role.servers, shared=shared,
    )  # fmt: skip
    if settings.urls:
        session.stack.callback(Addresses(ServerRegistry(directory), name, settings.urls[name], client).close)
    # If other ranks started some of the servers, this rank cannot know whether those servers may still start.
    known = started if len(started) == settings.replicas else []
    pool.members.hopeless = functools.partial(hopeless, known, session.leave)
    pool.members.waits = session.driver.watch.beat
    session.stack.callback(pool.close)
    return pool
