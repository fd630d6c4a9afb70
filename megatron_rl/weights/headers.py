"""Reads what the safetensors files of a model directory hold, from their headers alone: no tensor data, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.base import read_object
from megatron_rl.config.schema import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LFS = b"version https://git-lfs.github.com/"  # begins a pointer, which stands for a file that git-lfs has not fetched


class Stored(NamedTuple):
    """A tensor as a file's header describes it."""

    file: Path
    dtype: str  # in safetensors' spelling: F32, BF16, F16, ...
    shape: tuple[int, ...]


def read_directory(directory: Path) -> dict[str, Stored]:
    """Returns every tensor of a model directory, by name.

    Raises FileNotFoundError when there are no weights at all. Raises ConfigError for a file that is missing, cut short
    or damaged, and for an index that names a tensor which its file does not hold.
    """
    index, single = directory / INDEX, directory / SINGLE
    if not index.exists():
        if not single.exists():
            raise FileNotFoundError(
                f"{directory} holds no {SINGLE}: give a downloaded model directory, or set model.init to random"
            )
        return read_file(single)
    try:
        places = {str(name): str(file) for name, file in read_object(index)["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read ({error!r}): fetch the model again") from error
    files: dict[str, dict[str, Stored]] = {}
    for name, file in places.items():
        if file not in files:
            if not (directory / file).is_file():
                raise ConfigError(
                    f"{directory / file} is missing, which {INDEX} lists for {name}: fetch the model again"
                )
            files[file] = read_file(directory / file)
        if name not in files[file]:
            raise ConfigError(
                f"{directory / file} holds no tensor {name}, which {INDEX} lists there: they are of different models"
            )
    return {name: files[file][name] for name, file in places.items()}


def read_file(file: Path) -> dict[str, Stored]:
    """Returns every tensor of one safetensors file, by name.

    Raises ConfigError, with the tensor concerned, for a file that was cut short or is not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as source:
        first = source.read(len(LFS))
        if first == LFS:
            raise ConfigError(f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its repository")
        source.seek(8)
        length = int.from_bytes(first[:8], "little")
        start = 8 + length
        if size < 8 or start > size:
            raise ConfigError(
                f"{file} has {size} bytes, its header alone needs {start}: it was cut short or is no safetensors file; "
                "fetch it again"
            )
        text = source.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        found = {name: Stored(file, str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
        ends = {name: start + int(entry["data_offsets"][1]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(
            f"{file} has a header that cannot be read ({error!r}): it is damaged; fetch it again"
        ) from error
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size:
            raise ConfigError(
                f"{file} has {size} bytes, but its tensor {name} ends at {end}: it was cut short; fetch it again"
            )
    if ends and max(ends.values()) < size:
        raise ConfigError(
            f"{file} has {size} bytes, {size - max(ends.values())} more than its header says: it is damaged; "
            "fetch it again"
        )
    return found
