"""Reads a Hugging Face model directory: the architecture that trainer and engines need, and the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.config.base import read_object
from megatron_rl.config.schema import ConfigError
from megatron_rl.models import registry
from megatron_rl.models.blocks import EMBEDDING, HEAD
from megatron_rl.models.sizes import AttentionKind, Features, Sizes
from megatron_rl.weights import safetensors_headers
from megatron_rl.weights.parameter_mapping import Rect, check_complete, hf_shapes, kept_float32
from megatron_rl.weights.tensor_copies import from_tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BLOCK = 1 << 24  # maximum number of elements that are compared at a time


# equality and hash ignore the other fields: caches keyed by sizes need only these fields
@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture(Sizes):
    """The sizes of the model in a directory, its features (such as the kinds of attention), and its transformers
    config.
    """

    features: Features
    config: PretrainedConfig

    def rotary(self, positions: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the rotary embedding's cos and sin for integer positions [N], each [N, rotated] (float32).

        `kind`: index of the kind of attention in the model's features.

        Frequencies are scaled for long contexts as the config says.
        """
        frequencies, scale = self._frequencies(self.features.kinds[kind])
        angles = positions.float()[:, None] * frequencies.to(positions.device)[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * scale, angles.sin() * scale

    def _frequencies(self, kind: AttentionKind) -> tuple[Tensor, float]:
        """Returns (radians per position [rotated / 2] (float32), factor of cos and sin), equal to the values in
        transformers.

        The rotary classes of transformers are not used, because importing them loads all modelling code, which takes
        seconds.
        """
        own = kind.rotary
        if own.kind != "default":
            layer_type = {} if kind.layer_type is None else {"layer_type": kind.layer_type}
            return ROPE_INIT_FUNCTIONS[own.kind](cast(Any, self.config), **layer_type)
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float) / self.rotated
        return 1.0 / own.theta**exponents, 1.0


def local_directory(path: str | Path) -> Path:
    """Returns the local model directory. A Hugging Face Hub name is downloaded once, to the hub's cache.

    Raises FileNotFoundError if `path` looks local and does not exist, or if a hub name cannot be downloaded.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1:
        raise FileNotFoundError(
            f"no model directory {path}: give a local Hugging Face directory or a hub name like Qwen/Qwen2.5-7B"
        )
    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        )
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise FileNotFoundError(
            f"there is no directory {path} here, and it could not be downloaded from the hub: {error}"
        ) from error


def read_architecture(directory: str | Path) -> Architecture:
    """Reads the architecture from config.json.

    Raises ConfigError, with the value, if the model is not supported or if keys contradict each other.
    """
    try:
        config = AutoConfig.from_pretrained(local_directory(directory))
    except StrictDataclassError as error:
        raise ConfigError(f"{directory}: its config.json contradicts itself: {error}; fetch it again") from error
    facts = config.to_dict()
    sizes = registry.read(facts, str(directory))
    return Architecture(**vars(sizes), features=registry.features(facts, str(directory)), config=config)


def tensor_files(directory: str | Path) -> dict[str, Path]:
    """Returns {tensor name: safetensors file}.

    Raises the errors of `safetensors_headers.read_directory` if files are missing or damaged.
    """
    return {
        name: stored.file for name, stored in safetensors_headers.read_directory(local_directory(directory)).items()
    }


def check(directory: str | Path, sizes: Sizes, *, cast: bool = False) -> None:
    """Raises ConfigError, with file and tensor, unless the directory holds the model that its config.json describes.

    Only headers are read. Checks that files are complete, that exactly the model's tensors are there, that their shapes
    are right, and that they have a single dtype. Parameters that are always float32 are exempt from the dtype check.
    `cast`: whether the caller converts the tensors to one dtype, in which case several dtypes are allowed.

    If the files of a tied model hold an output layer too, its data is read and compared with the embedding.
    """
    directory = local_directory(directory)
    found, wanted = safetensors_headers.read_directory(directory), hf_shapes(sizes)
    check_complete(found, sizes)
    for name, (rows, columns) in wanted.items():
        if name not in found:
            cure = "set tie_word_embeddings" if name == HEAD and EMBEDDING in found else "the directory is not complete"
            raise ConfigError(f"{directory} holds no tensor {name!r}, which its config.json asks for: {cure}")
        shape, stored = (rows,) if columns == 1 else (rows, columns), found[name]
        if stored.shape != shape:
            raise ConfigError(
                f"{stored.file}: {name} is {list(stored.shape)}, config.json says {list(shape)}: is it another model's?"
            )
    kept = {name for name in kept_float32(sizes) & wanted.keys() if found[name].dtype == "F32"}
    _check_dtypes({name: found[name] for name in wanted if name not in kept}, cast)
    if (
        sizes.tied
        and HEAD in found
        and not _same_rows(DirectoryTensors(directory), wanted[EMBEDDING], found[HEAD].shape)
    ):
        raise ConfigError(
            f"{found[HEAD].file}: {HEAD} is not the embedding, but config.json says tie_word_embeddings: "
            "set it to false"
        )


def _check_dtypes(found: dict[str, safetensors_headers.Stored], cast: bool) -> None:
    """Raises ConfigError for a tensor of an unsupported dtype, and for tensors of several dtypes unless the caller
    converts them to one dtype.
    """
    by_dtype: dict[str, str] = {}
    for name, stored in found.items():
        if stored.dtype not in DTYPES:
            raise ConfigError(
                f"{stored.file}: {name} is {stored.dtype}, not one of {', '.join(DTYPES)}: "
                "take a model that is not quantised"
            )
        by_dtype.setdefault(stored.dtype, name)
    if len(by_dtype) > 1 and not cast:
        examples = "; ".join(f"{name} in {found[name].file} is {dtype}" for dtype, name in by_dtype.items())
        raise ConfigError(f"tensors of several dtypes: {examples}: name the dtype to cast all of them to")


def _same_rows(tensors: DirectoryTensors, shape: tuple[int, int], head: tuple[int, ...]) -> bool:
    """Checks whether the embedding and the output layer in the files are equal, block by block to save memory."""
    if tuple(head) != shape:
        return False
    rows, columns = shape
    step = max(1, BLOCK // columns)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        a, b = (tensors.read(Rect(name, row, 0, count, columns, 0, 0)) for name in (EMBEDDING, HEAD))
        if not torch.equal(a, b):
            return False
    return True


class DirectoryTensors:
    """The tensors of a model directory. Each tensor is read when it is first accessed. The tensors are views of
    memory-mapped files, so the caller must not write to them.
    """

    def __init__(self, directory: str | Path) -> None:
        self._stored = safetensors_headers.read_directory(local_directory(directory))
        self._open: dict[Path, Any] = {}
        self._views: dict[str, Tensor] = {}

    @property
    def stored(self) -> dict[str, safetensors_headers.Stored]:
        """Returns every tensor of the directory as described by its file's header."""
        return self._stored

    def whole(self, name: str) -> Tensor:
        """Returns a whole tensor. Raises ConfigError if the directory does not have it."""
        if name in self._views:
            return self._views[name]
        if name not in self._stored:
            folder = next(iter(self._stored.values())).file.parent
            raise ConfigError(f"{folder} holds no tensor {name!r}: the directory is not complete")
        path, stored = self._stored[name].file, self._stored[name]
        if path not in self._open:
            self._open[path] = _open(path)
        stack, expert, row = stored.part or (name, None, 0)
        if stack not in self._views:
            self._views[stack] = self._open[path].get_tensor(stack)
        whole = self._views[stack] if expert is None else self._views[stack][expert]
        self._views[name] = whole[row : row + stored.shape[0]] if stored.part else whole
        return self._views[name]

    def read(self, rect: Rect) -> Tensor:
        """Returns a rectangle of a tensor: [rows, columns], or [rows] if the tensor is 1-D.

        Raises ConfigError if the directory does not have the tensor, or if the tensor is smaller than the rectangle
        requires.
        """
        tensor = self.whole(rect.tensor)
        shape = tensor.shape
        if rect.row + rect.rows > shape[0] or (len(shape) > 1 and rect.column + rect.columns > shape[1]):
            path = self._stored[rect.tensor].file
            raise ConfigError(f"{path}: {rect.tensor} is {list(shape)}, too small for what config.json says")
        return from_tensor(tensor, rect)


def _open(path: Path) -> Any:
    """Opens a safetensors file. Raises ConfigError if it is not a safetensors file."""
    try:
        return safe_open(path, "pt").__enter__()
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}): fetch it again") from error


def read_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of every tensor of the directory, file by file."""
    tensors = DirectoryTensors(directory)
    for name in sorted(tensors.stored, key=lambda name: str(tensors.stored[name].file)):
        yield name, tensors.whole(name)


def eos_tokens(directory: str | Path, arch: Architecture) -> frozenset[int]:
    """Returns all token ids that end a sequence, from config.json and generation_config.json."""
    ids: set[int] = set()
    generation = Path(directory) / "generation_config.json"
    sources = [arch.config.eos_token_id]
    if generation.exists():
        sources.append(read_object(generation).get("eos_token_id"))
    for source in sources:
        ids |= set(source) if isinstance(source, (list, tuple)) else set() if source is None else {source}
    return frozenset(ids)
