"""Copies 2-D slices from Hugging Face tensors to a rank's parameters, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.parameter_mapping import Rect, padding
from megatron_rl.weights.safetensors_headers import stacked

# Type of a function that returns a 2-D slice of a Hugging Face tensor: [rows, columns], or [rows] of a 1-D tensor.
Read = Callable[[Rect], Tensor]


def from_tensor(tensor: Tensor, rect: Rect) -> Tensor:
    """Returns a view of a block of a Hugging Face tensor. `rect`: describes the block."""
    return _view(tensor, rect.row, rect.column, rect)


def local(parameter: Tensor, rect: Rect) -> Tensor:
    """Returns a view of the block of a rank's parameter (1-D or 2-D) where `rect` (block of a tensor) is stored."""
    return _view(parameter, rect.at_row, rect.at_column, rect)


@torch.no_grad()
def fill(parameter: Tensor, rects: Sequence[Rect], read: Read) -> None:
    """Copies every 2-D slice into a rank's parameter, cast to the parameter's dtype. Fills padding with zeros.

    Raises ValueError if a slice does not fit into the parameter.
    """
    shape = (parameter.shape[0], parameter.shape[1] if parameter.dim() > 1 else 1)
    if any(r.at_row + r.rows > shape[0] or r.at_column + r.columns > shape[1] for r in rects):
        raise ValueError(f"rectangles reach beyond a parameter of {shape}: {list(rects)}")
    if padding(shape, rects):
        parameter.zero_()
    for rect in rects:
        local(parameter, rect).copy_(read(rect))


def assemble(shards: Iterable[tuple[Tensor, Sequence[Rect]]]) -> dict[str, Tensor]:
    """Assembles whole Hugging Face tensors from the ranks' parts of one parameter. Returns the tensors by name.

    `shards`: for each rank, (part of the parameter, 2-D slices of the part). The result is on the device of the parts.
    """
    parts = [(part, rect) for part, rects in shards for rect in rects]
    sizes: dict[str, tuple[int, int]] = {}
    for _, rect in parts:
        rows, columns = sizes.get(rect.tensor, (0, 0))
        sizes[rect.tensor] = max(rows, rect.row + rect.rows), max(columns, rect.column + rect.columns)
    assembled: dict[str, Tensor] = {}
    for part, rect in parts:
        if rect.tensor not in assembled:
            assembled[rect.tensor] = part.new_empty(sizes[rect.tensor] if part.dim() > 1 else sizes[rect.tensor][:1])
        from_tensor(assembled[rect.tensor], rect).copy_(local(part, rect))
    return assembled


def by_expert(tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Returns views of the in-memory tensors of a transformers model, under the names used in files.

    In memory, transformers 5 stacks experts in gate_up_proj [E, 2 f, h] and down_proj [E, h, f], and uses the same
    names for experts and router in every family. Files have one tensor per expert. Tensors that already have their
    file's name, as in transformers 4, are returned unchanged.
    """
    renamed = dict(tensors)
    for source, part in stacked(sizes):
        if part.name in tensors:
            renamed.pop(part.name, None)
            renamed[source.name] = part.of(tensors[part.name])
    return renamed


def _view(tensor: Tensor, row: int, column: int, rect: Rect) -> Tensor:
    """Returns a view of a tensor that begins at (row, column) and has the size of `rect`."""
    rows = tensor[row : row + rect.rows]
    return rows if tensor.dim() == 1 else rows[:, column : column + rect.columns]


def blocks(tensor: Tensor, elements: int = 1 << 24) -> Iterator[Tensor]:
    """Yields consecutive blocks of rows of the tensor, with about `elements` elements each.

    Computing block by block avoids temporaries as large as the tensor.
    """
    step = max(1, elements // max(1, tensor[0].numel())) if len(tensor) else 1
    for row in range(0, len(tensor), step):
        yield tensor[row : row + step]


def all_finite(tensor: Tensor) -> bool:
    """Checks whether every element is finite."""
    return all(bool(torch.isfinite(block).all()) for block in blocks(tensor))
