"""Checks the trainer's weights before a refit (weight sync to the engines): finds weights that are not finite
in the form in which they are sent, and counts weights that the engines' format cannot represent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.refit.topology import Topology
from megatron_rl.refit.transport import Added, ParameterPart, Sums, Tensors
from megatron_rl.weights import rank_layouts
from megatron_rl.weights.parameter_mapping import Rect, kept_float32
from megatron_rl.weights.quantisation import quantised_shapes
from megatron_rl.weights.tensor_copies import blocks, local


class NonFiniteWeights(FloatingPointError):
    """Raised on every trainer rank if weights that a refit should send are not finite. The message names a tensor."""


class LimitCheck(NamedTuple):
    """The result of a check on one rank. `non_finite`: a sentence about the first tensor with a value that is not
    finite, or None. `saturated`: number of weights that are clipped to the largest value of the engines' format."""

    non_finite: str | None
    saturated: int


class WeightLimits:
    """Checks the weights of one trainer rank. Each check reads every weight once, without a copy; parameters with a
    LoRA delta are summed once."""

    def __init__(
        self, topology: Topology, rank: int, parameters: Mapping[str, Tensor], added: Added | None = None
    ) -> None:
        tensors = Tensors(parameters)
        self._values = tensors if added is None else Sums(tensors, added)
        self._shapes = {
            name: (t.numel() // t.shape[-1], t.shape[-1]) if t.dim() > 1 else (len(t), 1)
            for name, t in parameters.items()
            if t.numel()
        }
        self._kept, self._dtype = kept_float32(topology.sizes), getattr(torch, topology.dtype)
        self._form, self._name = topology.engines.format, topology.engines.quantization or topology.dtype
        quantised = {} if self._form is None else quantised_shapes(topology.sizes)
        self._rects: dict[str, list[Rect]] = {}
        self._quantised, self._counted = set[str](), set[str]()
        for holding in rank_layouts.trainer(topology.sizes, topology.trainer):
            for name, rect in holding.parameters if rank in holding.ranks else ():
                self._rects.setdefault(name, []).append(rect)
                if rect.tensor in quantised:
                    self._quantised.add(name)
                    # Ranks that hold copies of the same weights do not count them again.
                    self._counted |= {name} if holding.ranks[0] == rank else set()

    def check(self) -> LimitCheck:
        """Returns the weights that are not finite or saturated. Waits for the device once."""
        if not self._shapes:
            return LimitCheck(None, 0)
        largest = torch.stack([self._largest(name) for name in self._shapes]).tolist()
        for name, value in zip(self._shapes, largest, strict=True):
            if not math.isfinite(value):
                return LimitCheck(self._describe(name), 0)
        limit = math.inf if self._form is None else self._form.limit
        over = [n for n, value in zip(self._shapes, largest, strict=True) if value > limit and n in self._counted]
        parts = [part for name in over for part in blocks(self._read(name))]
        return LimitCheck(None, sum(int((part.float().abs() > limit).sum()) for part in parts))

    def _read(self, name: str) -> Tensor:
        return self._values.read(name, ParameterPart(0, 0, *self._shapes[name]))

    def _sent_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which a parameter is sent, or from which it is quantised."""
        return torch.float32 if name in self._kept or name in self._quantised else self._dtype

    def _largest(self, name: str) -> Tensor:
        """Returns the largest magnitude of a parameter in the form in which it is sent, as a float32 scalar tensor. It
        is not finite if one of the values is not finite."""
        norm = torch.linalg.vector_norm(self._read(name), math.inf)
        return norm.to(self._sent_dtype(name)).float()

    def _describe(self, name: str) -> str:
        """Returns a sentence about the values of a parameter that are not finite. It names the Hugging Face tensor."""
        values, dtype = self._read(name), self._sent_dtype(name)
        for rect in self._rects[name]:
            part = local(values if rect.columns > 1 else values[:, 0], rect)
            count = int((~torch.isfinite(part.to(dtype))).sum())
            if count and not int((~torch.isfinite(part)).sum()):
                return f"{rect.tensor} has {count} of {part.numel()} values that overflow {dtype}"
            if count:
                return f"{rect.tensor} has {count} of {part.numel()} values that are not finite"
        return f"{name} has values that are not finite"
