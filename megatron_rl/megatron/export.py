"""Exports a role's weights to engines and files, as this rank's shards or as a stream of whole Hugging Face tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.model import Head
from megatron_rl.megatron.role_model import RoleModel
from megatron_rl.models.blocks import OUTPUT
from megatron_rl.models.lora_targets import adapted
from megatron_rl.refit.transport import ParameterPart
from megatron_rl.weights import lora_adapters, parameter_mapping, rank_layouts, tensor_copies
from megatron_rl.weights.hf_writer import Planned, plan_tensors
from megatron_rl.weights.parameter_mapping import Rect, Shard
from megatron_rl.weights.rank_layouts import Holding, TrainerLayout


class WeightExport:
    """Exports the weights of one role from the trainer, for engines and for files. Methods are collective (all ranks
    must call them) unless their docstring says otherwise."""

    def __init__(self, model: RoleModel) -> None:
        self._model = model

    @property
    def head(self) -> Head | None:
        """The kind of head (value or score) that the model has in place of an output layer, or None. Not collective."""
        return self._model.role.head

    @property
    def trainer_layout(self) -> TrainerLayout:
        """The trainer's parallel layout, which determines the shard of each parameter on each rank. The weight sync to
        the engines is computed from this layout. Not collective."""
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
        """Returns this rank's parameters by name, with global layer indices. Not collective.

        The tensors share memory with the model, and updates change them in place. LoRA adapters are not included;
        `added` returns the LoRA delta.
        """
        return {name: parameter.detach() for name, parameter in self._model.named().items()}

    def added(self, name: str, part: ParameterPart) -> Tensor | None:
        """Returns the LoRA delta, in float32, of one 2-D block (`part`) of the tensor `name` in `shards`. Returns None
        if no adapter changes this block. Not collective."""
        return None if self._model.adapters is None else self._model.adapters.added(name, *part)

    def planned(self) -> list[Planned]:
        """Returns name, shape and dtype of the tensors that `weights` yields, in the order in which a Hugging Face
        directory stores them. Not collective."""
        arch, dtype = self._model.arch, getattr(torch, self._model.role.model.dtype)
        kept = parameter_mapping.kept_float32(arch)
        return plan_tensors(arch, {n: torch.float32 if n in kept else dtype for n in parameter_mapping.hf_shapes(arch)})

    def weights(self, *, everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor on the CPU) on every rank, or only on rank 0 if not `everywhere`. All
        ranks must consume the iterator to its end.

        A rank that receives tensors holds one whole tensor at a time. A rank that only sends holds one part of a tensor
        at a time. LoRA adapters are merged into the weights.
        """
        model = self._model
        model.check_readable()
        shards, holdings = self.shards(), rank_layouts.trainer(model.arch, self.trainer_layout)

        def read(name: str, rect: Rect) -> Tensor:
            block = tensor_copies.local(shards[name], rect)
            more = self.added(name, ParameterPart(rect.at_row, rect.at_column, rect.rows, rect.columns))
            return block if more is None else more.add_(block).to(block.dtype)

        return _gathered(self.planned(), holdings, read, model.groups.control, everywhere=everywhere)

    def adapter(self, *, everywhere: bool = True) -> dict[str, Tensor]:
        """Returns the role's whole LoRA adapter as {peft name: CPU tensor}. The dict also contains the role's head, if
        the role has one. If `everywhere` is False, only rank 0 gets the tensors, and the other ranks get an empty dict.
        If the role has no adapter (`role.lora` is unset), all ranks get an empty dict."""
        model, lora = self._model, self._model.role.lora
        if model.adapters is None or lora is None:
            return {}
        dtype, named = getattr(torch, model.role.model.dtype), model.adapters.named | model.head()
        planned = [Planned(name, shape, dtype) for name, shape in lora_adapters.shapes(model.arch, lora).items()]

        def read(name: str, rect: Rect) -> Tensor:
            return tensor_copies.local(named[name].detach(), rect)

        return dict(_gathered(planned, self._adapter_holdings(), read, model.groups.control, everywhere=everywhere))

    def _adapter_holdings(self) -> Iterator[Holding]:
        """Yields the parts of the LoRA adapter and of the role's head, each with one rank that holds the part."""
        arch, lora, layout = self._model.arch, self._model.role.lora, self.trainer_layout
        assert lora is not None
        for stage, layers in enumerate(layout.layers(arch)):
            names = [
                lora_adapters.parameter_name(layer, projection.name, part)
                for layer in layers
                for projection in adapted(arch, layer, lora)
                for part in lora_adapters.PARTS
            ]
            for rank in range(layout.tp):
                held = ((n, lora_adapters.held(arch, n, Shard(layout.tp, rank), lora.rank)[1]) for n in names)
                yield Holding((stage * layout.tp * layout.dp + rank,), [(n, r) for n, rects in held for r in rects])
        if self.head is not None:
            rect = Rect(lora_adapters.HEAD, 0, 0, arch.outputs, arch.hidden, 0, 0)
            yield Holding(((layout.pp - 1) * layout.tp * layout.dp,), [(OUTPUT, rect)])

    def write_adapter(self, directory: Path) -> None:
        """Writes the role's LoRA adapter to `directory` in peft's format. Only the first rank writes. No-op if the role
        has no adapter."""
        tensors, role = self.adapter(everywhere=False), self._model.role
        if tensors and role.lora is not None and dist.get_rank(self._model.groups.control) == 0:
            lora_adapters.write(directory, tensors, role.lora, role.model.path, self._base_digest)

    @functools.cached_property
    def _base_digest(self) -> str:
        """The checksum of the files of the frozen base model, computed at first use and then cached."""
        return lora_adapters.base_digest(self._model.role.model.path)


def _gathered(
    planned: Iterable[Planned],
    holdings: Iterable[Holding],
    read: Callable[[str, Rect], Tensor],
    group: Any,
    *,
    everywhere: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Gathers tensors from the ranks' shards. Yields (name, whole tensor) for each tensor in `planned`, on every rank
    of the gloo `group`, or only on rank 0 if not `everywhere`. Collective.

    `holdings` lists the parts of tensors, each with the ranks that hold the part. Each part is sent once, by the first
    of these ranks. `read(parameter, rect)` returns the 2-D block `rect` of this rank's parameter `parameter`.
    """
    parts: dict[str, dict[tuple[int, ...], tuple[int, str, Rect]]] = {}
    for holding in holdings:
        for name, rect in holding.parameters:
            parts.setdefault(rect.tensor, {}).setdefault(rect[1:5], (holding.ranks[0], name, rect))
    rank = dist.get_rank(group)
    for name, shape, dtype, _ in planned:
        tensor = torch.empty(shape if rank == 0 or everywhere else 0, dtype=dtype)
        for holder, parameter, rect in parts[name].values():
            place = tensor_copies.from_tensor(tensor, rect) if rank == 0 else tensor
            if rank == holder:
                part = read(parameter, rect).to("cpu", dtype).contiguous()
                place.copy_(part) if rank == 0 else dist.send(part, dist.get_global_rank(group, 0), group)
            elif rank == 0:
                part = torch.empty(place.shape, dtype=dtype)
                dist.recv(part, dist.get_global_rank(group, holder), group)
                place.copy_(part)
        if everywhere:
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
        if rank == 0 or everywhere:
            yield name, tensor
