"""Weight sync for servers that apply LoRA adapters to a frozen base model: the servers load the newest adapter."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from megatron_rl.messages.world import World
from megatron_rl.models.lora_targets import WEIGHTS
from megatron_rl.refit.weight_limits import NonFiniteWeights
from megatron_rl.weights.tensor_copies import all_finite

if TYPE_CHECKING:  # `eval` and `generate` import this module, but not Megatron-core
    from megatron_rl.megatron.policy import MegatronPolicy

KEPT = 2  # adapter versions kept on disk: the newest, and the previous one, which running requests may still use


class AdapterFiles:
    """The trainer's side of weight syncs that transfer LoRA adapters as files. Each version of an adapter is written in
    peft format to `directory`/v{version}, which the servers must be able to read. Every rank has an instance."""

    address = ("", 0, "")  # placeholder for the address of a refit store, because adapter files need no store

    def __init__(self, world: World, policy: MegatronPolicy, directory: Path) -> None:
        self._world, self._policy, self._directory = world, policy, directory

    def write(self, version: int) -> None:
        """Writes the adapter of `version` to disk. Collective. Raises NonFiniteWeights on every rank if the adapter has
        values that are not finite."""
        place = self._directory / f"v{version}"
        self._policy.export.write_adapter(place)
        self._world.from_leader(_refuse_non_finite, place, version)

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


def _refuse_non_finite(directory: Path, version: int) -> None:
    """Raises NonFiniteWeights if an adapter's file has values that are not finite."""
    for name, tensor in load_file(directory / WEIGHTS).items():
        if not all_finite(tensor):
            raise NonFiniteWeights(
                f"version {version} of the weights is not sent: {name} of the adapter has values that are not finite. "
                "Training has diverged; resume from an earlier checkpoint with a lower optimizer.lr"
            )
