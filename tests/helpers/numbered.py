"""A model whose every element is another number: what went to a wrong place shows."""

from __future__ import annotations

import torch

from megatron_rl.models.sizes import Sizes
from megatron_rl.weights import parameter_mapping


def numbered(sizes: Sizes) -> dict[str, torch.Tensor]:
    """Returns parameters of different numbers by Hugging Face names, float64."""
    tensors, start = {}, 0
    for name, (rows, columns) in parameter_mapping.hf_shapes(sizes).items():
        one_dimensional = columns == 1
        values = torch.arange(start, start + rows * columns, dtype=torch.float64)
        tensors[name] = values if one_dimensional else values.view(rows, columns)
        start += rows * columns
    return tensors
