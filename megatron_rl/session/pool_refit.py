"""Refit of a server pool: transfers the trainer's weights to the servers after every update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import EngineError
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import RefitError
from megatron_rl.session.run_setup import Driver
from megatron_rl.world import World

REFITS = 3  # maximum number of attempts while no participating server has received the new version


class PoolRefit:
    """Transfers the trainer's weights to a pool's servers.

    Every rank has an instance. `pool` is None except on the driver."""

    def __init__(
        self, world: World, role: str, side: TrainerSide, pool: Pool | None, driver: Driver, timeout_s: float, *,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`present`: returns a context manager that holds the policy's weights on its device."""
        self._world, self._role, self._side, self._pool = world, role, side, pool
        self._driver, self._timeout_s, self._present = driver, timeout_s, present
        self._call = f"refit/{role}"
        world.serve(self._call, self._attempt)
        if pool is not None:
            pool.refresh = self._refresh

    def __call__(self, version: int) -> None:
        """Transfers the weights of `version` to the servers. Collective.

        Waits for a first server, unless servers cannot be started now. Raises EngineError if no server becomes
        available, or if no server receives the weights.
        """
        why = None
        for _ in range(REFITS):
            replicas = self._world.from_driver(self._begin, version)
            if not replicas:  # all servers share the trainer's GPUs and are dead: they get the weights after a restart
                return
            metrics, why = self._attempt((version, replicas))
            if self._world.from_driver(self._end):
                self._driver.refitted({"role": self._role, "version": version, **metrics})
                return
        raise EngineError(
            f"{self._role}: {REFITS} refits to version {version} reached no engine; the last one: "
            f"{why or 'see the log'}"
        )

    def _attempt(self, order: tuple[int, Sequence[int]]) -> tuple[dict[str, float], str | None]:
        """Transfers the weights once; called on every rank. Returns (metrics, None), or ({}, message) if it failed."""
        version, replicas = order
        try:
            with self._present():
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
        """Transfers the pool's version to the servers `replicas`, on the driver, while other servers generate."""
        assert self._pool is not None
        begun = self._begin(self._pool.version, replicas)
        if begun:
            answers = self._world.call_all(self._call, [(self._pool.version, begun)] * self._world.size)
            if self._end():
                self._driver.refitted({"role": self._role, "version": self._pool.version, **answers[0][0]})
