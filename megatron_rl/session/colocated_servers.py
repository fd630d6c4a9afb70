"""Servers in the trainer's GPUs: each rank starts those in its own GPU, and all sleep while the trainer works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from megatron_rl.config.schema import ConfigError, Servers
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import EngineError
from megatron_rl.session.control_protocol import HELD, HOLD, RELEASE, SERVES, SETTLE
from megatron_rl.session.server_supervisors import LEAVE_S, Supervisor
from megatron_rl.spec.run_spec import EngineSpec
from megatron_rl.world import World

MARGIN_S = 60.0  # beyond engine.start_timeout_s, for a server that ends in place of sleeping


class ColocatedServers:
    """The servers of a run in its own GPUs: implements training.device_memory.ColocatedEngines. It is made on every
    rank; `pools`, by role, are known on the driver, and `supervisors` are those that the rank started.

    The order of a sleep: no server is started any more, and those that start come up; the pools put all to sleep; what
    does not sleep then is ended by its supervisor, and started again when the trainer has left.
    """

    def __init__(
        self, world: World, pools: Mapping[str, Pool], supervisors: Sequence[Supervisor], *,
        discarding: Collection[str], start_timeout_s: float,
    ) -> None:  # fmt: skip
        """`discarding`: the roles whose refits bring all that their servers hold."""
        self._world, self._pools, self._supervisors = world, pools, supervisors
        self._discarding, self._timeout_s = frozenset(discarding), start_timeout_s + MARGIN_S
        world.serve("colocated/settle", self._settle)
        world.serve("colocated/hold", self._hold)
        world.serve("colocated/release", self._release)
        for pool in pools.values():
            pool.sleep_all = self._sleep_all

    def sleep(self, refitted: Collection[str]) -> None:
        """See ColocatedEngines.sleep. Collective."""
        self._world.from_driver(self._sleep, frozenset(refitted))

    def wake(self) -> None:
        """See ColocatedEngines.wake. Collective."""
        self._world.from_driver(self._wake)

    def _sleep(self, refitted: frozenset[str]) -> None:
        """Runs on the driver, inside `from_driver`."""
        listed = [one for own in self._everywhere("settle") for one in own]
        asleep: list[str] = []
        for name, pool in self._pools.items():
            own = [one.split(" ", 1)[1] for one in listed if one.split(" ", 1)[0] == name]
            asleep += pool.sleep(own, discard=name in refitted & self._discarding)
        self._everywhere("hold", asleep)

    def _wake(self) -> None:
        """Runs on the driver, inside `from_driver`. Servers that came back take the weights before any has a cache."""
        for pool in self._pools.values():
            pool.tend()
        self._everywhere("release")
        for pool in self._pools.values():
            pool.wake()

    def _sleep_all(self) -> None:
        """Has servers that came back take the weights in the middle of an iteration; requests under way are cut
        short."""
        self._sleep(frozenset())
        self._wake()

    def _everywhere(self, verb: str, argument: Sequence[str] = ()) -> list[list[str]]:
        return self._world.call_all(f"colocated/{verb}", [[*argument]] * self._world.size)

    def _settle(self, _: Sequence[str]) -> list[str]:
        """Lets this rank's supervisors start nothing more -> `ROLE INCARNATION` of each server that answers."""
        for supervisor in self._supervisors:
            supervisor.line.say(SETTLE)
        found = []
        for supervisor in self._supervisors:
            if len(words := self._answer(supervisor)) > 1 and words[0] == SERVES:
                found.append(f"{supervisor.role} {words[1]}")
        return found

    def _hold(self, asleep: Sequence[str]) -> list[str]:
        """Has this rank's supervisors end what is not among the incarnations that sleep."""
        for supervisor in self._supervisors:
            supervisor.line.say(HOLD, *asleep)
        for supervisor in self._supervisors:
            words = self._answer(supervisor)
            if not words:  # it is leaving
                supervisor.wait(LEAVE_S)
            if words != [HELD] and not supervisor.ended():
                raise EngineError(
                    f"the supervisor of {supervisor.name} answered {' '.join(words)!r}: see {supervisor.log}"
                )
        return []

    def _release(self, _: Sequence[str]) -> list[str]:
        for supervisor in self._supervisors:
            supervisor.line.say(RELEASE)
        return []

    def _answer(self, supervisor: Supervisor) -> list[str]:
        """Raises EngineError for a supervisor that does not answer: the trainer must not take its GPU's memory."""
        try:
            return supervisor.line.answer(self._timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"{supervisor.name} neither sleeps nor ends, {self._timeout_s:.0f} s after it was asked to "
                f"(engine.start_timeout_s and {MARGIN_S:.0f} s): the trainer cannot take its GPU's memory; see "
                f"{supervisor.log}"
            ) from error


def start_servers(
    engines: EngineSpec, settings: Servers, rank: int, make: Callable[[str, int, Sequence[int]], Supervisor]
) -> list[Supervisor]:
    """Starts the servers of this rank's GPU, one role after the other: vLLM counts what others take of a GPU in the
    meantime as its own. `make` starts the one of (role, replica) on these GPUs of this host.

    Raises ConfigError for a server whose GPUs are not all on this host.
    """
    started = []
    for name in engines.server_roles:
        # A replica's first rank is on the GPU of the trainer's rank with this number; its other ranks follow.
        own = [replica for replica in range(settings.replicas) if replica * settings.tp == rank]
        coming = [make(name, replica, _gpus(settings)) for replica in own]
        for supervisor in coming:
            supervisor.line.say(SETTLE)
            with contextlib.suppress(TimeoutError):  # whoever waits for the server says what its log says
                supervisor.line.answer(settings.start_timeout_s + MARGIN_S)
            supervisor.line.say(RELEASE)
        started += coming
    return started


def _gpus(settings: Servers) -> Sequence[int]:
    """Returns the numbers of a server's GPUs among those that this process sees, from this rank's own on."""
    if not torch.cuda.is_available():
        return ()
    first, seen = torch.cuda.current_device(), torch.cuda.device_count()
    if first + settings.tp > seen:
        raise ConfigError(
            f"engine.colocate = true with engine.tp = {settings.tp}: the server at GPU {first} would reach beyond this "
            f"host's {seen}; take a tp that divides the GPUs of a node"
        )
    return range(first, first + settings.tp)
