"""Computes which 2-D slices of Hugging Face tensors each trainer rank and engine rank holds, from the layouts alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.config.model import Layout
from megatron_rl.models.divisibility import engine_problems, trainer_problems
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.parameter_mapping import (
    Parameter,
    Rect,
    Shape,
    Shard,
    engine,
    hf_shapes,
    kept_float32,
    trainer_parameters,
)
from megatron_rl.weights.quantisation import FORMATS, SCALES, Format, held, quantised_shapes, sent


class Holding(NamedTuple):
    """A list of parameters, with the 2-D slices of Hugging Face tensors that they consist of. Each rank in `ranks`
    holds an identical copy of all these parameters.
    """

    ranks: tuple[int, ...]
    parameters: list[tuple[str, Rect]]


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """The layout of a trainer in Megatron's rank order: tensor-parallel fastest, then data-parallel, then pipeline.

    Experts have a different order within a stage: expert-tensor-parallel fastest, then expert-parallel, then replicas.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    # number of interleaved model chunks per pipeline stage
    # Layers are divided into pp * vpp runs of consecutive layers. Chunk c of stage s is the run with index c * pp + s.
    vpp: int = 1
    # number of layers of each of the pp * vpp runs of consecutive layers, in order
    # If empty, layers are divided as evenly as possible, and the first runs get the extra layers.
    stages: tuple[int, ...] = ()
    vocab_multiple: int = 1
    # whether parameters have the names of the Transformer Engine layer spec (True) or of the local layer spec (False)
    fused: bool = True

    def __post_init__(self) -> None:
        if self.tp * self.dp % (self.ep * self.etp):
            raise ConfigError(
                f"ep {self.ep} x etp {self.etp} does not divide the {self.tp * self.dp} ranks of a stage (tp x dp)"
            )
        if self.stages and len(self.stages) != self.pp * self.vpp:
            raise ConfigError(f"stages {self.stages} for pp = {self.pp} x vpp = {self.vpp}: give the layers of each")

    @property
    def world(self) -> int:
        """Returns the number of ranks."""
        return self.tp * self.pp * self.dp

    def layers(self, sizes: Sizes) -> list[list[int]]:
        """Returns one list per pipeline stage with the global indices of the stage's layers.

        Raises ConfigError if the layer counts in `stages` do not sum to the model's number of layers.
        """
        runs = self.pp * self.vpp
        even, remainder = divmod(sizes.num_layers, runs)
        counts = self.stages or tuple(even + (i < remainder) for i in range(runs))
        if sum(counts) != sizes.num_layers:
            raise ConfigError(f"stages {counts} hold {sum(counts)} layers, the model has {sizes.num_layers}")
        ends = [sum(counts[: i + 1]) for i in range(runs)]
        layers_of_run = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return [[layer for chunk in layers_of_run[stage :: self.pp] for layer in chunk] for stage in range(self.pp)]


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The layout of `replicas` engines with `tp` ranks each. Ranks are numbered engine by engine.

    `whole`: whether every rank holds the whole model under Hugging Face's names (the embedded engine, where tp is 1).
    `expert_parallel`: whether a rank holds some experts as a whole, instead of a part of every expert.
    `quantization`: the format in which the engines hold the weights of linear layers, a key of
    weights.quantisation.FORMATS. None means that these weights have the model's dtype.
    """

    tp: int = 1
    replicas: int = 1
    expert_parallel: bool = False
    whole: bool = False
    quantization: str | None = None

    @property
    def world(self) -> int:
        """Returns the number of ranks of all replicas."""
        return self.tp * self.replicas

    @property
    def format(self) -> Format | None:
        """Returns the format of the engines' quantised weights, or None if the weights are not quantised."""
        return None if self.quantization is None else FORMATS[self.quantization]


def trainer(sizes: Sizes, layout: TrainerLayout) -> Iterator[Holding]:
    """Yields the holdings (parameters, and the ranks that hold copies of them) of a trainer's ranks.

    Dense parameters and experts are separate holdings, because their replicas are on different ranks.

    Raises ConfigError if the layout does not divide the model.
    """
    etp = layout.etp if sizes.experts or layout.etp > 1 else None
    # does not check the numbers of layers in the runs, because runs may have different lengths
    checked = Layout(tp=layout.tp, ep=layout.ep, etp=etp, sequence_parallel=layout.tp > 1)
    refuse(*(f"trainer: {line}" for line in trainer_problems(sizes, checked, f"the {sizes.family} model")))
    stage_ranks = layout.tp * layout.dp
    for stage, layers in enumerate(layout.layers(sizes)):
        ends = stage == 0, stage == layout.pp - 1
        base = stage * stage_ranks
        for rank in range(layout.tp):
            shard = Shard(layout.tp, rank)
            copies = tuple(base + rank + layout.tp * replica for replica in range(layout.dp))
            held_parameters = trainer_parameters(
                sizes, layers, None, shard, first_last=ends, fused=layout.fused, vocab_multiple=layout.vocab_multiple
            )
            yield _holding(copies, held_parameters)
        local_experts = sizes.experts // layout.ep
        for group in range(layout.ep * layout.etp if local_experts else 0):
            ep_rank, etp_rank = divmod(group, layout.etp)
            experts = range(ep_rank * local_experts, (ep_rank + 1) * local_experts)
            copies = tuple(range(base + group, base + stage_ranks, layout.ep * layout.etp))
            shard = Shard(expert_tp=layout.etp, expert_rank=etp_rank)
            held_parameters = trainer_parameters(sizes, layers, experts, shard, first_last=ends, fused=layout.fused)
            yield _holding(copies, held_parameters)


def engines(sizes: Sizes, layout: EngineLayout, ranks: Collection[int] | None = None) -> Iterator[Holding]:
    """Yields the holdings (parameters, and the ranks that hold copies of them) of the engines' ranks. If `ranks` is
    given, other ranks are left out.

    Raises ConfigError if the layout does not divide the model.
    """
    whole_experts = layout.expert_parallel
    problems = engine_problems(sizes, layout.tp, f"the {sizes.family} model", expert_parallel=whole_experts)
    refuse(*(f"engine: {line}" for line in problems))
    for rank in range(layout.tp):
        copies = tuple(r for r in range(rank, layout.world, layout.tp) if ranks is None or r in ranks)
        if copies:
            parameters = engine_parameters(sizes, layout, rank)
            yield Holding(copies, [(name, rect) for name, (_, rects) in parameters.items() for rect in rects])


def engine_parameters(sizes: Sizes, layout: EngineLayout, rank: int) -> dict[str, tuple[Shape, list[Rect]]]:
    """Returns {name: (shape, list of 2-D slices of Hugging Face tensors)} of the parameters of an engine rank. `rank`:
    index of the engine rank among the ranks of all replicas, which are numbered consecutively.
    """
    if layout.whole:
        parameters = {name: (shape, [Rect(name, 0, 0, *shape, 0, 0)]) for name, shape in hf_shapes(sizes).items()}
    else:
        parameters = engine(sizes, layout.tp, rank % layout.tp, expert_parallel=layout.expert_parallel)
    return parameters if layout.format is None else held(sizes, layout.format, parameters)


def element_bytes(sizes: Sizes, form: Format | None, tensor: str, width: int) -> int:
    """Returns the bytes per element of the tensor `tensor` in an engine. Two float4 values count as one element.

    `form`: the format of the quantised weights; None if no weights are quantised.
    `tensor`: a Hugging Face tensor's name, or this name with the suffix SCALES for the scales of the tensor.
    `width`: bytes per element of the model's dtype.
    """
    if form is not None and tensor in quantised_shapes(sizes):
        return 1
    if form is not None and tensor.endswith(SCALES):
        return form.scale_bytes
    return 4 if tensor in kept_float32(sizes) else width


def block_problems(sizes: Sizes, trained: TrainerLayout, engine: EngineLayout) -> list[str]:
    """Returns error messages: one if the trainer's parallel layout splits a quantisation block between ranks, and one
    if the engines' layout splits a quantisation block."""
    form, problems = engine.format, list[str]()
    assert form is not None
    # It is enough to check one layer of each kind, with two experts for each engine rank.
    few = min(sizes.experts, 2 * engine.tp)
    sizes = replace(sizes, num_layers=min(sizes.num_layers, sizes.dense_layers + 1), experts=few)
    etp = trained.etp if sizes.experts else 1
    trained = TrainerLayout(tp=trained.tp, dp=etp, etp=etp)
    for side, check in (
        (
            f"layout.tp = {trained.tp}, etp = {trained.etp}",
            lambda: [sent(sizes, form, h[1]) for h in trainer(sizes, trained)],
        ),
        (f"engine.tp = {engine.tp}", lambda: [*engines(sizes, engine)]),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(f"engine.quantization = {engine.quantization!r} with {side}: {error}; choose fewer ranks")
    return problems


def _holding(ranks: tuple[int, ...], parameters: Iterable[Parameter]) -> Holding:
    """Returns the `Holding` of `parameters`. `ranks`: the ranks that hold copies of these parameters."""
    return Holding(ranks, [(name, rect) for name, _, rects in parameters for rect in rects])


def differences(expected: Mapping[str, tuple[int, int]], actual: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yields one error message for each parameter of an engine that differs from the expected layout.

    `expected`, `actual`: name -> shape in the layout and in the engine.

    Shapes may differ as long as the number of elements is equal.
    """
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            yield f"{name} is not in the engine"
        elif name not in expected:
            yield f"{name} is not in the trainer's model"
        elif math.prod(actual[name]) != math.prod(expected[name]):
            yield f"{name} is {list(actual[name])} in the engine and {list(expected[name])} in the trainer's layout"
