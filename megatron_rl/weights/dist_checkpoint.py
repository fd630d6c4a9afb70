"""Reads the model from a Megatron distributed checkpoint (torch_dist format) as Hugging Face tensors.

One parameter is read at a time, without Megatron and without distributed ranks. Whatever layout wrote a checkpoint, it
holds whole tensors in pieces. Each piece is read directly to its position in the tensor. Layers of the same kind are
stacked in one tensor [layers, ...], and experts in one tensor [layers, experts, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_rl.config.base import ConfigError, refuse, refusing
from megatron_rl.config.model import Head
from megatron_rl.models.blocks import OUTPUT, VALUE_HEAD
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.dist_names import OPTIMIZER, StackedKey, is_padded, places
from megatron_rl.weights.parameter_mapping import WHOLE, Rect, megatron, megatron_names
from megatron_rl.weights.plain_data import DAMAGED, read_metadata, read_object
from megatron_rl.weights.tensor_copies import assemble, local

COMMON = "common.pt"  # name of the file with the state that does not consist of tensors, such as optimizer settings


class DistCheckpoint:
    """A Megatron distributed checkpoint of one role, opened for reading."""

    def __init__(self, directory: Path, *, trust: bool = False) -> None:
        """Opens the checkpoint in `directory`.

        `trust`: whether to unpickle objects that are more than plain data. Unpickling such an object runs the code that
        the object names.

        Raises ConfigError if the directory is not a checkpoint, or if listed files are missing or too short.
        """
        self.directory, self.trust = Path(directory), trust
        newer = f"torch here is {torch.__version__}; a checkpoint of a newer torch may need that one"
        unreadable = f"{directory} is not a distributed checkpoint that can be read here"
        with refusing(lambda error: f"{unreadable}: {error} in its .metadata ({newer})", *DAMAGED):
            self._metadata: Any = read_metadata(self.directory, trust=trust)
        refuse(*self._file_problems())

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns {Megatron name: (shape, dtype)} of every stored tensor, with layers stacked, including the optimizer
        state."""
        stored = self._metadata.state_dict_metadata.items()
        return {name: (tuple(m.size), m.properties.dtype) for name, m in stored if isinstance(m, TensorStorageMetadata)}

    @property
    def optimizer_states(self) -> list[str]:
        """Returns the key prefixes of the optimizer's per-parameter states, e.g. "optimizer.state.exp_avg."."""
        return sorted(
            {name[: name.index(".", len(OPTIMIZER)) + 1] for name in self.shapes if name.startswith(OPTIMIZER)}
        )

    def tensors(self, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, tensor) of the whole model, in layer order.

        Raises ConfigError if a parameter is missing or its shape does not match `sizes`.
        """
        for name in whole_names(sizes):
            parameter, rects = self.checked(sizes, name), megatron(sizes, name, WHOLE)[1]
            by_tensor: dict[str, list[Rect]] = {}
            for rect in rects:
                by_tensor.setdefault(rect.tensor, []).append(rect)
            for tensor, cuts in by_tensor.items():
                yield (
                    tensor,
                    local(parameter, cuts[0]) if len(cuts) == 1 else assemble([(parameter, cuts)])[tensor],
                )

    def checked(self, sizes: Sizes, name: str, prefix: str = "") -> Tensor:
        """Returns a whole parameter, or its optimizer state if `prefix` is given. The returned tensor may have
        additional rows of vocabulary padding.

        Raises ConfigError if the parameter is missing or its shape does not match `sizes`.
        """
        rows, columns = megatron(sizes, name, WHOLE)[0]
        parameter = self.parameter(name, prefix)
        size = (parameter.shape[0], parameter.shape[1] if parameter.dim() > 1 else 1)
        if size[1] != columns or size[0] < rows or (size[0] > rows and not is_padded(sizes, name)):
            raise ConfigError(
                f"{self.directory}: {prefix}{name} is {size}, the model's config says {(rows, columns)}: "
                "is the checkpoint another model's?"
            )
        return parameter

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which a parameter is stored."""
        return self._find(name, "")[1].properties.dtype

    def place(self, name: str, prefix: str = "") -> StackedKey:
        """Returns the key of the stored tensor that holds a parameter, and the index of the parameter in this tensor.

        Raises ConfigError if the checkpoint does not have the parameter.
        """
        return self._find(name, prefix)[0]

    def parameter(self, name: str, prefix: str = "") -> Tensor:
        """Returns a whole parameter, assembled from its pieces. `name`: Megatron name of the parameter with the global
        layer index.

        Raises ConfigError if the parameter or all of its pieces are missing.
        """
        (key, index), stored = self._find(name, prefix)
        drop = len(index)
        shape, assembled = tuple(stored.size)[drop:], None
        for chunk in stored.chunks:
            offsets, lengths = tuple(chunk.offsets), tuple(chunk.sizes)
            if any(not o <= i < o + n for i, o, n in zip(index, offsets, lengths, strict=False)):
                continue
            place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            with (self.directory / place.relative_path).open("rb") as file:
                view: Any = _create_file_view(file, place.offset, place.length)  # as in torch's checkpoint reader
                chunk_tensor = torch.load(view, map_location="cpu", weights_only=True)
            piece = chunk_tensor[tuple(i - o for i, o in zip(index, offsets, strict=False))]
            if piece.shape == shape:
                return piece
            assembled = torch.empty(shape, dtype=stored.properties.dtype) if assembled is None else assembled
            assembled[tuple(slice(o, o + n) for o, n in zip(offsets[drop:], lengths[drop:], strict=True))] = piece
        if assembled is None:
            raise ConfigError(f"{self.directory} holds no piece of {prefix}{name}: the checkpoint is not complete")
        return assembled

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Yields (key, bytes) of every stored object that is not a tensor.

        The bytes are pickled data, as in the file. Raises ConfigError for an object that is more than plain data,
        unless the checkpoint was opened with `trust`.
        """
        for index, place in self._metadata.storage_data.items():
            if isinstance(self._metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                with (self.directory / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    data = file.read(place.length)
                read_object(data, f"{self.directory}: {index.fqn}", trust=self.trust)
                yield index.fqn, data

    def _find(self, name: str, prefix: str) -> tuple[StackedKey, TensorStorageMetadata]:
        """Returns (key and index of a parameter, metadata of the stored tensor that holds the parameter)."""
        for place in places(name):
            stored = self._metadata.state_dict_metadata.get(prefix + place.key)
            if isinstance(stored, TensorStorageMetadata) and all(
                i < n for i, n in zip(place.at, stored.size, strict=False)
            ):
                return place._replace(key=prefix + place.key), stored
        raise ConfigError(f"{self.directory} holds no parameter {prefix}{name}: the checkpoint is of another model")

    def common(self) -> Any:
        """Returns the state that is stored beside the tensors, such as the optimizer's settings; {} if there is none.
        Raises ConfigError if the state is more than plain data, unless the checkpoint was opened with `trust`."""
        file = self.directory / COMMON
        return read_object(file, str(file), trust=self.trust) if file.is_file() else {}

    def _file_problems(self) -> Iterator[str]:
        """Yields an error message for each file that the checkpoint's metadata lists and that is missing or short."""
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            file = self.directory / name
            if not file.is_file():
                yield f"{self.directory}: {name} is missing, which its .metadata lists: the checkpoint is not complete"
            elif (size := file.stat().st_size) < end:
                yield f"{file} has {size} bytes of at least {end}: it was cut short"


def has_head(checkpoint: DistCheckpoint) -> bool | None:
    """Returns True if a checkpoint holds a head in place of the output layer, and False if it holds an output layer.
    Returns None if it holds neither, as for a model with tied embeddings or for adapters without a head."""
    shape = checkpoint.shapes.get(OUTPUT)
    return None if shape is None else shape[0][0] == 1


def head_difference(directory: Path, head: Head | None, *, beside: bool = False) -> str | None:
    """Compares the heads of a checkpoint's model with those of the role that resumes from it. Returns an error sentence
    if only one of the two has a head in place of the output layer, or if only one has a value head beside the output
    layer. Returns None if the heads agree.

    `directory`: the checkpoint. `head`: the role's head setting; None if the role has an output layer.
    `beside`: whether the role's model has a value head beside its output layer.

    The checkpoint is opened as trusted, because Megatron-core is about to load it anyway.
    """
    checkpoint = DistCheckpoint(directory, trust=True)
    stored_head = has_head(checkpoint)
    if beside != (VALUE_HEAD in checkpoint.shapes):
        held = "no value head beside its output layer" if beside else "a value head beside its output layer"
        return (
            f"{directory} holds a model with {held}, and the role's loss.value_coef is {'above ' * beside}0: set it as "
            "it was, or start anew"
        )
    if stored_head is None or stored_head == (head is not None):
        return None
    held = "a model with a head" if stored_head else "a language model"
    return f"{directory} holds {held}, and the role's head is {head or 'null'}: set head as it was, or start anew"


def refuse_code(directory: Path) -> None:
    """Raises ConfigError if loading a role's checkpoint with Megatron-core would run code from the checkpoint.

    The check is needed because Megatron-core loads .metadata and the objects in the files as unrestricted pickles.
    """
    checkpoint = DistCheckpoint(directory)
    for _ in checkpoint.objects():
        pass
    checkpoint.common()


def whole_names(sizes: Sizes) -> list[str]:
    """Returns the names of all parameters of the model, as they are on a single rank."""
    return megatron_names(sizes, range(sizes.num_layers), range(sizes.experts), first=True, last=True, fused=True)
