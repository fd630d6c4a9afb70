"""Reads the tensor names, dtypes and shapes of a model directory from the headers of its safetensors files.

No tensor data is read, and torch is not needed. transformers 5 holds a layer's experts in one stacked tensor in memory,
and its save_pretrained writes one tensor per expert. Files from other tools may hold the stacked tensors. Their parts
are listed here under the names that save_pretrained would use.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_rl.config.base import ConfigError, read_object, refuse, refusing
from megatron_rl.models import registry
from megatron_rl.models.lora_targets import CONFIG as ADAPTER
from megatron_rl.models.partitions import Source
from megatron_rl.models.registry import layer_rows
from megatron_rl.models.rows import EXPERT, HF_LAYER
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.quantisation import FORMATS, SCALES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DAMAGED = (KeyError, TypeError, AttributeError)  # errors of reading an index whose JSON has a different structure
# first bytes of a git-lfs pointer: a small file in place of a large file that git-lfs has not downloaded
LFS = b"version https://git-lfs.github.com/"


class Stored(NamedTuple):
    """A tensor in a safetensors file, as described by the file's header."""

    file: Path
    # Name of the dtype in safetensors: F32, BF16, F16, ... BF16 if `scales` is set, because 8-bit values are converted
    # to bfloat16 when they are read.
    dtype: str
    shape: tuple[int, ...]
    # If the tensor is part of a stacked tensor: (name of the stacked tensor, expert index or None, first row).
    part: tuple[str, int | None, int] | None = None
    scales: Stored | None = None  # the scales of 8-bit values, one per block of FORMATS["fp8"]


def read_directory(directory: Path) -> dict[str, Stored]:
    """Returns every tensor of a model directory, by name.

    Raises FileNotFoundError if there are no weights at all. Raises ConfigError if a file is missing, cut short or
    damaged, if the index names a tensor that its file does not hold, or if the directory holds the weights of several
    models.
    """
    return _apart(directory, _with_scales(_read(directory)))


def _with_scales(found: dict[str, Stored]) -> dict[str, Stored]:
    """Sets `scales` of tensors with 8-bit values. In the files of DeepSeek-V3, scales are separate tensors; these are
    left out of the returned dict. Raises ConfigError if the scales do not have the shape that FORMATS["fp8"] requires.
    """
    out = {name: stored for name, stored in found.items() if not name.endswith(SCALES)}
    for name, scales in ((name, stored) for name, stored in found.items() if name.endswith(SCALES)):
        own = out.get(tensor := name.removesuffix(SCALES))
        blocks = own and tuple(-(-n // size) for n, size in zip(own.shape, FORMATS["fp8"].block, strict=False))
        if own is None or own.dtype != "F8_E4M3" or scales.shape != blocks:
            raise ConfigError(
                f"{scales.file}: {name} has the shape {list(scales.shape)}, and {tensor} is "
                f"{own and (own.dtype, [*own.shape])}. Only 8-bit values (F8_E4M3) with one scale per 128 x 128 block "
                "can be read: take a model that is not quantised"
            )
        out[tensor] = own._replace(dtype="BF16", scales=scales)
    return out


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
    first = {file: name for name, file in reversed(places.items())}  # file -> first tensor that the index lists in it
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
    refuse(*itertools.islice(wrong, 1))  # a file of another model may lack thousands of tensors
    return {name: files[file][name] for name, file in places.items()}


def _apart(directory: Path, found: dict[str, Stored]) -> dict[str, Stored]:
    """Replaces each tensor of stacked experts by one entry per expert, with the names that files with one tensor per
    expert use.

    If config.json cannot be read, the tensors are returned unchanged. Raises ConfigError if the shape of a stacked
    tensor does not match config.json.
    """
    try:
        sizes = registry.read(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return found
    out = dict(found)
    for name, shape, expert, parts in stacked(sizes) if sizes.experts else ():
        if name not in found:
            continue
        stack, first = found[name], 0
        if stack.shape != shape:
            raise ConfigError(f"{stack.file}: {name} is {list(stack.shape)}, config.json says {list(shape)}")
        out.pop(name, None)
        for own in parts:
            part = (name, expert, first)
            out[own.name] = Stored(stack.file, stack.dtype, (own.rows, own.columns), part)
            first += own.rows
    return out


def stacked(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...], int | None, list[Source]]]:
    """Yields the tensors that transformers 5 holds in memory in place of several tensors of the files.

    A stack of experts is yielded once per expert: (name of the stack, shape of the stack, index of the expert or None,
    the files' tensors that are concatenated along the rows).
    """
    for layer in range(sizes.num_layers):
        prefix = HF_LAYER.format(layer)
        for row in layer_rows(sizes, layer):
            if row.in_memory is None or row.in_memory == row.sources[0].name:
                continue
            one = sum(source.rows for source in row.sources), row.sources[0].columns
            shape = (row.experts, *one) if row.experts else one
            for number in range(row.experts or 1):
                parts = [s._replace(name=prefix + s.name.replace(EXPERT, str(number))) for s in row.sources]
                yield prefix + row.in_memory, shape, number if row.experts else None, parts


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
