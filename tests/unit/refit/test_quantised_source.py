"""Weights that are quantised as they are read: any part of a tensor is the part of the quantised whole."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.refit.quantised_source import QuantisedSource
from megatron_rl.refit.transport import ParameterPart, Tensors
from megatron_rl.weights.parameter_mapping import Rect
from megatron_rl.weights.quantisation import FORMATS, SCALES
from megatron_rl.weights.quantised_values import block_scales, quantise

ROWS, COLUMNS = (128, 256), (256, 128)  # heights and widths of the pieces in which a rank holds the tensor


def source(whole, form):
    """The tensor in 2 x 2 pieces, each behind other values of its parameter."""
    parameters, held = {}, []
    for i, row in enumerate((0, ROWS[0])):
        for j, column in enumerate((0, COLUMNS[0])):
            own = torch.full((ROWS[i] + 1, COLUMNS[j] + 2), 1e3, dtype=torch.bfloat16)
            own[1:, 2:] = whole[row : row + ROWS[i], column : column + COLUMNS[j]]
            parameters[f"piece {i} {j}"] = own
            held.append((f"piece {i} {j}", Rect("w", row, column, ROWS[i], COLUMNS[j], 1, 2)))
    return QuantisedSource(Tensors(parameters), {"w": held}, form, torch.bfloat16, float32=[])


@pytest.mark.parametrize("rows", [(0, 384), (0, 128), (64, 256), (200, 8)])
@pytest.mark.parametrize("columns", [(0, 384), (0, 256), (128, 256), (256, 128), (192, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_that_of_the_quantised_whole(name, rows, columns):
    form, whole = FORMATS[name], torch.randn(384, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    made, (high, wide) = source(whole, form), form.block
    part = ParameterPart(rows[0], columns[0] // form.packed, rows[1], columns[1] // form.packed)
    values = quantise(whole, form)[part.row : part.row + part.rows, part.column : part.column + part.columns]
    assert torch.equal(made.read("w", part), values)
    first, last = (columns[0] // wide, -(-sum(columns) // wide))
    down, width = (rows[0] // high, -(-sum(rows) // high)), form.scale_bytes
    scales = block_scales(whole, form)[down[0] : down[1], first:last].contiguous().view(torch.uint8)
    part = ParameterPart(down[0], first * width, down[1] - down[0], (last - first) * width)
    assert torch.equal(made.read(f"w{SCALES}", part), scales)
