"""The part of a refit (weight sync) that the worker processes of all engines share. It runs inside the engine's
server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.engines import user_families
from megatron_rl.refit.engine_side import SETUP_TIMEOUT_S, EngineSide, StagedEngineSide
from megatron_rl.refit.refit_store import Address, RefitStore
from megatron_rl.refit.store_messages import Setup
from megatron_rl.refit.transport import Tensors
from megatron_rl.weights.rank_layouts import differences, engine_parameters

Staging = Literal["off", "host", "device"]  # values of refit.staging other than "auto"


def beside(shape: torch.Size, dtype: torch.dtype, device: torch.device, staging: Staging) -> Tensor:
    """Allocates staging memory, which receives the new values of a parameter while the engine uses the old values.
    `device`: the device of the engine. The staging memory is on this device if `staging` is "device". Otherwise it is
    on the host, and is pinned if the engine is on a GPU.
    """
    if staging == "device":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


class Landing:
    """The destination of a weight sync (refit): the parameters of an inference engine, by their names in the engine.
    Implements refit.engine_side.Endpoint.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        # Engines store the biases of all experts as a matrix, but weight syncs send them as one vector.
        vectors = {name: t.view(-1) if name.endswith("_bias") else t for name, t in parameters.items()}
        self.parameters, self.targets = parameters, Tensors(vectors)

    def begin_refit(self) -> None: ...

    def commit_refit(self, version: int) -> None:
        """Completes a refit after all weights have arrived. A no-op if the weights were received in place."""


def join(
    address: Address, landing_of: Callable[[Staging], Landing], device: torch.device, *,
    replica: int, tp: int, tp_rank: int,
) -> EngineSide:  # fmt: skip
    """Connects rank `tp_rank` of the `tp` ranks of an engine replica to the trainer's refit store (the key-value store
    of weight syncs) at `address`.

    `landing_of`: creates the Landing of this rank, with staging memory unless the argument is "off".

    Raises ValueError if the trainer's model or parallel layout does not match this engine, and TransportError if the
    trainer does not answer.
    """
    user_families.learn()
    rank = replica * tp + tp_rank
    store = RefitStore.join(address)
    settings = store.get("setup", Setup, SETUP_TIMEOUT_S).settings
    landing = landing_of("device" if settings.staging == "device" else "host" if settings.staged else "off")
    side = (StagedEngineSide if settings.staged else EngineSide)(store, rank, landing, device)
    wanted = engine_parameters(side.topology.sizes, side.topology.engines, rank)
    shapes = {name: shape for name, (shape, _) in wanted.items()}
    wrong = [*differences(shapes, {name: tuple(t.shape) for name, t in landing.parameters.items()})]
    if side.topology.engines.tp != tp:
        wrong.insert(0, f"it has {tp} ranks and the trainer counts on {side.topology.engines.tp}")
    if wrong:
        side.close()
        raise ValueError("the trainer's weights do not fit this engine: " + "; ".join(wrong[:5]))
    if isinstance(side, StagedEngineSide):
        side.start()
    return side


def take_part(side: EngineSide | None, version: int, wait_s: float) -> None:
    """Takes part in the next weight sync (refit), which must begin within `wait_s` seconds. With staging, the refit has
    already ended, and this call replaces the engine's weights by the received weights. Raises RuntimeError if the
    engine has not joined a trainer, or if the trainer did not commit `version` on this rank.
    """
    if side is None:
        raise RuntimeError("this engine has not joined a trainer")
    committed = side.take_part(wait_s)
    if committed != version:
        raise RuntimeError(
            f"version {version} was not committed here ({committed} was): the engine needs a whole refit"
        )
