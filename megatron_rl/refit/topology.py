"""The model sizes and layouts that trainer and engines share, so that each process computes the same refit plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.quantised_source import QuantisedSource
from megatron_rl.refit.transport import Added, Parameters, Readable, Sums, Tensors
from megatron_rl.refit.transport_choice import RankLocations
from megatron_rl.weights import rank_layouts, refit_plan
from megatron_rl.weights.parameter_mapping import Rect, kept_float32
from megatron_rl.weights.quantisation import quantised_shapes, sent
from megatron_rl.weights.rank_layouts import EngineLayout, Holding, TrainerLayout
from megatron_rl.weights.refit_plan import RefitPlan

# Messages between processes on the same GPU may be larger than other messages by this factor.
# The handshake of one message takes longer than copying 64 MiB within a GPU.
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
    dtype: str  # name of the torch dtype of the engines' parameters that are not quantised, such as "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Returns the dtype of the elements in a refit's messages. It is uint8 for engines with quantised weights,
        because the parameters of these engines have several dtypes.
        """
        return torch.uint8 if self.engines.format else getattr(torch, self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Returns this topology as JSON-serializable values."""
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in ("trainer", "engines")}
        # Only the fields of Sizes are sent. Fields that a subclass of Sizes adds are left out.
        sizes = {f.name: getattr(self.sizes, f.name) for f in dataclasses.fields(Sizes)}
        return {"sizes": sizes, "dtype": self.dtype, **parts}

    def plan(self, locations: RankLocations, bucket_mib: float) -> RefitPlan:
        """Returns the refit plan (the list of messages) for the engine ranks in `locations`. `bucket_mib`: maximum size
        of a message in MiB. A message between processes on the same GPU may be GPU_BUCKETS times as large.
        """
        bucket_elements = max(1, int(bucket_mib * 2**20) // self.torch_dtype.itemsize)
        on_gpu = locations.trainer[0].device != "cpu"
        trainer, engine = locations.placements(self.engines.world)
        return refit_plan.plan(
            self._carried(self._sent()),
            self._carried(rank_layouts.engines(self.sizes, self.engines, ranks=locations.engines)),
            trainer=trainer,
            engine=engine,
            bucket_elements=bucket_elements,
            local_bucket_elements=bucket_elements * (GPU_BUCKETS if on_gpu else 1),
        )

    def sources(self, rank: int, parameters: Mapping[str, Tensor], added: Added | None) -> Readable:
        """Returns the parameters of trainer rank `rank` in the form in which a refit sends them. `added`: function that
        returns values to add to the parameters, such as a LoRA delta, see `Sums`.
        """
        tensors, form = Tensors(parameters), self.engines.format
        plain = self.carried(tensors) if form is None else tensors
        summed = plain if added is None else Sums(plain, added)
        if form is None:
            return summed
        held: dict[str, list[tuple[str, Rect]]] = {}
        for holding in rank_layouts.trainer(self.sizes, self.trainer):
            for name, rect in holding.parameters if rank in holding.ranks else ():
                if rect.tensor in quantised_shapes(self.sizes):
                    held.setdefault(rect.tensor, []).append((name, rect))
        kept, dtype = kept_float32(self.sizes), getattr(torch, self.dtype)
        return QuantisedSource(summed, held, form, dtype, float32=kept)

    def _sent(self) -> Iterator[Holding]:
        """Yields the trainer's holdings (parameters and the ranks that hold them) in the form in which a refit sends
        them: quantised if the engines have quantised weights.
        """
        for holding in rank_layouts.trainer(self.sizes, self.trainer):
            form = self.engines.format
            yield holding if form is None else holding._replace(parameters=sent(self.sizes, form, holding.parameters))

    def carried(self, parameters: P) -> P:
        """Returns the parameters of a rank in the form in which a refit sends them.

        Some parameters are float32 even if the model has another dtype. They are viewed bit for bit as the dtype in
        which weights are sent. If weights are sent as bytes, all parameters are viewed as bytes.
        """
        kept = kept_float32(self.sizes)
        bytes_or_kept = self.engines.format or (kept and self.torch_dtype.itemsize < torch.float32.itemsize)
        return parameters.carried(kept, self.torch_dtype) if bytes_or_kept else parameters

    def _carried(self, holdings: Iterable[Holding]) -> Iterator[Holding]:
        """Yields the holdings (parameters and the ranks that hold them) with columns counted in elements of the dtype
        that is sent. For example, a float32 element counts as two columns if bfloat16 is sent.
        """
        for holding in holdings:
            wide = [(name, rect, self._words(rect.tensor)) for name, rect in holding.parameters]
            yield Holding(
                holding.ranks,
                [
                    (
                        name,
                        rect._replace(column=rect.column * n, columns=rect.columns * n, at_column=rect.at_column * n),
                    )
                    for name, rect, n in wide
                ],
            )

    def _words(self, tensor: str) -> int:
        """Returns how many elements of the dtype in which weights are sent are as large as one element of a Hugging
        Face tensor. For example, returns 2 for a float32 tensor if weights are sent as bfloat16.
        """
        form, width = self.engines.format, getattr(torch, self.dtype).itemsize
        size = rank_layouts.element_bytes(self.sizes, form, tensor, width)
        return size if form else size // width

    def check_trainer(self, rank: int, names: Collection[str]) -> None:
        """Raises ValueError unless `names` are exactly the parameters that trainer rank `rank` has in the layout."""
        expected = {
            name for h in rank_layouts.trainer(self.sizes, self.trainer) if rank in h.ranks for name, _ in h.parameters
        }
        missing, more = sorted(expected - set(names)), sorted(set(names) - expected)
        if missing or more:
            raise ValueError(f"rank {rank} of {self.trainer} lacks {missing[:3]}, and has {more[:3]} beyond its layout")
