"""Brings the servers of a pool to a role's newest adapter, where they compute with it beside a frozen model."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import EngineError
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session.run_setup import Driver
from megatron_rl.world import World

REFITS = 3  # tries, when no server came to the new version
KEPT = 2  # adapters that stay on disk: the newest, and the one that requests under way may still need
NOWHERE = ("", 0, "")  # the store that nobody joins


class AdapterRefit:
    """Writes the adapter of every version as peft does, under `directory`/v{version}, and has the servers load it.

    Every rank has one; `pool` is on the driver. Servers must see the directory.
    """

    def __init__(
        self, world: World, role: str, policy: MegatronPolicy, pool: Pool | None, driver: Driver, directory: Path,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._world, self._role, self._policy, self._pool = world, role, policy, pool
        self._driver, self._directory, self._timeout_s = driver, directory, timeout_s
        if pool is not None:
            pool.refresh = self._refresh

    def __call__(self, version: int) -> None:
        """Waits for a first server. Collective. Raises EngineError when none comes, or none can load the adapter."""
        start, place = time.perf_counter(), self._directory / f"v{version}"
        self._policy.export.write_adapter(place)
        self._world.from_driver(self._bring, version, start)

    def _bring(self, version: int, start: float) -> None:
        assert self._pool is not None
        for _ in range(REFITS):
            self._pool.begin_refit(version, NOWHERE, None, wait_s=self._timeout_s)
            if self._pool.end_refit():
                size = sum(file.stat().st_size for file in (self._directory / f"v{version}").iterdir())
                metrics: dict[str, Any] = {"refit/seconds": time.perf_counter() - start, "refit/gigabytes": size / 1e9}
                self._driver.refitted({"role": self._role, "version": version, **metrics})
                self._forget(version)
                return
        raise EngineError(f"{self._role}: no engine loaded the adapter of version {version}; see their logs")

    def _refresh(self, replicas: list[int]) -> None:
        """Has `replicas` load the adapter that the pool serves, while other servers work."""
        assert self._pool is not None
        if self._pool.begin_refit(self._pool.version, NOWHERE, replicas, wait_s=self._timeout_s):
            self._pool.end_refit()

    def _forget(self, version: int) -> None:
        """Removes adapters that no request needs any more."""
        for place in self._directory.glob("v*"):
            if place.name[1:].isdecimal() and int(place.name[1:]) <= version - KEPT:
                shutil.rmtree(place, ignore_errors=True)
