"""Writes the safetensors files of a model directory tensor by tensor. No file is ever held in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_rl.weights.headers import INDEX, SINGLE
from megatron_rl.weights.hf import DTYPES

SHARD_BYTES = 4 * 10**9  # the largest file, unless one tensor is larger
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HfWriter:
    """The files for `planned` tensors, in shards of at most `shard_bytes`, with an index when there are several.

    A tensor that is larger has a shard of its own.
    """

    def __init__(self, folder: Path, planned: Iterable[Planned], *, shard_bytes: int = SHARD_BYTES) -> None:
        shards: list[list[Planned]] = [[]]
        for tensor in planned:
            if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
                shards.append([])
            shards[-1].append(tensor)
        self._places: dict[str, tuple[Path, int, Planned]] = {}
        names = (
            [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
            if len(shards) > 1
            else [SINGLE]
        )
        for name, shard in zip(names, shards, strict=True):
            start = _begin(folder / name, shard)
            for tensor in shard:
                self._places[tensor.name] = folder / name, start, tensor
                start += tensor.nbytes
        if len(shards) > 1:
            index = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            whole = {"metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)}, "weight_map": index}
            (folder / INDEX).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one of the planned tensors, once.

        Raises ValueError when its shape or dtype is not the planned one, KeyError when it was not planned or was
        written before.
        """
        file, start, planned = self._places.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, but {planned.shape} {planned.dtype} was planned"
            )
        with file.open("r+b") as out:
            out.seek(start)
            # numpy declares the buffer protocol from Python 3.12 on.
            out.write(memoryview(cast(Any, tensor.contiguous().flatten().view(torch.uint8).numpy())))

    def expects(self, name: str) -> bool:
        """Says whether this tensor was planned and has not been written yet."""
        return name in self._places

    @property
    def missing(self) -> list[str]:
        """Returns the planned tensors that have not been written yet."""
        return [*self._places]


def _begin(file: Path, tensors: list[Planned]) -> int:
    """Writes the header of a file. Returns the offset where its data begin."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _SPELLED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]
        }  # fmt: skip
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return 8 + len(text)
