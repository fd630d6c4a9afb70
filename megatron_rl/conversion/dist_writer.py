"""Writes distributed checkpoints in Megatron-core's torch_dist format, piece by piece and without distributed ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILE_BYTES = 4 * 10**9  # maximum size of a file in bytes; a single piece may be larger


class DistWriter:
    """Writes a distributed checkpoint in pieces (blocks of tensors). Each piece is written to a file of the rank that
    will read the piece. `finish` completes the checkpoint.
    """

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._files: dict[int, BinaryIO] = {}
        self._numbers: dict[int, int] = {}  # rank -> index of its next file
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, Any] = {}

    def __enter__(self) -> DistWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, key: str, size: tuple[int, ...], offsets: tuple[int, ...], piece: Tensor, *, rank: int = 0) -> None:
        """Writes one piece of the tensor `key`.

        `size`: the shape of the whole tensor.
        `offsets`: the position of the piece in the whole tensor. The piece has as many dimensions as the tensor.
        `rank`: the rank to whose file the piece is written.

        Raises ValueError if `size` or the dtype differs from the values given with earlier pieces of the tensor.
        """
        metadata = self._tensors.get(key)
        if metadata is None:
            metadata = TensorStorageMetadata(
                properties=TensorProperties(dtype=piece.dtype), size=torch.Size(size), chunks=[]
            )
            self._tensors[key] = metadata
        if metadata.size != torch.Size(size) or metadata.properties.dtype != piece.dtype:
            raise ValueError(
                f"{key}: a piece of a {size} {piece.dtype} tensor, "
                f"after pieces of a {metadata.size} {metadata.properties.dtype} tensor"
            )
        place = torch.Size(offsets)
        compact_piece = piece.detach().contiguous()
        if compact_piece.untyped_storage().nbytes() != compact_piece.nbytes:  # torch.save writes whole storages
            compact_piece = compact_piece.clone()
        file = self._file(rank, compact_piece.nbytes)
        start = file.tell()
        _save(compact_piece, file)
        metadata.chunks.append(ChunkStorageMetadata(offsets=place, sizes=piece.shape))
        self._storage[MetadataIndex(key, place)] = _StorageInfo(Path(file.name).name, start, file.tell() - start)

    def add_bytes(self, key: str, data: bytes, *, rank: int = 0) -> None:
        """Writes an object that is not a tensor. `data`: the object, already pickled by torch.save."""
        file = self._file(rank, len(data))
        self._storage[MetadataIndex(key)] = _StorageInfo(Path(file.name).name, file.tell(), len(data))
        file.write(data)
        self._objects[key] = BytesStorageMetadata()

    def finish(self, common: Any) -> None:
        """Closes the files and writes common.pt, .metadata and metadata.json.

        `common`: non-tensor state such as optimizer settings, saved as common.pt.
        """
        for file in self._files.values():
            file.close()
        torch.save(common, self._folder / "common.pt")
        metadata = Metadata(state_dict_metadata={**self._tensors, **self._objects}, storage_data=self._storage)
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata))
        (self._folder / "metadata.json").write_text(json.dumps(BACKENDS), encoding="utf-8")

    def _file(self, rank: int, size: int) -> BinaryIO:
        """Returns the open file of a rank, or a new file if `size` more bytes would exceed the maximum size."""
        file = self._files.get(rank)
        if file is not None and (file.tell() == 0 or file.tell() + size <= self._file_bytes):
            return file
        if file is not None:
            file.close()
        number = self._numbers.get(rank, 0)
        self._numbers[rank] = number + 1
        self._files[rank] = (self._folder / f"__{rank}_{number}.distcp").open("wb")
        return self._files[rank]


def _save(tensor: Tensor, file: BinaryIO) -> None:
    """Calls torch.save. Raises OSError if the disk is full, instead of torch's RuntimeError."""
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
