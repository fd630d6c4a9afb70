"""Servers that share the trainer's GPUs. Each rank starts the servers of its GPU. All servers release their memory
while the trainer works."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import torch

from megatron_rl.config.schema import ConfigError, Servers
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import EngineError
from megatron_rl.messages.commands import Commands
from megatron_rl.session.control_protocol import HELD, HOLD, RELEASE, SERVES, SETTLE
from megatron_rl.session.server_supervisors import LEAVE_S, Supervisor
from megatron_rl.spec.run_spec import EngineSpec

MARGIN_S = 60.0  # added to engine.start_timeout_s: seconds to end a server that does not release its GPU memory


class ColocatedServers:
    """The servers of a run that share the trainer's GPUs. Implements training.device_memory.ColocatedEngines.

    Every rank has an instance; the driver calls `sleep` and `wake`. `pools` is {role: server pool} on rank 0, and empty
    on other ranks.
    `supervisors` are the processes that this rank started to supervise servers; they restart dead servers.

    A sleeping server has released its GPU memory. All servers are put to sleep in three steps. First, the supervisors
    stop starting servers and wait for starts in progress. Second, the pools send sleep requests. Third, the supervisors
    end the servers that are not asleep; they start these servers again after the trainer has released the GPUs.
    """

    def __init__(
        self, commands: Commands, pools: Mapping[str, Pool], supervisors: Sequence[Supervisor], *,
        discarding: Collection[str], start_timeout_s: float,
    ) -> None:  # fmt: skip
        """`discarding`: roles whose servers may discard their weights when they sleep, because every weight sync sends
        all weights."""
        self._commands, self._pools, self._supervisors = commands, pools, supervisors
        self._discarding, self._timeout_s = frozenset(discarding), start_timeout_s + MARGIN_S
        commands.serve("colocated/settle", self._settle)
        commands.serve("colocated/hold", self._hold)
        commands.serve("colocated/release", self._release)
        for pool in pools.values():
            pool.sleep_all = self._sleep_all

    def sleep(self, refitted: Collection[str]) -> None:
        """Makes all servers release their GPU memory. `refitted`: see ColocatedEngines.sleep."""
        discarded = self._discarding & {*refitted}
        listed = [one for own in self._everywhere("settle") for one in own]
        asleep: list[str] = []
        for name, pool in self._pools.items():
            own = [one.split(" ", 1)[1] for one in listed if one.split(" ", 1)[0] == name]
            asleep += pool.sleep(own, discard=name in discarded)
        self._everywhere("hold", asleep)

    def wake(self) -> None:
        """Makes all sleeping servers allocate their GPU memory again and answer requests. See ColocatedEngines.wake.

        Servers that were restarted receive the current weights before any server allocates its KV cache."""
        for pool in self._pools.values():
            pool.tend()
        self._everywhere("release")
        for pool in self._pools.values():
            pool.wake()

    def _sleep_all(self) -> None:
        """Puts all servers to sleep and wakes them again. Before they wake, servers that were restarted during an
        iteration receive the current weights.

        Aborts the requests that the servers are processing."""
        self.sleep(())
        self.wake()

    def _everywhere(self, verb: str, argument: Sequence[str] = ()) -> list[list[str]]:
        return self._commands.each(f"colocated/{verb}", [[*argument]] * self._commands.size)

    def _settle(self, _: Sequence[str]) -> list[str]:
        """Stops this rank's supervisors from starting servers. Returns a text `ROLE ID` for each running server. ID
        identifies the start of the server; a restarted server has a new ID."""
        for supervisor in self._supervisors:
            supervisor.line.say(SETTLE)
        found = []
        for supervisor in self._supervisors:
            if len(words := self._answer(supervisor)) > 1 and words[0] == SERVES:
                found.append(f"{supervisor.role} {words[1]}")
        return found

    def _hold(self, asleep: Sequence[str]) -> list[str]:
        """Makes this rank's supervisors end the servers that are not asleep. `asleep`: the IDs of the sleeping servers;
        an ID identifies a start of a server."""
        for supervisor in self._supervisors:
            supervisor.line.say(HOLD, *asleep)
        for supervisor in self._supervisors:
            words = self._answer(supervisor)
            if not words:  # no answer, because the supervisor is exiting
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
        """Returns the words of a supervisor's next answer, or an empty list if the supervisor has exited.

        Raises EngineError if the supervisor does not answer in time: the supervisor's server may then still use GPU
        memory."""
        try:
            return supervisor.line.answer(self._timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"{supervisor.name} neither sleeps nor ends, {self._timeout_s:.0f} s after it was asked to "
                f"(engine.start_timeout_s and {MARGIN_S:.0f} s): the trainer cannot take its GPU's memory; see "
                f"{supervisor.log}"
            ) from error


def start_servers(engines: EngineSpec, settings: Servers, rank: int, supervisors: list[Supervisor]) -> None:
    """Starts the servers whose first GPU is this rank's GPU, and appends their supervisors to `supervisors`.

    Servers of different roles start one after the other, because vLLM counts memory that other processes allocate on
    the GPU during its start as its own. Raises ConfigError for a server whose GPUs are not all on this host.
    """
    # The first GPU of replica i is the GPU of trainer rank i * tp; the replica's other GPUs follow.
    replica, offset = divmod(rank, settings.tp)
    if offset or replica >= settings.replicas:
        return
    for name in engines.server_roles:
        supervisors.append(supervisor := Supervisor(engines.directory, name, replica, gpus=_gpus(settings)))
        supervisor.line.say(SETTLE)
        # A timeout is ignored here: the later code that waits for the server reports the error.
        with contextlib.suppress(TimeoutError):
            supervisor.line.answer(settings.start_timeout_s + MARGIN_S)
        supervisor.line.say(RELEASE)


def _gpus(settings: Servers) -> Sequence[int]:
    """Returns the indices of a server's `tp` GPUs among the GPUs visible to this process: this rank's GPU and the next
    tp - 1 GPUs. Returns () without GPUs."""
    if not torch.cuda.is_available():
        return ()
    first, seen = torch.cuda.current_device(), torch.cuda.device_count()
    if first + settings.tp > seen:
        raise ConfigError(
            f"engine.colocate = true with engine.tp = {settings.tp}: the server at GPU {first} would reach beyond this "
            f"host's {seen}; take a tp that divides the GPUs of a node"
        )
    return range(first, first + settings.tp)
