"""Reads the pickled parts of a distributed checkpoint without running code: only plain data is accepted.

A pickle names functions that are called during loading. A malicious checkpoint could name any function.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.config.schema import ConfigError
from megatron_rl.lib.safe_pickle import refuse_bombs

METADATA = ".metadata"
TRUST = "it would run code here. Where you trust its writer, `convert` reads it with --trust"
# Exceptions that loading a damaged pickle may raise.
DAMAGED = (
    OSError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError, AssertionError, OverflowError,
    MemoryError, RecursionError, ImportError, RuntimeError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError,
)  # fmt: skip
# Classes and functions that a .metadata file written by torch may contain.
_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        *("Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_CHECKPOINT}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler for .metadata files that refuses all classes and functions that do not belong there."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        is_allowed = global_name in _ALLOWED.get(module_name, ())
        if is_allowed or (module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype)):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}, which is no data of a checkpoint: {TRUST}")


def read_metadata(directory: Path, *, trust: bool = False) -> Metadata:
    """Reads the .metadata file of a checkpoint.

    `trust`: whether to accept pickles that are more than plain data.

    Raises UnpicklingError if the file is more than plain data and `trust` is False. Raises one of the exceptions in
    `DAMAGED` if the file is damaged.
    """
    data = (directory / METADATA).read_bytes()
    if not trust:
        refuse_bombs(data)
    metadata = (pickle.Unpickler if trust else _PlainUnpickler)(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__} and not the metadata of a checkpoint")
    _check_places(metadata)
    return metadata


def _check_places(metadata: Metadata) -> None:
    """Raises UnpicklingError unless the metadata contain a valid type and storage location for every stored item."""
    kinds, places = metadata.state_dict_metadata, metadata.storage_data
    valid = isinstance(kinds, dict) and isinstance(places, dict)
    for index, place in places.items() if valid else ():
        numbers = (place.offset, place.length)
        has_names = isinstance(index.fqn, str) and index.fqn in kinds and isinstance(place.relative_path, str)
        valid = valid and has_names and all(type(number) is int and number >= 0 for number in numbers)
    if not valid:
        raise pickle.UnpicklingError("it does not say where things are stored")


def read_object(data: bytes | Path, what: str, *, trust: bool = False) -> Any:
    """Returns an object saved by torch.save, given as bytes or as a file.

    `what`: name of the object for error messages.
    `trust`: whether to accept pickles that are more than plain data.

    Raises ConfigError if the object is damaged, or if it is more than plain data and `trust` is False.
    """
    try:
        source = io.BytesIO(data) if isinstance(data, bytes) else data
        if not trust and zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                for name in (name for name in archive.namelist() if name.endswith(".pkl")):
                    refuse_bombs(archive.read(name))
        if isinstance(source, io.BytesIO):
            source.seek(0)
        return torch.load(source, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("GLOBAL ")[2].partition(" ")[0] or f"something ({str(error)[:200]})"
        raise ConfigError(f"{what} holds {reason}, which is no plain data: {TRUST}") from error
    except DAMAGED as error:
        raise ConfigError(f"{what} cannot be read ({error}): the checkpoint is damaged") from error
