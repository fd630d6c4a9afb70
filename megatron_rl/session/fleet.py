"""The engines of a run: inside its ranks, or servers of their own that a pool speaks to; and how the trainer's weights reach them."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.authors import boundaries
from megatron_rl.cluster.address import address_among_ranks, own_address
from megatron_rl.config.schema import Embedded, Servers, TrainConfig
from megatron_rl.engines.addresses import Addresses
from megatron_rl.engines.base import Engine, EngineError
from megatron_rl.engines.embedded import EmbeddedEngine
from megatron_rl.engines.launch import make_token, tail
from megatron_rl.engines.pool import Pool
from megatron_rl.engines.roster import Roster
from megatron_rl.engines.spread import SpreadEngine
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.refit.base import RefitError
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.session.common import Driver
from megatron_rl.session.servers import ENGINES, TOKEN, About, connect
from megatron_rl.text import load_tokenizer
from megatron_rl.weights import hf
from megatron_rl.weights.layouts import EngineLayout
from megatron_rl.world import World

REFITS = 3  # tries, when no server that took part came to the new version
LEAVE_S = 60.0  # for a server that is told to


@dataclass(frozen=True)
class Fleet:
    """By role. Servers are known on the driver alone; refits are collective."""

    engines: Mapping[str, Engine]
    refits: Mapping[str, Callable[[int], None]]

    def tend(self) -> None:
        """On the driver, when it has nothing else to do: servers that came back take the weights."""
        for engine in self.engines.values():
            if isinstance(engine, Pool):
                engine.tend()


def open_fleet(
    config: TrainConfig, world: World, tokenizers: Mapping[str, Any], policies: Mapping[str, MegatronPolicy], driver: Driver,
    stack: contextlib.ExitStack, leave: Callable[[], bool] = lambda: False,
) -> Fleet:  # fmt: skip
    """Collective. A replay needs no engines. `leave`: whether the run was asked to, and should not wait for servers."""
    if config.debug.replay:
        return Fleet({}, {})
    if isinstance(config.engine, Embedded):
        return _embedded(config, config.engine, world, tokenizers, policies, driver, stack)
    settings = replace(config.engine, host=own_address(config.engine.host))
    return _servers(config, settings, world, policies, driver, stack, leave)


def _about(config: TrainConfig, role: str) -> About:
    model = config.roles[role].model
    directory = hf.local_directory(model.path)
    architecture = hf.read_architecture(directory)
    tokenizer: Any = load_tokenizer(model.tokenizer or model.path)
    own = tokenizer.eos_token_id
    ends = hf.eos_tokens(directory, architecture) | (frozenset() if own is None else {own})
    found = None if config.roles[role].tandem is None else functools.cache(functools.partial(boundaries, tokenizer))
    return About(ends=ends, vocab=architecture.vocab, boundaries=found)


def _embedded(
    config: TrainConfig, settings: Embedded, world: World, tokenizers: Mapping[str, Any], policies: Mapping[str, MegatronPolicy],
    driver: Driver, stack: contextlib.ExitStack,
) -> Fleet:  # fmt: skip
    engines, refits = {}, {}
    for name, policy in policies.items():
        model, tandem = config.roles[name].model, config.roles[name].tandem
        own = EmbeddedEngine(
            model.path, max_batch=settings.max_batch, dtype=getattr(torch, model.dtype), tokenizer=tokenizers[name],
            junior=None if tandem is None else tandem.junior or model.path,
        )  # fmt: skip
        engines[name] = SpreadEngine(world, name, own)
        layout = EngineLayout(replicas=policy.trainer_layout.world, whole=True)
        topology, group = _topology(policy, layout, model.dtype), policy.groups.control
        side = TrainerSide(topology, config.refit, policy.shards(), group=group, endpoint=own, host=_board_host(group))
        stack.callback(side.close)
        refits[name] = functools.partial(_refit_here, side, name, driver)
    return Fleet(engines, refits)


def _board_host(group: Any) -> str:
    """Where the ranks of a gloo group reach the first of them. Collective."""
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return "127.0.0.1" if len({*hosts}) == 1 else address_among_ranks(os.environ)


def _refit_here(side: TrainerSide, name: str, driver: Driver, version: int) -> None:
    driver.refitted({"role": name, "version": version, **side(version)})


def _servers(
    config: TrainConfig, settings: Servers, world: World, policies: Mapping[str, MegatronPolicy], driver: Driver,
    stack: contextlib.ExitStack, leave: Callable[[], bool],
) -> Fleet:  # fmt: skip
    engines, refits = {}, {}
    directory = driver.directory.path / ENGINES
    started: dict[str, list[Supervisor]] = {name: [] for name in policies}
    if world.rank == 0 and settings.start:
        stack.callback(_leave, started)
        for name in policies:
            started[name] += [Supervisor(driver.directory.path, name, replica) for replica in range(settings.replicas)]
    for name, policy in policies.items():
        layout = EngineLayout(replicas=settings.replicas, tp=settings.tp, expert_parallel=settings.expert_parallel)
        topology = _topology(policy, layout, config.roles[name].model.dtype)
        side = TrainerSide(topology, config.refit, policy.shards(), group=policy.groups.control, host=settings.host)
        stack.callback(side.close)
        pool = None
        if world.rank == 0:
            token = make_token(Path(settings.token_file) if settings.token_file else directory / TOKEN)
            client = connect(settings, token, config.refit.timeout_s, _about(config, name))
            pool = Pool(name, settings, Roster(directory), client)
            if settings.urls:
                stack.callback(Addresses(Roster(directory), name, settings.urls[name], client).close)
            pool.hopeless = functools.partial(_hopeless, started[name], leave)
            stack.callback(pool.close)
            engines[name] = pool
        refits[name] = PoolRefit(world, name, side, pool, driver, config.refit.timeout_s)
    return Fleet(engines, refits)


class PoolRefit:
    """Brings a pool's servers to the trainer's weights. Every rank has one; `pool` is on the driver."""

    def __init__(
        self, world: World, role: str, side: TrainerSide, pool: Pool | None, driver: Driver, timeout_s: float
    ) -> None:
        self._world, self._role, self._side, self._pool, self._driver, self._timeout_s = (
            world,
            role,
            side,
            pool,
            driver,
            timeout_s,
        )
        self._call = f"refit/{role}"
        world.serve(self._call, self._attempt)
        if pool is not None:
            pool.refresh = self._refresh

    def __call__(self, version: int) -> None:
        """Collective. Waits for a first server; raises EngineError when none comes, or none can be brought to the weights."""
        why = None
        for _ in range(REFITS):
            replicas = self._world.from_driver(self._begin, version)
            figures, why = self._attempt((version, replicas))
            if self._world.from_driver(self._end):
                self._driver.refitted({"role": self._role, "version": version, **figures})
                return
        raise EngineError(
            f"{self._role}: {REFITS} refits to version {version} reached no engine; the last one: {why or 'see the log'}"
        )

    def _attempt(self, order: tuple[int, Sequence[int]]) -> tuple[dict[str, float], str | None]:
        """On every rank: the transfer -> (its figures, or why it failed)."""
        version, replicas = order
        try:
            return self._side(version, replicas), None
        except RefitError as error:
            return {}, str(error)

    def _begin(self, version: int, only: Sequence[int] | None = None) -> list[int]:
        assert self._pool is not None
        return self._pool.begin_refit(version, self._side.address, only, wait_s=self._timeout_s)

    def _end(self) -> int:
        assert self._pool is not None
        return self._pool.end_refit()

    def _refresh(self, replicas: list[int]) -> None:
        """On the driver, while other servers work: brings `replicas` to the version that the pool serves."""
        assert self._pool is not None
        begun = self._begin(self._pool.version, replicas)
        if begun:
            answers = self._world.call_all(self._call, [(self._pool.version, begun)] * self._world.size)
            if self._end():
                self._driver.refitted({"role": self._role, "version": self._pool.version, **answers[0][0]})


def _topology(policy: MegatronPolicy, engines: EngineLayout, dtype: str) -> Topology:
    return Topology(sizes=policy.arch, trainer=policy.trainer_layout, engines=engines, dtype=dtype)


class Supervisor:
    """`megatron-rl serve` for one server. It ends the server when this process is gone, however that comes."""

    def __init__(self, run: Path, role: str, replica: int) -> None:
        words = [
            sys.executable,
            "-m",
            "megatron_rl.main",
            "serve",
            str(run / "config.yaml"),
            f"--role={role}",
            f"--replica={replica}",
        ]
        self.log = run / "logs" / f"serve_{role}_{replica}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open(
            "ab"
        ) as out:  # in a session of its own: Ctrl-C is for the run, which needs its servers until the turn's end
            self._process = subprocess.Popen(
                [*words, "--with-parent"], stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )

    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask_to_leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self, timeout_s: float) -> None:
        """Until it has left; kills it after that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _leave(started: Mapping[str, Sequence[Supervisor]]) -> None:
    supervisors = [supervisor for each in started.values() for supervisor in each]
    for supervisor in supervisors:
        supervisor.ask_to_leave()
    end = time.monotonic() + LEAVE_S
    for supervisor in supervisors:
        supervisor.wait(max(0.1, end - time.monotonic()))


def _hopeless(supervisors: Sequence[Supervisor], leave: Callable[[], bool]) -> str | None:
    """Why not to wait for a server any more: the run was asked to leave, or started some and gave up on all of them."""
    if leave():
        return "asked to leave while it waited for a server: the same command goes on from the last checkpoint"
    if not supervisors or not all(supervisor.ended() for supervisor in supervisors):
        return None
    log = supervisors[0].log
    return f"no server runs, and none is started again (engine.restarts); the end of {log}:\n{tail(log)}"
