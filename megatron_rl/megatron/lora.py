"""Low-rank adapters (LoRA, arXiv 2106.09685) in a Megatron model: computation and sharding over ranks.

Megatron fuses query, key and value into one matrix, and gate and up into another. As in peft, each Hugging Face matrix
has a separate adapter, which consists of a matrix A and a matrix B. The output of an adapter is added to the features
of the fused output that belong to the adapter's Hugging Face matrix.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.config.schema import Lora
from megatron_rl.megatron import platform
from megatron_rl.megatron.torch_layers import TensorSharded
from megatron_rl.models.lora_targets import Projection, adapted, linears, projections
from megatron_rl.models.rows import HF_LAYER, MEGATRON_LAYER
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights import lora_adapters, parameter_mapping, tensor_copies
from megatron_rl.weights.parameter_mapping import Rect, Shard

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)


@dataclass(frozen=True)
class _Joined:
    """The LoRA adapters of one linear module of Megatron, and the positions of each adapter's output rows in the
    module's output. The weight of the module may join several Hugging Face matrices, each with one adapter or none."""

    names: tuple[str, ...]  # names of the adapters, in the order of their matrices in the module's weight
    # Runs of output rows, in order: (index of the adapter in `names`, first row of the adapter, number of rows).
    # The index is None for the rows of a matrix without an adapter.
    runs: tuple[tuple[int | None, int, int], ...]
    inward: bool  # True if tensor-parallel ranks split the module's weight by columns, False if by rows


class Adapter(TensorSharded):
    """This rank's part of the LoRA matrices A [r, columns] and B [rows, r] of one adapted matrix.

    One of the two matrices is split over the tensor-parallel ranks; the other matrix is replicated on all of these
    ranks. Under sequence parallelism each rank sees only a part of the tokens, and Megatron-core sums the gradients of
    the replicated matrix over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, projection: Projection, rank: int, *, device: torch.device) -> None:
        super().__init__()
        self.group: Any = parallel_state.get_tensor_model_parallel_group()
        tp, inward = self.group.size(), projection.inward
        rows, columns = projection.rows // (1 if inward else tp), projection.columns // (tp if inward else 1)
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.lora_a = torch.nn.Parameter(torch.zeros(rank, columns, **kind))
        self.lora_b = torch.nn.Parameter(torch.zeros(rows, rank, **kind))
        cut, replicated = (self.lora_a, self.lora_b) if inward else (self.lora_b, self.lora_a)
        self.axis = {"lora_a": 1} if inward else {"lora_b": 0}
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=1 if inward else 0, stride=1)
        replicated.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayerAdapters(torch.nn.ModuleDict):
    """The LoRA adapters of one layer, keyed by the names of the adapted matrices, such as q_proj."""

    def __init__(
        self, config: Any, sizes: Sizes, layer: int, settings: Lora, shard: Shard, *, device: torch.device
    ) -> None:
        matrices = adapted(sizes, layer, settings)
        super().__init__({p.name: Adapter(config, p, settings.rank, device=device) for p in matrices})
        self.sequence_parallel, self.scale = config.sequence_parallel, settings.alpha / settings.rank
        self.group: Any = parallel_state.get_tensor_model_parallel_group()
        self.joined = {linear: _joined(sizes, layer, linear, matrices, shard) for linear in linears(sizes, layer)}

    def added(self, linear: str, x: Tensor) -> Tensor | None:
        """Returns the LoRA contribution that is added to the output of the module `linear` for this rank's input `x`.

        Returns None if the module's matrices have no adapter.
        """
        joined = self.joined[linear]
        if not joined.names:
            return None
        members: list[Any] = [self[name] for name in joined.names]
        low = F.linear(x, torch.cat([adapter.lora_a for adapter in members]) if len(members) > 1 else members[0].lora_a)
        if joined.inward:
            # The columns of A are split over the tensor-parallel ranks, so the partial products A @ x are summed.
            # With sequence parallelism, each rank keeps the sum for its tokens only.
            summed = (
                reduce_scatter_to_sequence_parallel_region(low, group=self.group)
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region(low, group=self.group)
            )
            return F.linear(summed * self.scale, members[0].lora_b)
        low = self._spread(low) * self.scale
        parts = low.split(low.shape[-1] // len(members), dim=-1)
        products = [F.linear(part, adapter.lora_b) for part, adapter in zip(parts, members, strict=True)]
        if len(joined.runs) == 1:
            return products[0]
        return torch.cat([self._run(products, low, *run) for run in joined.runs], dim=-1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns Megatron-core's sharded state dict of all adapters of the layer."""
        state: dict[str, Any] = {}
        for name, adapter in self.items():
            module: Any = adapter
            state |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state

    def _spread(self, low: Tensor) -> Tensor:
        """Returns the product A @ x for the tokens of all tensor-parallel ranks, on every rank. Used for adapters whose
        matrix B is split by rows over the ranks. The backward pass sums the gradients over the ranks. `low`: the
        product A @ x for the tokens of this rank."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
        spread = copy_to_tensor_model_parallel_region(low, group=self.group)
        # works around Megatron-core 0.16.1, which all-reduces a copy of a non-contiguous gradient and discards the copy
        if spread.requires_grad:
            spread.register_hook(Tensor.contiguous)
        return spread

    @staticmethod
    def _run(products: Sequence[Tensor], like: Tensor, adapter: int | None, row: int, rows: int) -> Tensor:
        """Returns `rows` consecutive features, from index `row` on, of the output `products[adapter]` of an adapter.
        Returns zeros if `adapter` is None."""
        if adapter is None:
            return like.new_zeros(*like.shape[:-1], rows)
        return products[adapter].narrow(-1, row, rows)


class RoleAdapters:
    """All LoRA adapters of one role on this rank. Several roles can have adapters on the same base model; `show`
    selects the role whose adapters the model uses.
    """

    def __init__(self, cores: Sequence[Any], sizes: Sizes, settings: Lora, shard: Shard) -> None:
        """Creates the adapters, filled with zeros, and attaches them to the model chunks `cores`. Call it inside
        `Groups.active()` of the role's layout."""
        self._sizes, self._settings, self._shard = sizes, settings, shard
        self._layers: list[tuple[Any, LayerAdapters]] = []
        self.named: dict[str, torch.nn.Parameter] = {}  # parameter name with global layer index -> parameter
        for layer in (layer for core in cores for layer in core.decoder.layers):
            number, device = layer.layer_number - 1, next(layer.parameters()).device
            adapters = LayerAdapters(layer.config, sizes, number, settings, shard, device=device)
            if not hasattr(layer, "lora"):
                for linear in linears(sizes, number):
                    layer.get_submodule(linear).register_forward_hook(functools.partial(_add, layer, linear))
            self._layers.append((layer, adapters))
            for name, adapter in adapters.items():
                self.named |= {
                    lora_adapters.parameter_name(number, name, part): parameter
                    for part, parameter in adapter.named_parameters()
                }
        self.show()
        self._changes = {name: change for layer, parts in self._layers for name, change in self._of_layer(layer, parts)}

    def show(self) -> None:
        """Makes this role's adapters the adapters of the model: the forward pass uses them, and the model's parameters
        include them."""
        for layer, adapters in self._layers:
            layer.lora = adapters

    def fill(self, seed: int, head: Iterable[torch.nn.Parameter]) -> None:
        """Sets the initial values of the adapters. `head` contains this rank's weight of the model's head, or nothing.
        If `lora.path` is set, the adapters and the head are loaded from this directory. Otherwise A is initialized
        randomly, B stays zero, and the head is unchanged.

        The random values do not depend on the layout. Raises ConfigError if the loaded adapter does not match the
        settings or the model.
        """
        path, rank = self._settings.path, self._settings.rank
        stored = None if path is None else lora_adapters.read(path, self._sizes, self._settings)
        for name, parameter in self.named.items():
            _, rects = lora_adapters.held(self._sizes, name, self._shard, rank)
            if stored is not None:
                read = functools.partial(_rectangle, stored)
                tensor_copies.fill(parameter, rects, read)
            elif name.endswith("lora_a"):
                shape = lora_adapters.held(self._sizes, name, parameter_mapping.WHOLE, rank)[0]
                drawn = {rects[0].tensor: _draw(shape, self._settings, f"{seed}/{name}")}
                tensor_copies.fill(parameter, rects, functools.partial(_rectangle, drawn))
        if stored is not None:
            for weight in head:
                weight.data.copy_(stored[lora_adapters.HEAD])

    def added(self, name: str, row: int, column: int, rows: int, columns: int) -> Tensor | None:
        """Returns the LoRA delta alpha / r * B A for one 2-D block of this rank's base parameter `name`, in float32.
        The block has `rows` rows and `columns` columns, and starts at row `row` and column `column`.

        Returns None if no adapter changes the block.
        """
        if name not in self._changes:
            return None
        first, delta = self._changes[name][0], None
        for rect, adapter in self._changes[name]:
            low, high = max(row, rect.at_row), min(row + rows, rect.at_row + rect.rows)
            if low >= high:
                continue
            delta = first[1].lora_a.new_zeros(rows, columns, dtype=torch.float32) if delta is None else delta
            # number of rows of B on this rank; this rank's part of B begins at a multiple of this number
            local_rows = adapter.lora_b.shape[0]
            start = low - rect.at_row + rect.row % local_rows
            b = adapter.lora_b.detach()[start : start + high - low].float()
            a = adapter.lora_a.detach()[:, column : column + columns].float()
            delta[low - row : high - row] = self._settings.alpha / self._settings.rank * (b @ a)
        return delta

    def _of_layer(self, layer: Any, adapters: LayerAdapters) -> list[tuple[str, list[tuple[Rect, Any]]]]:
        """Returns one pair for each linear module with adapters in a layer: (name of the module's base parameter, list
        of the adapters that change the parameter). Each element of the list is (2-D block of the parameter,
        adapter)."""
        number, changes = layer.layer_number - 1, []
        by_tensor = {
            f"{HF_LAYER.format(number)}{p.module}.weight": adapters[p.name]
            for p in adapted(self._sizes, number, self._settings)
        }
        for linear in linears(self._sizes, number):
            name = f"{MEGATRON_LAYER.format(number)}{linear}.weight"
            rects = parameter_mapping.megatron(self._sizes, name, self._shard)[1]
            pairs = [(rect, by_tensor[rect.tensor]) for rect in rects if rect.tensor in by_tensor]
            changes += [(name, pairs)] if pairs else []
        return changes


def freeze(cores: Sequence[Any], *, kept: Sequence[str] = ()) -> None:
    """Freezes a model's weights, except for the parameters named in `kept`, and keeps activation recomputation working
    for adapters.

    Megatron-core recomputes a layer only if the layer's input requires a gradient. The embedding output of a frozen
    model requires no gradient, so a hook makes the embedding output require a gradient.
    """
    for core in cores:
        for name, parameter in core.named_parameters():
            parameter.requires_grad_(name in kept)
        if core.pre_process and core.config.recompute_granularity is not None:
            core.embedding.register_forward_hook(
                lambda _module, _inputs, embedded: embedded.requires_grad_() if torch.is_grad_enabled() else embedded
            )


def _add(layer: Any, linear: str, _module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> Any:
    """Forward hook that adds the contribution of the layer's adapters to the output of a linear module."""
    added = layer.lora.added(linear, inputs[0])
    return None if added is None else (output[0] + added, *output[1:])


def _joined(sizes: Sizes, layer: int, linear: str, matrices: Sequence[Projection], shard: Shard) -> _Joined:
    """Returns the adapters of the Megatron module `linear`, and the positions of each adapter's rows in the module's
    output on this rank."""
    inside = [p for p in projections(sizes, layer) if p.linear == linear]
    names = tuple(p.name for p in matrices if p.linear == linear)
    by_tensor = {f"{HF_LAYER.format(layer)}{p.module}.weight": p for p in inside}
    runs: list[tuple[int | None, int, int]] = []
    rects = parameter_mapping.megatron(sizes, f"{MEGATRON_LAYER.format(layer)}{linear}.weight", shard)[1]
    for rect in sorted(rects, key=lambda rect: rect.at_row):
        matrix = by_tensor[rect.tensor]
        local_rows = matrix.rows // (1 if matrix.inward else shard.tp)
        runs.append((names.index(matrix.name) if matrix.name in names else None, rect.row % local_rows, rect.rows))
    return _Joined(names, tuple(runs), inside[0].inward)


def _rectangle(tensors: Mapping[str, Tensor], rect: Rect) -> Tensor:
    return tensor_copies.from_tensor(tensors[rect.tensor], rect)


def _draw(shape: tuple[int, int], settings: Lora, key: str) -> Tensor:
    """Returns A [r, columns] with peft's random initialization, drawn with a seed that depends only on `key`."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    generator = torch.Generator().manual_seed(seed)
    if settings.init == "gaussian":
        return torch.randn(shape, generator=generator) / settings.rank
    bound = shape[1] ** -0.5  # bound of torch.nn.Linear's initialization, kaiming_uniform_ with a = sqrt(5), as in peft
    return (2 * torch.rand(shape, generator=generator) - 1) * bound
