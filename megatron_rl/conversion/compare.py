"""Compares two models tensor by tensor, in any supported format, with one tensor of each in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion.weight_source import WeightSource
from megatron_rl.weights import hf_model, tensor_copies
from megatron_rl.weights.parameter_mapping import hf_shapes


def compare(first: WeightSource, second: WeightSource) -> list[dict[str, Any]]:
    """Compares two models tensor by tensor. Returns one dict per tensor, with these keys:

    - `name`: the tensor's name.
    - `equal`: whether the tensors are bit-identical.
    - `relative`: the relative difference |a - b| / |a| with Frobenius norms, where a is the tensor of `first` and b the
      tensor of `second`.
    - `largest`: the largest absolute difference of two elements.

    Raises ConfigError if the two models have different tensor names or shapes.
    """
    rows = []
    total = len(first.shapes()) if first.checkpoint is None else len(hf_shapes(first.sizes))
    screen = Console(stderr=True)
    steps = track(
        _pairs(first, second), "tensors", total, console=screen, transient=True, disable=not screen.is_terminal
    )
    for name, a, b in steps:
        if a.shape != b.shape:
            raise ConfigError(f"{name} is {tuple(a.shape)} in {first.path} and {tuple(b.shape)} in {second.path}")
        rows.append({"name": name, "equal": torch.equal(a, b), **_gap(a, b)})
    return rows


def _pairs(first: WeightSource, second: WeightSource) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name of a tensor, the tensor in `first`, the tensor in `second`) for all tensors.

    A checkpoint is read in its stored order, and the tensors of a directory are looked up by name. Raises ConfigError
    if the two models have different tensor names or sizes, or if both are adapters.
    """
    if first.checkpoint is not None and second.checkpoint is not None:
        if first.sizes != second.sizes:
            raise ConfigError(
                f"{first.path} and {second.path} are models of different sizes: {first.sizes} and {second.sizes}"
            )
        for (name, a), (_, b) in zip(first.tensors(), second.tensors(), strict=True):
            yield name, a, b
        return
    if first.adapter is not None and second.adapter is not None:
        raise ConfigError(f"{first.adapter} and {second.adapter} are both adapters: merge one of them by to-hf first")
    swap = second.checkpoint is not None or second.adapter is not None
    leading, other = (second, first) if swap else (first, second)
    files, names = hf_model.DirectoryTensors(other.path), set()
    for name, a in leading.tensors():
        if name not in files.stored:
            raise ConfigError(f"{other.path} has no tensor {name}, which {leading.path} has")
        names.add(name)
        yield (name, files.whole(name), a) if swap else (name, a, files.whole(name))
    if left := sorted(files.stored.keys() - names):
        raise ConfigError(f"{leading.path} has no tensor {left[0]}, which {other.path} has")


def _gap(a: Tensor, b: Tensor) -> dict[str, float]:
    """Returns {"relative": |a - b| / |a| with Frobenius norms, "largest": largest absolute difference of two elements}.
    Both are computed in float64, block by block."""
    gap = norm = largest = 0.0
    for x, y in zip(tensor_copies.blocks(a), tensor_copies.blocks(b), strict=True):
        x = x.double()
        difference = (x - y.double()).abs()
        gap += float(difference.square().sum())
        norm += float(x.square().sum())
        largest = max(largest, float(difference.max()))
    return {"relative": gap**0.5 / (norm**0.5 or 1.0), "largest": largest}
