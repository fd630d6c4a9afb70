"""The model sizes and layouts that trainer and engines share, so that each process computes the same refit plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self, TypeVar

import torch

from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.transport import Parameters
from megatron_rl.refit.transport_choice import RankLocations
from megatron_rl.weights import rank_layouts, refit_plan
from megatron_rl.weights.parameter_mapping import kept_float32
from megatron_rl.weights.rank_layouts import EngineLayout, Holding, TrainerLayout
from megatron_rl.weights.refit_plan import RefitPlan

# Factor by which messages between processes on the same GPU are larger than other messages, because the handshake of a
# message takes longer than the GPU's copy of 64 MiB.
GPU_BUCKETS = 8
P = TypeVar("P", bound=Parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The sizes of the model, and the layouts of the trainer and the engines. A refit sends the weights from the
    trainer's layout to the engines' layout.
    """

    sizes: Sizes
    trainer: TrainerLayout
    engines: EngineLayout
    dtype: str  # name of the torch dtype in which weights are sent, such as "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Returns the dtype in which weights are sent."""
        return getattr(torch, self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Returns this topology as JSON-serializable values."""
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in ("trainer", "engines")}
        # Sizes only: if the object is of a subclass, the fields that the subclass adds are left out.
        sizes = {f.name: getattr(self.sizes, f.name) for f in dataclasses.fields(Sizes)}
        return {"sizes": sizes, "dtype": self.dtype, **parts}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Returns the topology from the output of `to_json`."""
        trainer = value["trainer"] | {"stages": tuple(value["trainer"]["stages"])}
        return cls(
            sizes=Sizes(**value["sizes"]),
            trainer=TrainerLayout(**trainer),
            engines=EngineLayout(**value["engines"]),
            dtype=value["dtype"],
        )

    def plan(self, locations: RankLocations, bucket_mib: float) -> RefitPlan:
        """Returns the refit plan (the list of messages) for the engine ranks in `locations`, with messages of up to
        `bucket_mib` MiB, or GPU_BUCKETS times as much between processes on the same GPU.
        """
        bucket_elements = max(1, int(bucket_mib * 2**20) // self.torch_dtype.itemsize)
        on_gpu = locations.trainer[0].device != "cpu"
        trainer, engine = locations.placements(self.engines.world)
        return refit_plan.plan(
            self._carried(rank_layouts.trainer(self.sizes, self.trainer)),
            self._carried(rank_layouts.engines(self.sizes, self.engines, ranks=locations.engines)),
            trainer=trainer,
            engine=engine,
            bucket_elements=bucket_elements,
            local_bucket_elements=bucket_elements * (GPU_BUCKETS if on_gpu else 1),
        )

    def carried(self, parameters: P) -> P:
        """Returns the parameters of a rank in the form in which a refit sends them.

        Parameters that are float32 whatever the model's dtype are viewed bit for bit as the dtype in which weights are
        sent.
        """
        kept = kept_float32(self.sizes)
        return parameters.carried(kept, self.torch_dtype) if kept and self._words > 1 else parameters

    def _carried(self, holdings: Iterable[Holding]) -> Iterator[Holding]:
        """Yields the holdings (parameters and the ranks that hold them). Rectangles are widened for parameters that are
        float32 whatever the model's dtype: each float32 element is counted as several elements of the dtype in which
        weights are sent.
        """
        kept = kept_float32(self.sizes)
        for holding in holdings:
            wide = [
                (name, rect._replace(columns=self._words) if rect.tensor in kept else rect)
                for name, rect in (holding.parameters if kept else ())
            ]
            yield Holding(holding.ranks, wide) if kept else holding

    @property
    def _words(self) -> int:
        """Returns the number of elements of the sent dtype that have the size of one float32, for example 2 for
        bfloat16.
        """
        return torch.float32.itemsize // self.torch_dtype.itemsize

    def check_trainer(self, rank: int, names: Collection[str]) -> None:
        """Raises ValueError unless `names` are exactly the parameters that trainer rank `rank` has in the layout."""
        wanted = {
            name for h in rank_layouts.trainer(self.sizes, self.trainer) if rank in h.ranks for name, _ in h.parameters
        }
        missing, more = sorted(wanted - set(names)), sorted(set(names) - wanted)
        if missing or more:
            raise ValueError(f"rank {rank} of {self.trainer} lacks {missing[:3]}, and has {more[:3]} beyond its layout")
