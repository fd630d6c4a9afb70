"""Maps a Megatron parameter to its key and its indices in a distributed checkpoint, which stacks layers and experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from megatron_rl.models.blocks import OUTPUT
from megatron_rl.models.partitions import padded_vocab
from megatron_rl.models.registry import layer_rows
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.parameter_mapping import WHOLE, Shape, Shard, megatron

OPTIMIZER = "optimizer.state."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:(linear_fc[12]\.\w+?)(\d+)|local_experts\.(\d+)\.(linear_fc[12]\.\w+))")
# Name of a norm -> name of the same norm in Megatron-core's torch layer spec, with or without experts.
_ALIASES = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
_ATTENTION = "self_attention.core_attention"
_WITHOUT_STATE = ("mlp.router", "mlp.shared_experts")


class StackedKey(NamedTuple):
    """The key of a stored tensor in which several parameters are stacked, and the leading indices (layer, expert) of
    one of the parameters.
    """

    key: str
    at: tuple[int, ...]


class Piece(NamedTuple):
    """The position and size of the 2-D block of a parameter that one rank holds."""

    row: int
    column: int
    rows: int
    columns: int


def places(name: str) -> Iterator[StackedKey]:
    """Yields the keys and indices under which Megatron-core may store a parameter, the most likely first.

    `name`: Megatron name of the parameter with global layer and expert indices.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield StackedKey(name, ())
        return
    part, index = layer[2], (int(layer[1]),)
    if expert := _EXPERT.fullmatch(part):
        linear, number = (expert[1], expert[2]) if expert[1] else (expert[4], expert[3])
        yield StackedKey(f"decoder.layers.mlp.experts.experts.{linear}", (*index, int(number)))
        yield StackedKey(f"decoder.layers.{layer[1]}.mlp.experts.experts.{linear}", (int(number),))
        return
    yield StackedKey(f"decoder.layers.{part}", index)
    yield StackedKey(name, ())  # Megatron-core writes one tensor per layer if layers differ
    if part in _ALIASES:
        yield StackedKey(f"decoder.layers.{_ALIASES[part]}", index)


def is_layered(sizes: Sizes) -> bool:
    """Checks whether Megatron-core stores the tensors of each layer separately. Megatron-core does so if some layers
    have experts and others do not.
    """
    return bool(sizes.experts and sizes.dense_layers)


def spellings(sizes: Sizes, name: str) -> list[StackedKey]:
    """Returns every key and index under which a parameter is stored.

    There is one key, with one exception: if layers are stacked, the norm before experts is stored under two keys,
    because Megatron-core's layer specs have two names for it.
    """
    layer = _LAYER.fullmatch(name)
    if is_layered(sizes):
        of_layer = f"decoder.layers.{layer[1]}." if layer else ""
        return [next(place for place in places(name) if place.key.startswith(of_layer))]
    alias = _ALIASES.get(layer[2]) if layer else None
    return [next(places(name)), *([StackedKey(f"decoder.layers.{alias}", (int(layer[1]),))] if layer and alias else [])]


def counts(sizes: Sizes, place: StackedKey) -> tuple[int, ...]:
    """Returns the sizes of the stacked dimensions (layers, experts) of the stored tensor with the key `place.key`."""
    stacked = (sizes.experts,) if is_layered(sizes) else (sizes.num_layers, sizes.experts)
    return stacked[: len(place.at)]


def is_padded(sizes: Sizes, name: str) -> bool:
    """Checks whether a parameter's number of rows is the size of the vocabulary, padded by an amount that depends on
    the layout. `name`: Megatron name of the parameter."""
    return name == "embedding.word_embeddings.weight" or (name == OUTPUT and sizes.head is None)


def stored_shape(sizes: Sizes, name: str, tp: int) -> Shape:
    """Returns (rows, columns) of a whole parameter as stored by `tp` tensor-parallel ranks, with padded vocabulary."""
    rows, columns = megatron(sizes, name, WHOLE)[0]
    return (padded_vocab(sizes.vocab, tp), columns) if is_padded(sizes, name) else (rows, columns)


def pieces(sizes: Sizes, name: str, shard: Shard) -> list[Piece]:
    """Returns the 2-D blocks of a whole parameter that a rank holds, with adjacent blocks merged. The parameter fc1 of
    an MLP has two blocks: gate and up.
    """
    (rows, columns), rects = megatron(sizes, name, shard)
    if is_padded(sizes, name):
        return [Piece(shard.rank * rows, 0, rows, columns)]
    unsharded = megatron(sizes, name, WHOLE)[1]
    merged: list[Piece] = []
    for rect in rects:
        home = next(w for w in unsharded if w.tensor == rect.tensor and w.row <= rect.row < w.row + w.rows)
        row, column = home.at_row + rect.row - home.row, home.at_column + rect.column - home.column
        if merged and merged[-1].row + merged[-1].rows == row and merged[-1][1::2] == (column, rect.columns):
            merged[-1] = merged[-1]._replace(rows=merged[-1].rows + rect.rows)
        else:
            merged.append(Piece(row, column, rect.rows, rect.columns))
    return merged


def extra_states(sizes: Sizes) -> Iterator[str]:
    """Yields the keys under which Megatron-core and Transformer Engine expect FP8 states. The states are empty in
    checkpoints of this package.

    Every module has a state, except for the router and the shared expert's gate, which Megatron-core implements without
    Transformer Engine.
    """
    for layer in range(sizes.num_layers):
        rows, layered = layer_rows(sizes, layer), is_layered(sizes)
        prefix = f"decoder.layers.{layer}" if layered else "decoder.layers"
        at, of = ("", "") if layered else (f"{layer}.", f"{sizes.num_layers}.")
        dense = dict.fromkeys(row.spelled(True).rpartition(".")[0] for row in rows if not row.experts)
        parts = [part for part in dense if part not in (*_WITHOUT_STATE, _ATTENTION)]
        shard = "shard_0_1" if layered else f"shard_{layer}_{sizes.num_layers}"
        yield from (f"{prefix}.{part}._extra_state/{shard}" for part in [*parts, _ATTENTION])
        for linear in dict.fromkeys(row.name.split(".")[-2] for row in rows if row.experts):
            for expert in range(sizes.experts):
                place = f"shard_{at}{expert}_{of}{sizes.experts}"
                yield f"{prefix}.mlp.experts.experts.{linear}._extra_state/{place}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"
