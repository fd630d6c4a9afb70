"""Reads a Hugging Face model directory: the architecture that trainer and engines need, and the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.config.base import ConfigError, read_object, refuse, refusing
from megatron_rl.config.model import Head
from megatron_rl.models import registry
from megatron_rl.models.blocks import BIAS, EMBEDDING, HEAD, SCORE
from megatron_rl.models.sizes import AttentionKind, Features, Sizes
from megatron_rl.weights import safetensors_headers
from megatron_rl.weights.parameter_mapping import Rect, check_complete, hf_shapes, kept_float32
from megatron_rl.weights.quantisation import SCALES
from megatron_rl.weights.quantised_values import dequantise
from megatron_rl.weights.tensor_copies import blocks, from_tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# eq=False: inherit equality and hash from Sizes. They ignore the fields added here, on which cached results do not
# depend.
@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture(Sizes):
    """The sizes of the model in a directory, its features (such as the kinds of attention), and its transformers
    config.
    """

    features: Features
    config: PretrainedConfig

    def rotary(self, positions: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the rotary embedding's cos and sin for integer positions [N], each [N, rotated] (float32).

        `kind`: index of the kind of attention in `features.kinds`.

        Frequencies are scaled for long contexts as config.json specifies.
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
        rotary = kind.rotary
        if rotary.kind != "default":
            layer_type = {} if kind.layer_type is None else {"layer_type": kind.layer_type}
            return ROPE_INIT_FUNCTIONS[rotary.kind](cast(Any, self.config), **layer_type)
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float) / self.rotated
        return 1.0 / rotary.theta**exponents, 1.0


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
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        # Subfolders are not downloaded, because some repositories hold the weights in other formats there.
        return Path(snapshot_download(str(path), allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise FileNotFoundError(
            f"there is no directory {path} here, and it could not be downloaded from the hub: {error}"
        ) from error


def read_architecture(directory: str | Path, head: Head | None = None) -> Architecture:
    """Reads the architecture from config.json. If `head` is given, it replaces the model's output layer.

    Raises ConfigError, which quotes the wrong value, if the model is not supported or if keys of config.json contradict
    each other.
    """
    contradiction = "its config.json contradicts itself"
    with refusing(lambda error: f"{directory}: {contradiction}: {error}; fetch it again", StrictDataclassError):
        config = AutoConfig.from_pretrained(local_directory(directory))
    facts = config.to_dict()
    sizes = registry.read(facts, str(directory))
    return Architecture(**vars(sizes.with_head(head)), features=registry.features(facts, str(directory)), config=config)


def tensor_files(directory: str | Path) -> dict[str, Path]:
    """Returns {tensor name: safetensors file}.

    Raises the errors of `safetensors_headers.read_directory` if files are missing or damaged.
    """
    return {
        name: stored.file for name, stored in safetensors_headers.read_directory(local_directory(directory)).items()
    }


def check(directory: str | Path, sizes: Sizes, *, cast: bool = False, has_new_head: bool = True) -> None:
    """Raises ConfigError, which names the file and the tensor, unless the directory holds the model that its
    config.json describes.

    Only headers are read. Checks that files are complete, that exactly the model's tensors are there, that their shapes
    are right, and that they have a single dtype. Parameters that are always float32 are exempt from the dtype check.
    `cast`: whether the caller converts the tensors to one dtype, in which case several dtypes are allowed.
    `has_new_head`: whether the caller draws the weights of a head (`sizes.head`) that the files lack.

    If the files of a tied model also hold an output layer, the output layer's data is read and compared with the
    embedding.
    """
    directory = local_directory(directory)
    refuse(*itertools.islice(_problems(directory, sizes, cast, has_new_head), 1))


def _problems(directory: Path, sizes: Sizes, cast: bool, has_new_head: bool) -> Iterator[str]:
    """Yields error messages about a model directory, see `check`. The caller must stop at the first message, because
    later checks assume that earlier checks passed, for example that no tensor is missing."""
    headers, shapes = safetensors_headers.read_directory(directory), hf_shapes(sizes)
    if SCORE in headers and sizes.head is None:
        yield (
            f"{headers[SCORE].file} holds {SCORE}, the head of a reward model or a critic, and no text can be "
            "generated with it: give a language model, or set `head` of the role"
        )
    check_complete(headers, sizes)
    if SCORE not in headers and has_new_head:
        shapes.pop(SCORE, None)  # the files are of a language model: the role adds a new head, which the files lack
    for name, (rows, columns) in shapes.items():
        shape = (rows,) if columns == 1 else (rows, columns)
        if name == SCORE and name not in headers:
            yield f"{directory} holds no tensor {SCORE!r}: a role with a head that is not trained needs a trained head"
        elif name not in headers:
            tied = name == HEAD and EMBEDDING in headers
            cure = "set tie_word_embeddings" if tied else "the directory is not complete"
            yield f"{directory} holds no tensor {name!r}, which its config.json asks for: {cure}"
        elif (stored := headers[name]).shape != shape:
            file, mismatch = stored.file, f"{name} is {list(stored.shape)}, but config.json requires {list(shape)}"
            yield f"{file}: {mismatch}: is it another model's?"
    kept = {name for name in kept_float32(sizes) & shapes.keys() if headers[name].dtype == "F32"}
    by_dtype = {headers[name].dtype: (name, headers[name].file) for name in shapes if name not in kept}
    for dtype, (name, file) in by_dtype.items():
        if dtype not in DTYPES:
            dtypes = ", ".join(DTYPES)
            yield f"{file}: {name} is {dtype}, not one of {dtypes}: take a model that is not quantised"
    if len(by_dtype) > 1 and not cast:
        examples = "; ".join(f"{name} in {file} is {dtype}" for dtype, (name, file) in by_dtype.items())
        yield f"tensors of several dtypes: {examples}: name the dtype to cast all of them to"
    if sizes.tied and HEAD in headers:
        tensors = DirectoryTensors(directory)
        head, embedding = tensors.whole(HEAD), tensors.whole(EMBEDDING)
        pairs = zip(blocks(head), blocks(embedding), strict=False)  # block by block, to save memory
        if head.shape != embedding.shape or not all(torch.equal(a, b) for a, b in pairs):
            yield (
                f"{headers[HEAD].file}: {HEAD} is not the embedding, but config.json says tie_word_embeddings: set it "
                "to false"
            )
    if BIAS in headers and bool((bias := DirectoryTensors(directory).whole(BIAS)).any()):
        yield (
            f"{headers[BIAS].file}: {BIAS} is {bias.tolist()}, and heads here have no bias: set it to 0, and subtract "
            "it from the rewards or returns that the model learns"
        )


class DirectoryTensors:
    """The tensors of a model directory. Each tensor is read when it is first accessed. The tensors are views of
    memory-mapped files, so the caller must not write to them. Quantised values are converted to bfloat16 at every
    access.
    """

    def __init__(self, directory: str | Path) -> None:
        self.stored = safetensors_headers.read_directory(local_directory(directory))  # as the files' headers say
        self._open: dict[Path, Any] = {}
        self._views: dict[str, Tensor] = {}

    def whole(self, name: str) -> Tensor:
        """Returns a whole tensor. Raises ConfigError if the directory does not have it."""
        stored = self._find(name)
        if stored.scales is None:
            return self._view(name, stored)
        rows, columns = stored.shape
        return self.read(Rect(name, 0, 0, rows, columns, 0, 0))

    def read(self, rect: Rect) -> Tensor:
        """Returns the 2-D slice `rect` of a tensor: [rows, columns], or [rows] if the tensor is 1-D.

        Raises ConfigError if the directory does not have the tensor, or if the slice extends beyond the tensor.
        """
        stored = self._find(rect.tensor)
        shape = stored.shape
        if rect.row + rect.rows > shape[0] or (len(shape) > 1 and rect.column + rect.columns > shape[1]):
            raise ConfigError(f"{stored.file}: {rect.tensor} is {list(shape)}, too small for what config.json says")
        values = self._view(rect.tensor, stored)
        if stored.scales is None:
            return from_tensor(values, rect)
        form, scales = stored.format, self._view(rect.tensor + SCALES, stored.scales)
        # The scales of MXFP4 are stored as bytes. Published FP8 weights have scales of several dtypes.
        scales = scales.view(getattr(torch, form.scales)) if scales.dtype == torch.uint8 else scales.float()
        values = values.flatten(1)
        rows, columns = (  # (first, end) of the quantisation blocks that overlap the slice; indices count blocks
            (first // size, -(-(first + count) // size))
            for first, count, size in zip(rect[1:3], rect[3:5], form.block, strict=True)
        )
        (high, wide), blocks = form.block, scales[slice(*rows), slice(*columns)]
        held = slice(*(column * wide // form.packed for column in columns))
        touched = values[rows[0] * high : rows[1] * high, held]
        inside = rect._replace(row=rect.row - rows[0] * high, column=rect.column - columns[0] * wide)
        return from_tensor(dequantise(touched, blocks, form, torch.bfloat16), inside)

    def _find(self, name: str) -> safetensors_headers.Stored:
        if name not in self.stored:
            folder = next(iter(self.stored.values())).file.parent
            raise ConfigError(f"{folder} holds no tensor {name!r}: the directory is not complete")
        return self.stored[name]

    def _view(self, name: str, stored: safetensors_headers.Stored) -> Tensor:
        """Returns a tensor in the form in which its file stores it, without converting quantised values."""
        if name not in self._views:
            if stored.file not in self._open:
                self._open[stored.file] = safe_open(stored.file, "pt").__enter__()
            stack = name if stored.part is None else stored.part.name
            if stack not in self._views:
                self._views[stack] = self._open[stored.file].get_tensor(stack)
            stack_tensor = self._views[stack]
            self._views[name] = stack_tensor if stored.part is None else stored.part.of(stack_tensor)
        return self._views[name]


def read_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of every tensor of the directory, file by file."""
    tensors = DirectoryTensors(directory)
    for name in sorted(tensors.stored, key=lambda name: str(tensors.stored[name].file)):
        yield name, tensors.whole(name)


def eos_tokens(directory: str | Path, model_config: Any, tokenizer: Any = None) -> frozenset[int]:
    """Returns all token ids that end a sequence: those of generation_config.json, of the tokenizer, and of the model's
    `model_config`, which is None for a directory that may have a config.json of an unknown family."""
    ids: set[int] = set()
    names = ("generation_config.json", *(["config.json"] if model_config is None else []))
    sources = [read_object(file).get("eos_token_id") for name in names if (file := Path(directory) / name).exists()]
    for source in (*sources, *(known.eos_token_id for known in (model_config, tokenizer) if known is not None)):
        ids |= set(source) if isinstance(source, (list, tuple)) else set() if source is None else {source}
    return frozenset(ids)
