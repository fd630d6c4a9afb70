"""Reads the model out of a Megatron distributed checkpoint (torch_dist format) as Hugging Face tensors, one parameter at a time.

Needs neither Megatron nor ranks: a checkpoint holds whole tensors in pieces, whatever the layout that wrote it, and a piece is read where
it lies. Layers of one kind are stacked in one tensor [layers, ...], their experts in one [layers, experts, ...].
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_rl.config import ConfigError
from megatron_rl.weights.copies import assemble
from megatron_rl.weights.rectangles import WHOLE, megatron, megatron_names
from megatron_rl.weights.sizes import Sizes

LAYERS = "decoder.layers."
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


class DistCheckpoint:
    """One role's directory in a checkpoint. Raises ConfigError when it is none, or when files that it lists are missing or short."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        try:
            self._metadata: Any = FileSystemReader(self.directory).read_metadata()
        except (OSError, EOFError, ValueError, KeyError, AttributeError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"{directory} is not a distributed checkpoint that can be read here: {error} in its .metadata "
                f"(torch is {torch.__version__}; what a newer one wrote may need that)"
            ) from error
        self._check_files()

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every stored tensor, optimizer included -> (shape, dtype), under Megatron's names with layers stacked."""
        found = self._metadata.state_dict_metadata.items()
        return {name: (tuple(m.size), m.properties.dtype) for name, m in found if isinstance(m, TensorStorageMetadata)}

    def tensors(self, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the whole model, in the order of its layers.

        Raises ConfigError for a parameter that the checkpoint has not, or has in another shape than `sizes` says.
        """
        names = megatron_names(sizes, range(sizes.num_layers), range(sizes.experts), first=True, last=True, fused=True)
        for name in names:
            (rows, columns), rects = megatron(sizes, name, WHOLE)
            whole = self.parameter(name)
            found = (whole.shape[0], whole.shape[1] if whole.dim() > 1 else 1)
            padded = "word_embeddings" in name or name == "output_layer.weight"
            if found[1] != columns or found[0] < rows or (found[0] > rows and not padded):
                raise ConfigError(f"{self.directory}: {name} is {found}, the model's config says {(rows, columns)}: is it another model's?")
            yield from assemble([(whole, rects)]).items()

    def parameter(self, name: str) -> Tensor:
        """A whole parameter, its name with global layer and expert numbers, joined from its pieces."""
        key, index = self._place(name)
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata) or any(i >= n for i, n in zip(index, stored.size, strict=False)):
            raise ConfigError(f"{self.directory} holds no parameter {name}: the checkpoint is of another model")
        drop = len(index)
        out = torch.empty(tuple(stored.size)[drop:], dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            offsets, lengths = tuple(chunk.offsets), tuple(chunk.sizes)
            if not all(o <= i < o + n for i, o, n in zip(index, offsets, lengths, strict=False)):
                continue
            piece = self._piece(key, chunk.offsets)[tuple(i - o for i, o in zip(index, offsets, strict=False))]
            out[tuple(slice(o, o + n) for o, n in zip(offsets[drop:], lengths[drop:], strict=True))] = piece
        return out

    def _place(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The stored tensor that a parameter lies in, and its numbers (layer, expert) along that tensor's leading dimensions."""
        if name in self._metadata.state_dict_metadata or not name.startswith(LAYERS):
            return name, ()
        number, _, part = name.removeprefix(LAYERS).partition(".")
        expert = _EXPERT.fullmatch(part)
        if expert is None:
            return LAYERS + part, (int(number),)
        return f"{LAYERS}mlp.experts.experts.{expert[1]}.weight", (int(number), int(expert[2]))

    def _piece(self, key: str, offsets: torch.Size) -> Tensor:
        place = self._metadata.storage_data[MetadataIndex(key, offsets)]
        with (self.directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            file = self.directory / name
            if not file.is_file():
                raise ConfigError(f"{self.directory}: {name} is missing, which its .metadata lists: the checkpoint is not whole")
            if file.stat().st_size < end:
                raise ConfigError(f"{file} has {file.stat().st_size} bytes of at least {end}: it was cut")
