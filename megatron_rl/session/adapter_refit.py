"""Weight sync for servers that apply LoRA adapters to a frozen base model: the servers load the newest adapter."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.world import World

KEPT = 2  # adapter versions kept on disk: the newest, and the previous one, which running requests may still use


class AdapterFiles:
    """The trainer's side of weight syncs that transfer LoRA adapters as files. Each version of an adapter is written in
    peft format to `directory`/v{version}, which the servers must be able to read. Every rank has an instance."""

    address = ("", 0, "")  # placeholder for the address of a refit store, because adapter files need no store

    def __init__(self, world: World, policy: MegatronPolicy, directory: Path) -> None:
        self._world, self._policy, self._directory = world, policy, directory

    def write(self, version: int) -> None:
        """Writes the adapter of `version` to disk. Collective."""
        self._policy.export.write_adapter(self._directory / f"v{version}")

    def __call__(self, version: int, replicas: Sequence[int]) -> dict[str, float]:
        """Deletes the adapter files that are at least KEPT versions older than `version`. Sends nothing, because the
        servers load the files of `version` themselves.

        On rank 0, returns metrics with the size of the adapter of `version`. On other ranks, returns {}."""
        if self._world.rank != 0:
            return {}
        for place in self._directory.glob("v*"):
            if place.name[1:].isdecimal() and int(place.name[1:]) <= version - KEPT:
                shutil.rmtree(place, ignore_errors=True)
        size = sum(file.stat().st_size for file in (self._directory / f"v{version}").iterdir())
        return {"refit/gigabytes": size / 1e9}
