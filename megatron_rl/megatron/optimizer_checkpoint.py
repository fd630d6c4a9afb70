"""Selects the optimizer state that each rank writes to a checkpoint: the rows that begin in the rank's part.

Megatron-core's format `fully_reshardable` stores the optimizer state of a parameter with the parameter's shape, so that
any layout can load it. Core gathers the state on the first data-parallel rank, or on all of them. Here each rank writes
its part directly from memory. A part may end within a row of a matrix; the rank in whose part the row begins then
receives the rest of the row from its neighbours. Only these rows are sent and need additional memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.megatron import platform

platform.install()

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)

# Megatron-core's names of the state tensors that a checkpoint has for each parameter
STATE = ("param", "exp_avg", "exp_avg_sq")
KEY = "optimizer.state.{}.{}"


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor that stores the optimizer state of a whole parameter, or of a contiguous range of a
    parameter."""

    start: int  # offset of the tensor's first element within the flattened parameter
    tensor: ShardedTensor

    @property
    def rows(self) -> int:
        return self.tensor.local_shape[0]

    @property
    def width(self) -> int:
        """The number of elements of a row; 1 for a vector."""
        return self.tensor.data.numel() // self.rows if self.tensor.data is not None else 0


@dataclass(frozen=True)
class Torn:
    """A parameter row that crosses a boundary between ranks: its optimizer state is split over several data-parallel
    ranks."""

    parameter: Tensor
    piece: int  # index of the Piece that contains the row
    row: int  # index of the row in the piece
    start: int  # offset of the row in its bucket
    end: int  # offset of the row's end in its bucket


@dataclass(frozen=True)
class Bucket:
    """A bucket of a distributed optimizer: a flat buffer of several parameters, split into `ranks` equal parts, one for
    each data-parallel rank."""

    places: Mapping[Tensor, tuple[int, int]]  # {parameter: (start, end) offset in the bucket}
    part: int  # number of elements of one rank's part
    ranks: int

    def torn(self, pieces: Mapping[Tensor, list[Piece]]) -> Iterator[Torn]:
        """Yields the parameter rows that cross a boundary between two ranks' parts, in the order of the bucket."""
        last = -1
        for parameter, (first, end) in sorted(self.places.items(), key=lambda item: item[1]):
            for rank in range(first // self.part + 1, -(-end // self.part)):
                edge = rank * self.part
                if edge < last:
                    continue  # this boundary between ranks is in the same row as the previous boundary
                number, piece = next(
                    (i, p) for i, p in enumerate(pieces[parameter]) if edge - first < p.start + p.rows * p.width
                )
                row, inside = divmod(edge - first - piece.start, piece.width)
                if inside:
                    start = first + piece.start + row * piece.width
                    last = start + piece.width
                    yield Torn(parameter, number, row, start, last)


def sharded_rows(optimizer: Any, model_state: dict[str, Any]) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Returns the rows of a distributed optimizer's state that this rank writes to a checkpoint, as {Megatron-core's
    parameter index: {name of the state: tensors}}. Collective over the optimizer's data-parallel ranks.

    `model_state` is the model's sharded state dict. Each element of the optimizer state is written by exactly one rank.
    Raises ValueError if a parameter is stored in tensors that are not consecutive contiguous ranges of the parameter.
    """
    stored = {base.data: base for base in nested_values(model_state) if isinstance(base, ShardedBase)}
    group, rows_of_parameter, number = optimizer.data_parallel_group_gloo, {}, 0
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        pieces = {parameter: _pieces(stored[parameter]) for parameter in buffer.param_index_map}
        held: dict[Tensor, Any] = {}
        rows: dict[Tensor, dict[tuple[int, int], Tensor]] = {}
        ((_, maps),) = ranges.items()
        for bucket, range_map in zip(_buckets(buffer, group.size()), maps, strict=True):
            held |= range_map["param_map"]
            for torn in bucket.torn(pieces):
                values = _join(optimizer, torn, bucket.part, range_map["param_map"].get(torn.parameter), group)
                if values is not None:
                    rows.setdefault(torn.parameter, {})[torn.piece, torn.row] = values
        for parameter in buffer.param_index_map:
            if parameter in held:
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                span = held[parameter]["param"].start, held[parameter]["param"].end
                own_rows = {
                    name: _own_rows(
                        stored[parameter],
                        name,
                        state[name].detach(),
                        span,
                        {place: values[i] for place, values in rows.get(parameter, {}).items()},
                    )
                    for i, name in enumerate(STATE)
                }
                if any(own_rows.values()):  # otherwise this rank has only the end of a row, which another rank writes
                    rows_of_parameter[number] = own_rows
            number += 1
    return rows_of_parameter


def without_copies(state: dict[str, Any]) -> dict[str, Any]:
    """Replaces the contiguous CPU tensors of a sharded state by aliases with separate storages, without copying data,
    and returns the state.

    Without the aliases, Megatron-core's writer would first copy every tensor that covers only a part of a storage, and
    then begin to write. Tensors in pinned memory are not replaced, because the writer processes could not read pinned
    memory.
    """
    apply_factories(state)
    dict_list_map_inplace(_alone, state)
    return state


def _alone(value: Any) -> Any:
    if isinstance(value, ShardedTensor) and value.data is not None:
        data = value.data.detach()
        if data.device.type == "cpu" and data.dim() and data.is_contiguous() and not data.is_pinned():
            flat = torch.from_numpy(data.view(-1).view(torch.uint8).numpy())
            value.data = flat.view(data.dtype).view(data.shape)
    return value


def _buckets(buffer: Any, ranks: int) -> Iterator[Bucket]:
    """Yields the buckets of one of the distributed optimizer's buffers. Call platform.mend_saved_offsets first, which
    subtracts the padding between buckets from the offsets in `buffer.param_index_map`."""
    start = 0
    for number, bucket in enumerate(buffer.buckets):
        places = {
            parameter: (first - start, end - start)
            for parameter, (first, end, bucket_number) in buffer.param_index_map.items()
            if bucket_number == number
        }
        yield Bucket(places, bucket.grad_data.numel() // ranks, ranks)
        start += bucket.numel_unpadded


def _pieces(base: ShardedBase, name: str = STATE[0]) -> list[Piece]:
    """Returns the checkpoint tensors that store the state `name` of a parameter, ordered by offset. The tensors are on
    the meta device and have no values. Raises ValueError if the tensors are not consecutive contiguous ranges that
    cover the parameter."""
    assert isinstance(base, ShardedTensor | ShardedTensorFactory) and base.data is not None
    like = torch.empty(base.data.shape, dtype=torch.float32, device="meta")
    changes: dict[str, Any] = {"key": KEY.format(name, base.key), "data": like}
    if isinstance(base, ShardedTensor):
        built: list[Any] = [replace(base, dtype=like.dtype, **changes)]
    else:
        built = list(nested_values(replace(base, **changes).build()))
    pieces = sorted((Piece(int(shard.data.storage_offset()), shard) for shard in built), key=lambda piece: piece.start)
    ends = [piece.start + piece.tensor.data.numel() for piece in pieces if piece.tensor.data is not None]
    contiguous = all(piece.tensor.data is not None and piece.tensor.data.is_contiguous() for piece in pieces)
    if not contiguous or [piece.start for piece in pieces] != [0, *ends[:-1]] or ends[-1] != like.numel():
        raise ValueError(f"{base.key} is stored in tensors that are no stretches of it, one behind the other")
    return pieces


def _join(optimizer: Any, torn: Torn, part: int, local_ranges: Any, group: Any) -> Tensor | None:
    """Assembles a row that is split over ranks, on the rank in whose part the row begins. All ranks of `group` must
    call it.

    Returns a tensor [len(STATE), row width] on the rank where the row begins, and None on the other ranks.
    """
    rank, first = dist.get_rank(group), torn.start // part
    holders = range(first, -(-torn.end // part))
    if rank not in holders:
        return None
    state = optimizer._get_main_param_and_optimizer_states(torn.parameter)
    row = torch.empty(len(STATE), torn.end - torn.start)
    place = local_ranges["gbuf_local"].start + rank * part  # bucket offset of this rank's part of the parameter
    start, end = max(torn.start, rank * part), min(torn.end, (rank + 1) * part)
    mine = torch.stack([state[name].detach().view(-1)[start - place : end - place].cpu() for name in STATE])
    if rank != first:
        dist.send(mine, dist.get_global_rank(group, first), group)
        return None
    row[:, start - torn.start : end - torn.start] = mine
    for holder in holders[1:]:
        start, end = max(torn.start, holder * part), min(torn.end, (holder + 1) * part)
        came = torch.empty(len(STATE), end - start)
        dist.recv(came, dist.get_global_rank(group, holder), group)
        row[:, start - torn.start : end - torn.start] = came
    return row


def _own_rows(
    base: ShardedBase, name: str, values: Tensor, span: tuple[int, int], torn: Mapping[tuple[int, int], Tensor]
) -> list[ShardedTensor]:
    """Returns the rows that this rank writes to a checkpoint, for one parameter and for the state tensor `name` (see
    STATE).

    `values` has the elements that this rank holds: those from `span[0]` to `span[1]` of the flattened parameter. `torn`
    maps (index of the piece, index of the row) to the assembled row, for rows that begin within the span and end after
    the span.
    """
    sharded = []
    for number, piece in enumerate(_pieces(base, name)):
        start, end = (min(max(edge - piece.start, 0), piece.rows * piece.width) for edge in span)
        first, last = -(-start // piece.width), end // piece.width
        if first < last:
            offset = piece.start - span[0]
            sharded.append(
                _rows(piece, first, values.view(-1)[offset + first * piece.width : offset + last * piece.width])
            )
        if (number, last) in torn:
            sharded.append(_rows(piece, last, torn[number, last]))
    return sharded


def _rows(piece: Piece, first: int, values: Tensor) -> ShardedTensor:
    """Returns a sharded tensor that stores `values` as consecutive rows of a piece, from row `first` on."""
    tensor = piece.tensor
    axis = tensor.prepend_axis_num
    offset = list(tensor.global_offset)
    offset[axis] += first
    # If axis_fragmentations is None, Megatron-core requires a shape that includes the prepended axes.
    data = values.view(*(1,) * axis, -1, *tensor.local_shape[1:])
    assert isinstance(tensor.replica_id, tuple)
    return replace(
        tensor,
        data=data,
        local_shape=tuple(data.shape),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=(*tensor.replica_id[:-1], 0),  # no other data-parallel rank writes these rows
    )
