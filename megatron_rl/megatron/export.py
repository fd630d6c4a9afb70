"""Gives a role's weights to engines and files: as this rank's shards, or as a stream of whole Hugging Face tensors that
are gathered in flat buckets of several parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.megatron.parallel import Groups
from megatron_rl.megatron.role_model import RoleModel
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.base import ParameterPart
from megatron_rl.weights import adapters, copies, rectangles
from megatron_rl.weights.hf_writer import Planned, plan_tensors
from megatron_rl.weights.layouts import TrainerLayout
from megatron_rl.weights.rectangles import Rect, Shard
from megatron_rl.world import broadcast

MIB = 1 << 20


@dataclass(frozen=True)
class _Piece:
    """One parameter of a stage. `shards[i]` are the rectangles that rank i of the ranks that share it holds."""

    kind: int  # index into _Stage.groups
    shape: tuple[int, ...]  # the shape of one shard
    shards: list[list[Rect]]

    @property
    def elements(self) -> int:
        """Returns the number of elements of one shard."""
        return prod(self.shape)


@dataclass(frozen=True)
class _Stage:
    """The arrangement of one pipeline stage: how its ranks share its parameters, and how this rank gets them."""

    groups: tuple[Any, ...]  # by kind of parameter: None (every rank holds the whole), tensor ranks, experts' ranks
    pp: Any  # the group of the pipeline stages
    source: int  # the world rank that sends this rank what the stage holds
    sends: bool  # whether this rank belongs to the stage


class WeightExport:
    """The weights of one role, as engines and files read them. Methods are collective unless they say otherwise."""

    def __init__(self, model: RoleModel) -> None:
        self._model = model

    @property
    def trainer_layout(self) -> TrainerLayout:
        """The rectangles that the ranks hold, for the plan of a refit. Not collective."""
        layout, arch = self._model.role.layout, self._model.arch
        return TrainerLayout(
            tp=layout.tp,
            pp=layout.pp,
            dp=self._model.groups.copies,
            ep=layout.ep,
            etp=layout.expert_tp if arch.experts else 1,
            vpp=layout.vpp or 1,
            fused=self._model.fused,
        )

    def shards(self) -> dict[str, Tensor]:
        """Returns this rank's parameters by name, with global layer numbers: the memory itself, which updates change in
        place. Adapters are not among them: `added` tells what they change. Not collective."""
        return {name: parameter.detach() for name, parameter in self._model.named().items()}

    def added(self, name: str, part: ParameterPart) -> Tensor | None:
        """Returns what adapters add to a part of one of `shards`, float32; None where it is nothing. Not collective."""
        return None if self._model.adapters is None else self._model.adapters.added(name, *part)

    def planned(self) -> list[Planned]:
        """Returns the tensors that `weights` yields, in the order of a Hugging Face directory. Not collective."""
        arch, dtype = self._model.arch, getattr(torch, self._model.role.model.dtype)
        kept = rectangles.kept_float32(arch)
        return plan_tensors(arch, {n: torch.float32 if n in kept else dtype for n in rectangles.hf_shapes(arch)})

    def weights(self, *, bucket_mib: float = 64, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Streams (Hugging Face name, full tensor on CPU), the same on every rank, cast to `dtype` when it is given.
        Consume the stream to its end. Beside the yielded tensor it holds one bucket of about `bucket_mib` MiB. Adapters
        are merged into the weights."""
        self._model.check_readable()
        named = [*self.shards().items()]
        return gathered(
            self._model.arch, named, self._model.groups, bucket_mib=bucket_mib, dtype=dtype, read=self._merged
        )

    def adapter(self) -> dict[str, Tensor]:
        """Returns the whole adapter by peft's names, on CPU, the same on every rank; nothing without `role.lora`."""
        model = self._model
        if model.adapters is None or model.role.lora is None:
            return {}
        named, rank = [(n, p.detach()) for n, p in model.adapters.named.items()], model.role.lora.rank
        shapes = adapters.shapes(model.arch, model.role.lora)
        stream = gathered(model.arch, named, model.groups, bucket_mib=64, dtype=None, rank=rank)
        return {name: tensor.reshape(shapes[name]).clone() for name, tensor in stream}

    def write_adapter(self, directory: Path) -> None:
        """Writes the adapter in peft's format, on the first rank; nothing without `role.lora`."""
        tensors, role = self.adapter(), self._model.role
        if tensors and role.lora is not None and dist.get_rank(self._model.groups.control) == 0:
            adapters.write(directory, tensors, role.lora, role.model.path, self._base_digest)

    @functools.cached_property
    def _base_digest(self) -> str:
        """The digest of the files of the frozen model, as they are when the digest is first needed."""
        return adapters.base_digest(self._model.role.model.path)

    def _merged(self, name: str, parameter: Tensor) -> Tensor:
        """Returns a parameter of the model with what the adapters add."""
        rows, columns = parameter.shape[0], parameter.shape[1] if parameter.dim() > 1 else 1
        more = self.added(name, ParameterPart(0, 0, rows, columns))
        return parameter if more is None else more.add_(parameter).to(parameter.dtype)


def gathered(
    sizes: Sizes,
    named: Sequence[tuple[str, Tensor]],
    groups: Groups,
    *,
    bucket_mib: float,
    dtype: torch.dtype | None,
    rank: int = 0,
    read: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Streams (Hugging Face name, full tensor on CPU) from this rank's parameters, named with global numbers.

    Of adapters of rank `rank` the names are peft's. `read(name, parameter)` gives the values of a parameter when its
    turn comes.

    Collective, and the same on every rank: consume it to the end. Layers come in order, stage by stage; within a layer
    expert-parallel ranks take turns with their experts. A collective carries up to `bucket_mib` MiB of whole tensors (a
    larger parameter of a kind goes alone), and no more than one bucket is held. If `dtype` is given, tensors are cast
    to it before they travel, but for those that are always float32.
    """
    kept = rectangles.kept_float32(sizes)
    own = [(name, p.detach()) for name, p in named if not (name == "output_layer.weight" and sizes.tied)]
    for number in range(groups.pp.size()):
        sends = groups.pp_rank == number
        mine = [(name, p.dtype if dtype is None or name in kept else dtype) for name, p in own]
        names: Any = mine if sends else None
        source = dist.get_global_rank(groups.pp, number)
        if groups.pp.size() > 1:
            # By gloo, so that no rank waits for its GPU: the stages are whole runs of ranks, and each names its own.
            names = broadcast(names, groups.control, source=number * groups.control.size() // groups.pp.size())
        stage = _Stage((None, groups.tp, groups.experts), groups.pp, source, sends)
        local = (read(name, p) for name, p in own) if sends else iter(())
        device = own[0][1].device
        for pieces, wire in _buckets(sizes, names, groups, int(bucket_mib * MIB), rank):
            tensors = [next(local) for _ in pieces] if sends else []
            yield from _exchange(stage, pieces, tensors, torch.empty(_total(pieces), dtype=wire, device=device))


def _buckets(
    sizes: Sizes, parameters: list[tuple[str, torch.dtype]], groups: Groups, limit: int, rank: int
) -> Iterator[tuple[list[_Piece], torch.dtype]]:
    """Cuts a stage's parameters, in order, into runs of one dtype and at most `limit` bytes of whole tensors."""
    bucket: list[_Piece] = []
    held, wire = 0, torch.float32
    for name, dtype in parameters:
        piece = _piece(sizes, name, groups, rank)
        size = _total([piece]) * dtype.itemsize
        if bucket and (held + size > limit or dtype != wire):
            yield bucket, wire
            bucket, held = [], 0
        bucket.append(piece)
        held, wire = held + size, dtype
    if bucket:
        yield bucket, wire


def _piece(sizes: Sizes, name: str, groups: Groups, rank: int) -> _Piece:
    """Returns the parameter `name` with the rectangles of all its shards.

    The name is the one of its first holder. An expert's name may be that of any expert-parallel rank: it then stands
    for the experts at the same position on all of these ranks.
    """
    layout, adapter = groups.layout, adapters.is_adapter(name)
    if rectangles.is_expert(name):
        kind, per_rank = 2, sizes.experts // layout.ep
        first = rectangles.expert_number(name) % per_rank - rectangles.expert_number(name)
        names = [rectangles.renumber_expert(name, by=first + per_rank * rank) for rank in range(layout.ep)]
        shards = [
            (other, Shard(expert_tp=layout.expert_tp, expert_rank=i))
            for other in names
            for i in range(layout.expert_tp)
        ]
    elif adapters.is_cut(sizes, name) if adapter else rectangles.is_sharded(sizes, name):
        kind, shards = 1, [(name, Shard(layout.tp, rank)) for rank in range(layout.tp)]
    else:
        kind, shards = 0, [(name, rectangles.WHOLE)]
    held = [
        adapters.held(sizes, other, shard, rank) if adapter else rectangles.megatron(sizes, other, shard)
        for other, shard in shards
    ]
    rows, columns = held[0][0]
    return _Piece(kind, (rows, columns) if columns > 1 else (rows,), [rects for _, rects in held])


def _total(pieces: Sequence[_Piece]) -> int:
    """Returns the number of elements of the whole parameters."""
    return sum(piece.elements * len(piece.shards) for piece in pieces)


def _exchange(
    stage: _Stage, pieces: Sequence[_Piece], tensors: Sequence[Tensor], flat: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Fills `flat` on all ranks, then yields the tensors that it holds.

    `flat` has one run per kind of parameter, in which the ranks' shards lie one after another. `tensors` are this
    rank's own shards in the order of `pieces`; the list is empty on other stages.
    """
    stretches, start = [], 0
    for kind in range(len(stage.groups)):
        size = _total([piece for piece in pieces if piece.kind == kind])
        stretches.append(flat[start : start + size])
        start += size
    if stage.sends:
        for kind, group in enumerate(stage.groups):
            mine = [t.flatten().to(flat.dtype) for t, piece in zip(tensors, pieces, strict=True) if piece.kind == kind]
            if not mine:
                continue
            if group is None or group.size() == 1:
                torch.cat(mine, out=stretches[kind])
            else:
                dist.all_gather(list(stretches[kind].chunk(group.size())), torch.cat(mine), group=group)
    if stage.pp.size() > 1:
        dist.broadcast(flat, src=stage.source, group=stage.pp)
    places = [0] * len(stage.groups)
    for piece in pieces:
        by_rank = stretches[piece.kind].view(len(piece.shards), -1)
        here = slice(places[piece.kind], places[piece.kind] + piece.elements)
        places[piece.kind] = here.stop
        parts = [(row[here].view(piece.shape), rects) for row, rects in zip(by_rank, piece.shards, strict=True)]
        yield from ((name, tensor.cpu()) for name, tensor in copies.assemble(parts).items())
