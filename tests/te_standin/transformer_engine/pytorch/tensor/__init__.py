"""Tensors of 8 bits, by name."""

import torch


class QuantizedTensor(torch.Tensor):
    """The class of 8-bit tensors. There are none here."""
