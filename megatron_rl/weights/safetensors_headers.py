"""Reads the tensor names, dtypes and shapes of a model directory from the headers of its safetensors files.

No tensor data is read, and torch is not needed. transformers 5 holds a layer's experts in one stacked tensor in memory,
and its save_pretrained writes one tensor per expert. Files from other tools may hold the stacked tensors. This module
lists the parts of a stacked tensor separately, under the names that save_pretrained would use.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_rl.config.base import ConfigError, read_object, refuse, refusing
from megatron_rl.models import registry
from megatron_rl.models.lora_targets import CONFIG as ADAPTER
from megatron_rl.models.partitions import Source
from megatron_rl.models.registry import layer_rows
from megatron_rl.models.rows import EXPERT, HF_LAYER
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.quantisation import FORMATS, MXFP4, SCALES, Format

# dtypes of the scales of published 8-bit weights, in the safetensors format
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DAMAGED = (KeyError, TypeError, AttributeError)  # errors raised if an index file's JSON has an unexpected structure
# Name suffixes of MXFP4 tensors in gpt-oss's files. BLOCKS: the values, of shape [experts, rows, columns / 32, 16].
# BLOCK_SCALES: the scales, [experts, rows, columns / 32]. An unquantised weight has the shape [experts, columns, rows].
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
# first bytes of a git-lfs pointer: a small file in place of a large file that git-lfs has not downloaded
LFS = b"version https://git-lfs.github.com/"


class Part(NamedTuple):
    """The position of a tensor inside a larger tensor that contains several tensors, such as those of all experts."""

    name: str  # name of the larger tensor
    shape: tuple[int, ...]  # shape of the larger tensor
    expert: int | None  # index in the first dimension; None if the larger tensor does not stack experts
    row: int
    rows: int
    transposed: bool = False  # True if the larger tensor has the rows in its last dimension

    def of(self, stack: Any) -> Any:
        """Returns the view of the larger tensor `stack` that contains this tensor."""
        matrix = stack if self.expert is None else stack[self.expert]
        return (matrix.T if self.transposed else matrix)[self.row : self.row + self.rows]


class Stored(NamedTuple):
    """A tensor in a safetensors file, as described by the file's header."""

    file: Path
    # Name of the dtype in the safetensors format, such as F32 or BF16.
    # The dtype is BF16 if `scales` is set, because quantised values are converted to bfloat16 when they are read.
    dtype: str
    shape: tuple[int, ...]
    part: Part | None = None  # position inside a larger tensor of the file; None if the tensor is stored alone
    scales: Stored | None = None  # the scales of quantised values, one per block of `format`
    format: Format = FORMATS["fp8"]


def read_directory(directory: Path) -> dict[str, Stored]:
    """Returns every tensor of a model directory, by name.

    Raises FileNotFoundError if there are no weights at all. Raises ConfigError if a file is missing, cut short or
    damaged, if the index names a tensor that its file does not hold, or if the directory holds the weights of several
    models.
    """
    return _apart(directory, _with_scales(_read(directory)))


def _with_scales(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors, with `scales` set for tensors with 8-bit values. In the files of DeepSeek-V3, scales are
    separate tensors; the returned dict has no separate entries for scales. Raises ConfigError if the scales do not have
    the shape that FORMATS["fp8"] requires, or a dtype outside of SCALE_DTYPES.
    """
    scaled_tensors = {name: stored for name, stored in tensors.items() if not name.endswith(SCALES)}
    for name, scales in ((name, stored) for name, stored in tensors.items() if name.endswith(SCALES)):
        scaled = scaled_tensors.get(tensor := name.removesuffix(SCALES))
        blocks = scaled and tuple(-(-n // size) for n, size in zip(scaled.shape, FORMATS["fp8"].block, strict=False))
        if scaled is None or scaled.dtype != "F8_E4M3" or scales.shape != blocks or scales.dtype not in SCALE_DTYPES:
            raise ConfigError(
                f"{scales.file}: {name} is {scales.dtype} {list(scales.shape)}, and {tensor} is "
                f"{scaled and (scaled.dtype, [*scaled.shape])}. Only 8-bit values (F8_E4M3) with one scale "
                f"({', '.join(SCALE_DTYPES)}) per 128 x 128 block can be read: take a model that is not quantised"
            )
        scaled_tensors[tensor] = scaled._replace(dtype="BF16", scales=scales)
    return scaled_tensors


def _read(directory: Path) -> dict[str, Stored]:
    """Returns every tensor of a model directory, by its name in the files (experts may be stacked in one tensor)."""
    index, single = directory / INDEX, directory / SINGLE
    if (directory / ADAPTER).is_file() and (index.exists() or single.exists()):
        raise ConfigError(
            f"{directory} holds a model and an adapter ({ADAPTER}), which transformers would load with another base: "
            "move one of them to a directory of its own"
        )
    if not index.exists():
        if not single.exists():
            raise FileNotFoundError(
                f"{directory} holds no {SINGLE}: give a downloaded model directory, or set model.init to random"
            )
        return read_file(single)
    with refusing(lambda error: f"{index} cannot be read ({error!r}): fetch the model again", *DAMAGED):
        places = {str(name): str(file) for name, file in read_object(index)["weight_map"].items()}
    if single.exists() and SINGLE not in places.values():
        raise ConfigError(
            f"{directory} holds two sets of weights, {SINGLE} and the files that {INDEX} lists, of which transformers "
            "would load the first: remove the one that is not meant"
        )
    first = {file: name for name, file in reversed(places.items())}  # file -> first tensor that the index assigns to it
    refuse(
        *(
            f"{directory / file} is missing, which {INDEX} lists for {name}: fetch the model again"
            for file, name in first.items()
            if not (directory / file).is_file()
        )
    )
    files = {file: read_file(directory / file) for file in first}
    wrong = (
        f"{directory / file} holds no tensor {name}, which {INDEX} lists there: they are of different models"
        for name, file in places.items()
        if name not in files[file]
    )
    # Report only the first error, because a file of another model may lack thousands of tensors.
    refuse(*itertools.islice(wrong, 1))
    return {name: files[file][name] for name, file in places.items()}


def _apart(directory: Path, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Replaces each tensor of stacked experts by one entry per expert, with the names that files with one tensor per
    expert use.

    If config.json cannot be read, the tensors are returned unchanged. Raises ConfigError if the shape of a stacked
    tensor does not match config.json.
    """
    try:
        sizes = registry.read(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return tensors
    tensors_by_expert = dict(tensors)
    for source, part in stacked(sizes) if sizes.experts else ():
        shape = (source.rows,) if source.columns == 1 else (source.rows, source.columns)
        if part.name in tensors:
            stack = _stack(tensors, part)
            tensors_by_expert[source.name] = Stored(stack.file, stack.dtype, shape, part)
        elif part.name + BLOCKS in tensors and len(shape) == 2:
            grid = *part.shape[::2], part.shape[1] // MXFP4.block[1]  # the blocks of all experts
            halves = [
                part._replace(name=part.name + suffix, shape=(*grid, *last), transposed=False)
                for suffix, last in ((BLOCKS, (16,)), (BLOCK_SCALES, ()))
            ]
            values, scales = (Stored(_stack(tensors, half, "U8").file, "U8", shape, half) for half in halves)
            tensors_by_expert[source.name] = values._replace(dtype="BF16", scales=scales, format=MXFP4)
            for half in halves:
                tensors_by_expert.pop(half.name, None)
        tensors_by_expert.pop(part.name, None)
    return tensors_by_expert


def _stack(tensors: dict[str, Stored], part: Part, dtype: str | None = None) -> Stored:
    """Returns the stored tensor that contains `part`. Raises ConfigError if the tensor is missing, or does not have the
    expected shape and, if `dtype` is given, the dtype `dtype`."""
    stack = tensors.get(part.name)
    if stack is None or stack.shape != part.shape or dtype not in (None, stack.dtype):
        stored_form = f"{list(stack.shape)} of {stack.dtype}" if stack else "missing"
        file, of = (stack or next(iter(tensors.values()))).file, f" of {dtype}" if dtype else ""
        raise ConfigError(f"{file}: {part.name} is {stored_form}, but config.json requires {list(part.shape)}{of}")
    return stack


def stacked(sizes: Sizes, *, in_files: bool = False) -> Iterator[tuple[Source, Part]]:
    """Yields (name and shape of the tensor, its position in a larger tensor) for each tensor that transformers 5 stores
    in memory as a part of a larger tensor, for example the tensors of one expert. `in_files`: whether to leave out
    tensors that files store separately.
    """
    for layer in range(sizes.num_layers):
        prefix = HF_LAYER.format(layer)
        for row in layer_rows(sizes, layer):
            if row.in_memory is None or row.in_memory == row.sources[0].name or (in_files and not row.stacked):
                continue
            matrix = sum(source.rows for source in row.sources), row.sources[0].columns
            if row.stacked:
                matrix = matrix[::-1] if matrix[1] > 1 else matrix[:1]
            shape, turned = (row.experts, *matrix) if row.experts else matrix, row.stacked and len(matrix) > 1
            for number in range(row.experts or 1):
                first, expert = 0, number if row.experts else None
                for source in row.sources:
                    part = Part(prefix + row.in_memory, shape, expert, first, source.rows, turned)
                    yield source._replace(name=prefix + source.name.replace(EXPERT, str(number))), part
                    first += source.rows


def read_file(file: Path) -> dict[str, Stored]:
    """Returns every tensor of one safetensors file, by name.

    Raises ConfigError if the file was cut short or is not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as source:
        if source.read(len(LFS)) == LFS:
            raise ConfigError(f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its repository")
    cure = "it was cut short, is damaged, or is no safetensors file; fetch it again"
    with (
        refusing(lambda error: f"{file} has {size} bytes and cannot be read ({error}): {cure}", SafetensorError),
        safe_open(file, "np") as opened,
    ):
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: Stored(file, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
