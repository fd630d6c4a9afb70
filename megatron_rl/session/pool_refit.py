"""Weight sync to a server pool: transfers the trainer's weights to the servers after every update."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_rl.config.schema import RefitConfig
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.pool.states import Address
from megatron_rl.engines.protocol import EngineError
from megatron_rl.messages.commands import Commands
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import RefitError
from megatron_rl.session.adapter_refit import AdapterFiles
from megatron_rl.session.run_setup import Driver

REFITS = 3  # maximum number of attempts of a weight sync until at least one server has received the new weights


class PoolRefit:
    """Transfers the trainer's weights to a pool's servers. Every rank has an instance, and the driver calls it."""

    def __init__(
        self, commands: Commands, role: str, ranks: Sequence[int], side: TrainerSide | AdapterFiles | None,
        address: Address, pool: Pool | None, driver: Driver, settings: RefitConfig, *,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`ranks`: the role's ranks. `side`: the object that sends the weights from this rank, or writes LoRA adapters
        to files; None outside of the role's ranks. `address`: the address of the role's refit store. `pool`: the pool
        of the role's servers, on rank 0. `present`: returns a context manager that keeps the policy's weights on the
        GPU inside the manager's block."""
        self._commands, self._role, self._ranks, self._side = commands, role, ranks, side
        self._address, self._pool, self._driver = address, pool, driver
        self._timeout_s, self._present = settings.timeout_s, present
        self._writes = address == AdapterFiles.address
        self._staged = settings.staged and not self._writes
        self._call = f"refit/{role}"
        commands.serve(self._call, self._attempt)
        commands.serve(f"{self._call}/write", self._write)
        if pool is not None:
            pool.refresh, pool.owned = self._refresh, commands.in_driver

    def __call__(self, version: int) -> None:
        """Transfers the weights of `version` to the servers.

        Waits until at least one server is available. Returns at once if all servers share the trainer's GPUs and are
        dead, because they can restart only later. Raises EngineError if no server becomes available in time, or if no
        server receives the weights in REFITS attempts.
        """
        why, start = None, time.perf_counter()
        if self._writes:  # first, because the servers load the files when the sync begins
            self._together(f"{self._call}/write", version)
        for _ in range(REFITS):
            replicas = self._begin(version, None, self._staged)
            if not replicas:  # all servers share the trainer's GPUs and are dead; they get the weights at their restart
                return
            metrics, why = self._together(self._call, (version, replicas))
            if self._end(version, start, metrics, self._staged):
                return
        raise EngineError(
            f"{self._role}: {REFITS} refits to version {version} reached no engine; the last one: "
            f"{why or 'see the log'}"
        )

    def _together(self, name: str, order: Any) -> Any:
        return self._commands.together(name, order, order, self._ranks, about=self._role).result()

    def _write(self, version: int) -> None:
        assert isinstance(self._side, AdapterFiles)
        with self._present():
            self._side.write(version)

    def _attempt(self, order: tuple[int, Sequence[int]]) -> tuple[dict[str, float], str | None]:
        """Tries once to transfer the weights to the servers. Called on the role's ranks. `order`: (version of the
        weights, indices of the servers).

        Returns (metrics, None), or ({}, error message) if the transfer failed."""
        version, replicas = order
        assert self._side is not None, "called on the role's ranks"
        try:
            with self._present():
                return self._side(version, replicas), None
        except RefitError as error:
            return {}, str(error)

    def _begin(self, version: int, only: Sequence[int] | None = None, staged: bool = False) -> list[int]:
        assert self._pool is not None
        return self._pool.begin_refit(version, self._address, only, wait_s=self._timeout_s, staged=staged)

    def _end(self, version: int, start: float, metrics: Mapping[str, float], staged: bool = False) -> bool:
        """Waits until the servers have the weights. If at least one server has them, records the refit's metrics and
        returns True. Otherwise returns False. Called by the driver.

        `start`: time at which the refit began; gives the duration if `metrics` has none. `metrics`: empty if the
        transfer failed. `staged`: True if the servers received the weights while they generated. This method then makes
        the servers replace their weights, unless the transfer failed."""
        assert self._pool is not None
        if staged and not metrics:
            return False
        if staged:
            self._pool.swap(version)
        reached = self._pool.end_refit() > 0
        if reached:
            about = {"role": self._role, "version": version, "refit/seconds": time.perf_counter() - start}
            self._driver.refitted({**about, **metrics, "refit/pause_seconds": self._pool.pause_s})
        return reached

    def _refresh(self, replicas: list[int]) -> None:
        """Sends the current weights to the servers with the indices `replicas`, while other servers generate. Called by
        the driver."""
        assert self._pool is not None
        version, start = self._pool.version, time.perf_counter()
        begun = self._begin(version, replicas)
        if begun:
            self._end(version, start, self._together(self._call, (version, begun))[0])
