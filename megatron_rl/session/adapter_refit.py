"""Weight sync for servers that apply LoRA adapters to a frozen base model: the servers load the newest adapter."""

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

REFITS = 3  # maximum number of attempts to have at least one server load a new adapter version
KEPT = 2  # adapter versions kept on disk: the newest, and the previous version, which running requests may still use
# placeholder for the address of a weight store, because adapters are sent as files without a store
NOWHERE = ("", 0, "")


class AdapterRefit:
    """Updates a role's servers by adapter files: writes each version in peft format and has the servers load the files.

    The adapter of a version is in `directory`/v{version}. The servers must be able to read `directory`. Every rank has
    an instance. `pool`, the pool of the role's servers, is None except on the driver (rank 0).
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
        """Writes the adapter of `version` to disk and has the servers load it. Collective. Waits until at least one
        server is available.

        Raises EngineError if no server becomes available in time, or if no server loads the adapter in REFITS
        attempts."""
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
        """Has the servers with the indices `replicas` load the current adapter. The other servers continue to
        generate."""
        assert self._pool is not None
        if self._pool.begin_refit(self._pool.version, NOWHERE, replicas, wait_s=self._timeout_s):
            self._pool.end_refit()

    def _forget(self, version: int) -> None:
        """Deletes the adapter directories that are at least KEPT versions older than `version`."""
        for place in self._directory.glob("v*"):
            if place.name[1:].isdecimal() and int(place.name[1:]) <= version - KEPT:
                shutil.rmtree(place, ignore_errors=True)
