"""Counts the parameters of a model, and of a single rank under a layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megatron_rl.config.base import refuse
from megatron_rl.config.schema import Layout, Lora
from megatron_rl.models import registry
from megatron_rl.models.lora_targets import adapted
from megatron_rl.models.rows import Row
from megatron_rl.models.shape import Shape
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.quantisation import Format, quantised_shapes
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout, element_bytes, engine_parameters


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A model's layout over `world` ranks: config.schema.Layout with all defaults resolved."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, layout: Layout, world: int, *, experts: bool) -> Parallel:
        """Resolves `layout` on `world` ranks. Raises ConfigError if the layout does not divide the ranks."""
        refuse(*layout.rank_problems(world))
        same = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "sequence_parallel")}
        return cls(world=world, vpp=layout.vpp or 1, etp=layout.expert_tp if experts else 1, **same)

    @property
    def model_ranks(self) -> int:
        """Returns the number of ranks of one data-parallel replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Returns the number of data-parallel replicas."""
        return self.world // self.model_ranks

    @property
    def expert_dp(self) -> int:
        """Returns the number of ranks that hold copies of the same experts."""
        return self.world // (self.etp * self.ep * self.pp)

    def __str__(self) -> str:
        shown = ("tp", "pp", "vpp", "cp", "ep", *(["etp"] if self.ep > 1 else []))
        words = [f"{name}{size}" for name in shown if (size := getattr(self, name)) > 1]
        return " ".join([*words, *(["sp"] if self.sequence_parallel else []), f"dp{self.dp}"])


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """The parameter counts of one rank: dense parameters (including router and shared experts), and experts'
    parameters."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        return self.dense + self.expert


@lru_cache(maxsize=4096)
def counts(shape: Shape, parallel: Parallel, stage: int = 0) -> ParameterCounts:
    """Returns the numbers of dense parameters and experts' parameters that Megatron allocates on a rank of pipeline
    stage `stage`, including vocabulary padding.
    """
    sizes = shape.sizes
    outside = registry.ends(sizes)
    rows = [*(outside.first if stage == 0 else ()), *(outside.last if stage == parallel.pp - 1 else ())]
    dense = sum(_elements(row, parallel) for row in rows if not (row.copy and stage == 0))
    expert = 0
    layers = [registry.layer_rows(sizes, layer) for layer in stage_layers(sizes, parallel)[stage]]
    for like, number in Counter(map(id, layers)).items():  # equal layers are the same object
        layer = next(rows for rows in layers if id(rows) == like)
        dense += number * sum(_elements(row, parallel) for row in layer if not row.experts)
        expert += number * sum(_elements(row, parallel) * row.experts // parallel.ep for row in layer if row.experts)
    return ParameterCounts(dense=dense, expert=expert)


def adapter_elements(shape: Shape, parallel: Parallel, lora: Lora, stage: int = 0) -> int:
    """Returns the total number of elements of the LoRA matrices A and B on a rank of pipeline stage `stage`."""
    layers = stage_layers(shape.sizes, parallel)[stage]
    adapter_sizes = (p.elements(lora.rank, parallel.tp) for layer in layers for p in adapted(shape.sizes, layer, lora))
    return int(sum(adapter_sizes))


def stage_layers(sizes: Sizes, parallel: Parallel) -> list[list[int]]:
    """Returns one list per pipeline stage with the indices of the layers of the stage."""
    return TrainerLayout(pp=parallel.pp, vpp=parallel.vpp).layers(sizes)


def heaviest(shape: Shape, parallel: Parallel) -> int:
    """Returns the index of the pipeline stage with the most parameters."""
    return max(range(parallel.pp), key=lambda stage: counts(shape, parallel, stage).all)


def total(shape: Shape) -> int:
    """Returns the number of the model's parameters. A tied output layer is not counted twice."""
    return counts(shape, Parallel(world=1)).all


@lru_cache(maxsize=256)
def engine_bytes(shape: Shape, width: int, form: Format | None) -> float:
    """Returns the size in bytes of all weights of a model in the form in which engines hold them. `width`: bytes per
    element of the weights that are not quantised. `form`: the format of the quantised weights; None if no weights are
    quantised."""
    linear = 0 if form is None else sum(prod(size) for size in quantised_shapes(shape.sizes).values())
    return width * (total(shape) - linear) + (0 if form is None else form.bytes_per_element * linear)


@lru_cache(maxsize=16)
def staging_bytes(sizes: Sizes, layout: EngineLayout, width: int, *, experts_only: bool) -> int:
    """Returns the bytes of pinned host memory that an engine rank needs for receiving new parameters, in addition to
    the memory of the parameters in use. torch rounds the size of each pinned tensor up to a power of two.

    `width`: bytes per element of the weights that are not quantised.
    `experts_only`: whether only the fused experts are received in this memory.
    """
    return sum(
        1 << (prod(shape) * element_bytes(sizes, layout.format, rects[0].tensor, width) - 1).bit_length()
        for name, (shape, rects) in engine_parameters(sizes, layout, 0).items()
        if ".experts." in name or not experts_only
    )


def active(shape: Shape) -> int:
    """Returns the number of parameters that are multiplied with one token.

    The embedding lookup is not counted. The output layer is counted, and `shape.active` experts per layer are counted.
    """
    all_parameters, sizes = counts(shape, Parallel(world=1)), shape.sizes
    experts = all_parameters.expert * shape.active // sizes.experts if sizes.experts else 0
    return all_parameters.dense + experts - (0 if sizes.tied else sizes.vocab * sizes.hidden)


def _elements(row: Row, parallel: Parallel) -> int:
    """Returns the number of elements of a parameter that a rank holds. If every expert has this parameter, counts the
    elements of one expert.
    """
    return prod(row.partition.held(row.sources, parallel.etp if row.experts else parallel.tp, 0)[0])
