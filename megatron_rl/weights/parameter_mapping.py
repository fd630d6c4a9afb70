"""Maps Hugging Face tensors, Megatron parameters and engine parameters to each other, as lists of 2-D slices.

A rank's part of a parameter is described by a list of `Rect`s. A `Rect` is a 2-D slice of a Hugging Face tensor and the
slice's position in the parameter. An import copies slices from tensors to parameters, and an export copies slices from
parameters to tensors. A refit (weight sync to the engines) intersects the slices of two layouts. The `Row`s of a model
family (megatron_rl/models/) define the parameters and how ranks shard them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron_rl.config.schema import ConfigError
from megatron_rl.models.blocks import BIAS, HEAD
from megatron_rl.models.partitions import Held, Rect, Shape
from megatron_rl.models.registry import ends, family_of, layer_rows
from megatron_rl.models.rows import EXPERT, HF_LAYER, MEGATRON_LAYER, Row
from megatron_rl.models.sizes import Sizes


class Shard(NamedTuple):
    """The shard (part) of every parameter that a rank holds.

    A dense parameter is split into `tp` parts (tensor parallelism), of which the rank holds the part with index `rank`.
    An expert's parameter is split into `expert_tp` parts (expert tensor parallelism), of which the rank holds the part
    with index `expert_rank`.
    """

    tp: int = 1
    rank: int = 0
    expert_tp: int = 1
    expert_rank: int = 0

    def of(self, row: Row) -> tuple[int, int]:
        """Returns (number of parts into which a parameter is split, index of this rank's part). `row`: the parameter's
        description."""
        return (self.expert_tp, self.expert_rank) if row.experts else (self.tp, self.rank)


class Parameter(NamedTuple):
    """A rank's part of a parameter: the parameter's name, the shape of the part, and the 2-D slices of Hugging Face
    tensors that form the part.
    """

    name: str
    shape: Shape
    rects: list[Rect]


WHOLE = Shard()
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NUMBER = re.compile(r"(mlp\.experts\.(?:linear_fc[12]\.(?:weight|bias)|local_experts\.))(\d+)")


def hf_shapes(sizes: Sizes) -> dict[str, Shape]:
    """Returns {tensor name: (rows, columns)} of all tensors in the model's Hugging Face directory."""
    first, last = ends(sizes)
    shapes = {s.name: (s.rows, s.columns) for row in (*first, *last) for s in row.sources}
    for layer in range(sizes.num_layers):
        prefix = HF_LAYER.format(layer)
        for row in layer_rows(sizes, layer):
            for expert in range(row.experts or 1):
                shapes |= {prefix + s.name.replace(EXPERT, str(expert)): (s.rows, s.columns) for s in row.sources}
    return shapes


@lru_cache(maxsize=64)
def kept_float32(sizes: Sizes) -> frozenset[str]:
    """Returns the names of the untrained parameters that are float32 whatever the model's dtype.

    Each parameter is in the set under its Hugging Face name, its Megatron names in both layer specs, and its engine
    name.
    """
    names: set[str] = set()
    for layer in range(sizes.num_layers):
        megatron_prefix, prefix = MEGATRON_LAYER.format(layer), HF_LAYER.format(layer)
        for row in (row for row in layer_rows(sizes, layer) if row.float32):
            names |= {megatron_prefix + row.spelled(fused) for fused in (False, True)}
            names |= {prefix + name for name in (*(s.name for s in row.sources), row.engine) if name is not None}
    return frozenset(names)


def is_expert(name: str) -> bool:
    """Checks whether a Megatron parameter belongs to one of the experts that a router selects. Expert-parallel ranks
    hold the parameters of different experts.
    """
    return ".mlp.experts." in name


def renumber_expert(name: str, *, by: int) -> str:
    """Returns the name of an expert's parameter with `by` added to its expert index.

    Used to convert a rank's local expert index to the global index.
    """
    return _EXPERT_NUMBER.sub(lambda match: match[1] + str(int(match[2]) + by), name)


def megatron(sizes: Sizes, name: str, shard: Shard = WHOLE, *, vocab_multiple: int = 1) -> tuple[Shape, list[Rect]]:
    """Returns (shape of this rank's part, 2-D slices of Hugging Face tensors that fill the part) of a Megatron
    parameter.

    `name`: the name with global layer and expert indices.
    `vocab_multiple`: vocabulary rows are padded to a multiple of `vocab_multiple` * tp.

    Elements that no slice covers are vocabulary padding. Raises KeyError if no Hugging Face tensor is known for the
    name.
    """
    row, prefix, expert = _find(sizes, name)
    shape, rects = row.partition.held(row.sources, *shard.of(row), vocab_multiple)
    return shape, _named(rects, prefix, expert)


def _find(sizes: Sizes, name: str) -> tuple[Row, str, str]:
    """Returns (`Row` that describes the parameter, prefix of the Hugging Face tensors' names, expert index or "") of a
    Megatron parameter. `name` is the parameter's name in the Transformer Engine layer spec or in the local layer spec.

    Raises KeyError if the model has no parameter of this name.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        row, prefix, expert = _rows_by_name(sizes, None).get(name), "", ""
    else:
        number = int(layer[1])
        expert_match = _EXPERT_NUMBER.search(layer[2])
        expert = expert_match[2] if expert_match else ""
        part = layer[2] if expert_match is None else _EXPERT_NUMBER.sub(rf"\g<1>{EXPERT}", layer[2])
        row = _rows_by_name(sizes, number).get(part) if number < sizes.num_layers else None
        prefix = HF_LAYER.format(number)
    if row is None:
        raise KeyError(f"no Hugging Face tensor is known for the Megatron parameter {name!r} of a {sizes.family} model")
    return row, prefix, expert


@lru_cache(maxsize=1024)
def _rows_by_name(sizes: Sizes, layer: int | None) -> dict[str, Row]:
    """Returns {Megatron name: `Row` that describes the parameter} for a layer, or for the parameters outside of the
    layers if `layer` is None.

    Each parameter is listed under its names in both layer specs.
    """
    rows = [row for part in ends(sizes) for row in part] if layer is None else layer_rows(sizes, layer)
    return {row.spelled(fused): row for row in rows for fused in (False, True)}


def _named(rects: Iterable[Rect], prefix: str, expert: str) -> list[Rect]:
    """Returns the 2-D slices of a `Row` (description of a parameter), with the full names of the Hugging Face
    tensors.
    """
    if expert:
        return [Rect(prefix + tensor.replace(EXPERT, expert), *rest) for tensor, *rest in rects]
    return [Rect(prefix + tensor, *rest) for tensor, *rest in rects]


def megatron_names(
    sizes: Sizes, layers: Iterable[int], experts: Iterable[int], *, first: bool, last: bool, fused: bool
) -> list[str]:
    """Returns the Megatron names of the parameters of a rank that holds the layers and experts with the global indices
    `layers` and `experts`.

    `first`, `last`: whether the rank belongs to the first or last pipeline stage. A tied model has a copy of the
    embedding as output layer on a last stage that is not also the first.
    `fused`: whether names are spelled as in the Transformer Engine layer spec.
    """
    stage = _stage_rows(sizes, layers, first=first, last=last)
    chosen = [*experts]
    return [name for row, prefix, _ in stage for name, _ in _spelled(row, prefix, chosen, fused)]


def _stage_rows(sizes: Sizes, layers: Iterable[int], *, first: bool, last: bool) -> Iterator[tuple[Row, str, str]]:
    """Yields (`Row` that describes a parameter, prefix of Megatron's name, prefix of Hugging Face's names) of all
    parameters of a pipeline stage.
    """
    outside = ends(sizes)
    if first:
        yield from ((row, "", "") for row in outside.first)
    for layer in layers:
        prefixes = MEGATRON_LAYER.format(layer), HF_LAYER.format(layer)
        yield from ((row, *prefixes) for row in layer_rows(sizes, layer))
    if last:
        yield from ((row, "", "") for row in outside.last if not (row.copy and first))


def _spelled(row: Row, prefix: str, experts: Sequence[int], fused: bool) -> Iterator[tuple[str, str]]:
    """Yields (Megatron name, expert index or "") of the parameters that a `Row` describes. There is one
    parameter, or one per expert."""
    name = prefix + row.spelled(fused)
    if not row.experts:
        yield name, ""
        return
    for expert in experts:
        yield name.replace(EXPERT, str(expert)), str(expert)


def trainer_parameters(
    sizes: Sizes,
    layers: Iterable[int],
    experts: Sequence[int] | None,
    shard: Shard,
    *,
    first_last: tuple[bool, bool],
    fused: bool,
    vocab_multiple: int = 1,
) -> Iterator[Parameter]:
    """Yields parameters of a trainer rank: the dense parameters if `experts` is None, otherwise the parameters of the
    experts with the global indices `experts`.

    `first_last`: whether the rank belongs to the first and to the last pipeline stage.

    Names are spelled as in `megatron_names`.
    """
    held = _holder(lambda row: row.partition.held(row.sources, *shard.of(row), vocab_multiple))
    for row, prefix, tensors in _stage_rows(sizes, layers, first=first_last[0], last=first_last[1]):
        if bool(row.experts) != (experts is not None):
            continue
        shape, rects = held(row)
        for name, expert in _spelled(row, prefix, experts or (), fused):
            yield Parameter(name, shape, _named(rects, tensors, expert))


def engine(sizes: Sizes, tp: int, rank: int, *, expert_parallel: bool = False) -> dict[str, tuple[Shape, list[Rect]]]:
    """Returns {name: (shape, 2-D slices of Hugging Face tensors)} of the parameters of rank `rank` of a vLLM or SGLang
    engine with `tp` ranks.

    q, k and v of the rank's heads are one parameter, and so are gate and up. Key/value heads are repeated if there are
    fewer heads than ranks. Experts are stacked in [E_local, ...] parameters, whose first two dimensions are joined
    here.

    `expert_parallel`: whether a rank holds a run of whole experts instead of a slice of every expert.
    """

    def cut(row: Row) -> Held:
        whole_experts = bool(row.experts) and expert_parallel
        return row.of_engine.held(row.sources, *((1, 0) if whole_experts else (tp, rank)))

    held = _holder(cut)
    parameters: dict[str, tuple[Shape, list[Rect]]] = {}
    for row, _, prefix in _stage_rows(sizes, range(sizes.num_layers), first=True, last=True):
        if row.engine is None:
            continue
        (rows, columns), rects = held(row)
        if not row.experts:
            (rows_before, _), others = parameters.get(prefix + row.engine, ((0, columns), []))
            behind = [rect._replace(at_row=rows_before + rect.at_row) for rect in _named(rects, prefix, "")]
            parameters[prefix + row.engine] = (rows_before + rows, columns), others + behind
            continue
        local_experts = (
            range(rank * row.experts // tp, (rank + 1) * row.experts // tp) if expert_parallel else range(row.experts)
        )
        joined = [
            rect._replace(tensor=prefix + rect.tensor.replace(EXPERT, str(expert)), at_row=place * rows + rect.at_row)
            for place, expert in enumerate(local_experts)
            for rect in rects
        ]
        parameters[prefix + row.engine] = (len(local_experts) * rows, columns), joined
    return parameters


def _holder(cut: Callable[[Row], Held]) -> Callable[[Row], Held]:
    """Returns a cached version of the function `cut`, which is called only once for each `Row` object. Equal layers
    share their `Row` objects.
    """
    cache: dict[int, tuple[Row, Held]] = {}  # stores the `Row` too, so that no other object gets the id() of the `Row`

    def held(row: Row) -> Held:
        if id(row) not in cache:
            cache[id(row)] = row, cut(row)
        return cache[id(row)][1]

    return held


def check_complete(names: Iterable[str], sizes: Sizes) -> None:
    """Raises ConfigError if one of the tensors does not belong to the model. Without this check, the weights of a
    different model could be loaded.
    """
    # The files may hold an output layer that is not used: if the model is tied, or if a head replaces the output layer.
    names_of_model = {*hf_shapes(sizes), HEAD, *([BIAS] if sizes.head else [])}
    family = family_of(sizes)
    unknown = sorted(n for n in names if n not in names_of_model and not family.leaves_out(sizes, n))
    if unknown:
        raise ConfigError(
            f"{len(unknown)} tensors have no place in a {sizes.family} model, e.g. {', '.join(unknown[:5])}: "
            "is it another model?"
        )


def padding(shape: Shape, rects: Sequence[Rect]) -> int:
    """Returns the number of vocabulary padding elements of a parameter: the elements that no 2-D slice in `rects`
    covers."""
    return shape[0] * shape[1] - sum(rect.elements for rect in rects)


def by_tensor(parameters: Mapping[str, tuple[Shape, Sequence[Rect]]]) -> dict[str, list[tuple[str, Rect]]]:
    """Returns {Hugging Face tensor: [(parameter, 2-D slice)]}, computed from {parameter: (shape, 2-D slices)}."""
    slices_by_tensor: dict[str, list[tuple[str, Rect]]] = {}
    for name, (_, rects) in parameters.items():
        for rect in rects:
            slices_by_tensor.setdefault(rect.tensor, []).append((name, rect))
    return slices_by_tensor
