"""Writes the safetensors files of a model directory tensor by tensor, with only one tensor in memory."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.hf_model import DTYPES
from megatron_rl.weights.parameter_mapping import hf_shapes
from megatron_rl.weights.safetensors_headers import INDEX, SINGLE, Part, stacked

SHARD_BYTES = 4 * 10**9  # maximum size of a file in bytes; a single tensor may be larger
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """The name, shape and dtype of a tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part | None = None  # position inside a larger tensor of the files; None if the tensor is stored alone

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_tensors(sizes: Sizes, dtypes: Mapping[str, torch.dtype]) -> list[Planned]:
    """Returns the tensors to write for a model directory. `dtypes`: tensor name -> dtype, in the order in which the
    tensors are placed in the files.
    """
    shapes = {name: (rows,) if columns == 1 else (rows, columns) for name, (rows, columns) in hf_shapes(sizes).items()}
    parts = {source.name: part for source, part in stacked(sizes, in_files=True)}
    return [Planned(name, shapes[name], dtype, parts.get(name)) for name, dtype in dtypes.items()]


class HfWriter:
    """Writes the safetensors files of a model directory. The `planned` tensors may be written in any order.

    Each tensor has a fixed offset in its file. A file (shard) has at most `shard_bytes` bytes, unless a single tensor
    is larger. No whole file is held in memory.
    """

    def __init__(self, folder: Path, planned: Sequence[Planned], *, shard_bytes: int = SHARD_BYTES) -> None:
        self._parts = {tensor.name: tensor.part for tensor in planned if tensor.part is not None}
        file_tensors = dict.fromkeys((t.part.name, t.part.shape, t.dtype) if t.part else t[:3] for t in planned)
        shards: list[list[Planned]] = [[]]
        for tensor in itertools.starmap(Planned, file_tensors):
            if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
                shards.append([])
            shards[-1].append(tensor)
        count = len(shards)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._places: dict[str, tuple[Path, int, Planned]] = {}
        for name, shard in zip(names, shards, strict=True):
            start = _begin(folder / name, shard)
            for tensor in shard:
                self._places[tensor.name] = folder / name, start, tensor
                start += tensor.nbytes
        self._index = folder / INDEX
        self._files = {name: file.name for name, (file, _, _) in self._places.items()} if count > 1 else {}
        self._total = sum(tensor.nbytes for shard in shards for tensor in shard)

    def write_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the planned tensors among `tensors` in the order given, and then, if there are several shards, the
        index file.

        Tensors that are not planned are skipped, because the files that a tied model was read from may include the
        output layer. Raises KeyError, with the name, if a planned tensor is missing from `tensors`.
        """
        for name, tensor in self._joined(tensors):
            if name in self._places:
                self.write(name, tensor)
        if self._places:
            raise KeyError(next(iter(self._places)))
        if self._files:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._files}
            self._index.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _joined(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors in the form in which files hold them. Tensors that are parts of a larger tensor in the
        files are collected in memory, until the larger tensor is complete.
        """
        missing_parts, filled = Counter(part.name for part in self._parts.values()), dict[str, Tensor]()
        for name, tensor in tensors:
            part = self._parts.get(name)
            if part is None:
                yield name, tensor
                continue
            if part.name not in filled:
                filled[part.name] = tensor.new_empty(part.shape)
            part.of(filled[part.name]).copy_(tensor)
            missing_parts[part.name] -= 1
            if not missing_parts[part.name]:
                yield part.name, filled.pop(part.name)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one of the tensors of the files. Each tensor is written once.

        Raises ValueError if the shape or dtype differs from the planned tensor, and KeyError if no tensor of this name
        was planned or the tensor was already written.
        """
        file, start, planned = self._places.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, but {planned.shape} {planned.dtype} was planned"
            )
        with file.open("r+b") as opened_file:
            opened_file.seek(start)
            # cast: numpy declares the buffer protocol only from Python 3.12
            opened_file.write(memoryview(cast(Any, tensor.contiguous().flatten().view(torch.uint8).numpy())))


def _begin(file: Path, tensors: list[Planned]) -> int:
    """Creates a file and writes its safetensors header. Returns the offset of the tensor data."""
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
