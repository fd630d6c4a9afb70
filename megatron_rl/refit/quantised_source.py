"""Quantises the trainer's parameters while a refit (weight sync) reads them, for engines with quantised weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.refit.transport import ParameterPart, Readable
from megatron_rl.weights.parameter_mapping import Rect
from megatron_rl.weights.quantisation import SCALES, Format, whole_tensors
from megatron_rl.weights.quantised_values import block_scales, quantise


class QuantisedSource:
    """A read-only view of a trainer rank's parameters as bytes, in which linear layers are quantised when they are
    read. Implements Readable.

    Quantised values and scales have the names and coordinates of their Hugging Face tensors. The other parameters have
    the names and coordinates of the trainer. No quantised weights are stored: reading a slice quantises the blocks that
    the slice touches, so the sender holds one slice at a time.
    """

    def __init__(
        self, parameters: Readable, held: Mapping[str, Sequence[tuple[str, Rect]]], form: Format, dtype: torch.dtype,
        *, float32: Collection[str],
    ) -> None:  # fmt: skip
        """`held`: maps the name of each Hugging Face tensor that is sent quantised to a list of (parameter name, Rect).
        An entry says that the named parameter of this rank holds the block of the tensor that the Rect describes.
        `dtype`: the dtype in which parameters that are not quantised are sent.
        `float32`: names of the parameters that are sent as float32 instead of `dtype`.
        """
        self._parameters, self._held, self._form = parameters, held, form
        self._dtype, self._float32 = dtype, float32
        self._areas = {r.tensor: r for r in whole_tensors(rect for pairs in held.values() for _, rect in pairs)}

    def read(self, name: str, part: ParameterPart) -> Tensor:
        tensor, (high, wide) = name.removesuffix(SCALES), self._form.block
        row, column, rows, columns = part
        if tensor not in self._areas:
            dtype = torch.float32 if name in self._float32 else self._dtype
            elements = ParameterPart(row, column // dtype.itemsize, rows, columns // dtype.itemsize)
            return self._parameters.read(name, elements).to(dtype).contiguous().view(torch.uint8)
        if name != tensor:
            column, columns = column // self._form.scale_bytes, columns // self._form.scale_bytes
            blocks = self._blocks(tensor, (row, row + rows), (column, column + columns))
            return block_scales(blocks, self._form).view(torch.uint8)
        packed = self._form.packed
        down, across = (
            (row // high, -(-(row + rows) // high)),
            (column * packed // wide, -(-(column + columns) * packed // wide)),
        )
        values = quantise(self._blocks(tensor, down, across), self._form)
        row, column = row - down[0] * high, column - across[0] * wide // packed
        return values[row : row + rows, column : column + columns]

    def _blocks(self, tensor: str, down: tuple[int, int], across: tuple[int, int]) -> Tensor:
        """Returns the weights of a range of quantisation blocks of a Hugging Face tensor. `down`, `across`: the range
        [start, end) of block rows and of block columns."""
        (high, wide), area = self._form.block, self._areas[tensor]
        row, column = down[0] * high, across[0] * wide
        end_row = min(down[1] * high, area.row + area.rows)
        end_column = min(across[1] * wide, area.column + area.columns)
        blocks: Tensor | None = None
        for name, rect in self._held[tensor]:
            top, left = max(row, rect.row), max(column, rect.column)
            bottom, right = min(end_row, rect.row + rect.rows), min(end_column, rect.column + rect.columns)
            if bottom <= top or right <= left:
                continue
            at = ParameterPart(
                rect.at_row + top - rect.row, rect.at_column + left - rect.column, bottom - top, right - left
            )
            weights = self._parameters.read(name, at)
            if weights.shape == (end_row - row, end_column - column):
                return weights
            blocks = weights.new_empty((end_row - row, end_column - column)) if blocks is None else blocks
            blocks[top - row : bottom - row, left - column : right - column] = weights
        assert blocks is not None, f"{tensor}: the rank does not hold blocks {down} x {across}"
        return blocks
