"""Reads and writes LoRA adapters in peft's format, and computes the part of an adapter that each trainer rank holds.

An adapter of a matrix W [rows, columns] is A [r, columns] and B [rows, r]. The effective matrix is W + alpha / r B A.
If tensor-parallel ranks split W by rows, they split B by rows and all hold the whole A. If they split W by columns,
they split A by columns and all hold the whole B.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.base import read_object, refuse, refusing
from megatron_rl.config.schema import Lora
from megatron_rl.models.blocks import EMBEDDING, SCORE
from megatron_rl.models.lora_targets import (
    CONFIG,
    WEIGHTS,
    Projection,
    adapted,
    not_plain,
    projections,
    refusal,
    target_names,
)
from megatron_rl.models.partitions import ByColumns, ByRows, Held, Partition, Source, Whole
from megatron_rl.models.rows import HF_LAYER, MEGATRON_LAYER
from megatron_rl.models.sizes import Sizes
from megatron_rl.run.atomic_files import replacing
from megatron_rl.run.file_checksums import quick_digest
from megatron_rl.weights import hf_model, safetensors_headers
from megatron_rl.weights.parameter_mapping import Shard
from megatron_rl.weights.tensor_copies import all_finite, blocks

DIRECTORY = "adapter"  # name of the adapter's directory in a role's checkpoint
BASE = "base.json"  # file that identifies the base model on which an adapter was trained
_MODULE = "lora"  # name of the submodule of a Megatron transformer layer that holds the layer's adapters
# errors raised by reading an adapter's file if the file is missing, damaged, or not an adapter's file
_ODD = (OSError, ValueError, KeyError, TypeError, AttributeError)
PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}  # this package's name of the LoRA matrix A or B -> peft's name
_PREFIX = "base_model.model."  # prefix of module names in peft
HEAD = f"{_PREFIX}{SCORE}"  # peft's name of the weight of a trained head
_NAME = re.compile(rf"decoder\.layers\.(\d+)\.{_MODULE}\.(\w+)\.(lora_[ab])")
# matches a tensor name of peft; the group is the name of the adapted module, such as q_proj
_MATRIX = re.compile(r".*?(\w+)\.lora_[AB]\.weight")


def parameter_name(layer: int, projection: str, part: str) -> str:
    """Returns the Megatron name of a LoRA matrix (A or B) of a parameter. `part`: "lora_a" or "lora_b"."""
    return f"{MEGATRON_LAYER.format(layer)}{_MODULE}.{projection}.{part}"


def is_adapter(name: str) -> bool:
    """Checks whether a Megatron parameter belongs to a LoRA adapter. `name` contains the global layer index."""
    return f".{_MODULE}." in name


def held(sizes: Sizes, name: str, shard: Shard, rank: int) -> Held:
    """Returns (shape of this rank's part, 2-D slices of peft's tensors that form the part) of a LoRA matrix.

    `shard`: the rank's position in the tensor-parallel group.
    `rank`: the LoRA rank r.
    """
    _, source, cut = _find(sizes, name, rank)
    return cut.held([source], shard.tp, shard.rank)


def shapes(sizes: Sizes, lora: Lora) -> dict[str, tuple[int, int]]:
    """Returns {peft's tensor name: (rows, columns)} of all LoRA matrices of the whole model. Includes the model's head,
    if there is one, because a head is trained together with the adapters."""
    names = (
        parameter_name(layer, module.name, part)
        for layer in range(sizes.num_layers)
        for module in adapted(sizes, layer, lora)
        for part in PARTS
    )
    matrices = {source.name: (source.rows, source.columns) for source in (_find(sizes, n, lora.rank)[1] for n in names)}
    return matrices if sizes.head is None else matrices | {HEAD: (sizes.outputs, sizes.hidden)}


def read(directory: str | Path, sizes: Sizes, lora: Lora) -> dict[str, Tensor]:
    """Reads a LoRA adapter written by peft or by `write`. Returns {peft's tensor name: tensor}.

    Raises ConfigError if files are missing or damaged, if the tensors do not match `lora`, or if values are not finite.
    """
    file, required = Path(directory) / WEIGHTS, shapes(sizes, lora)
    cure = "give the directory of an adapter"
    with refusing(lambda error: f"{file} cannot be read as safetensors ({error}): {cure}", OSError, SafetensorError):
        tensors = load_file(file)
    refuse(*itertools.islice(_problems(file, tensors, required, lora), 1))
    return tensors


def _problems(
    file: Path, tensors: Mapping[str, Tensor], required: Mapping[str, tuple[int, int]], lora: Lora
) -> Iterator[str]:
    """Yields error messages about an adapter file: wrong tensor names, wrong shapes, and values that are not finite.
    The caller must stop at the first message, because later checks assume that the tensor names are those in
    `required`."""
    missing, more = sorted(required.keys() - tensors.keys()), sorted(tensors.keys() - required.keys())
    if missing or more:
        yield (
            f"{file}: lora.targets = {list(lora.targets)} of this model wants {len(required)} tensors; missing are "
            f"{missing[:2]}, and {more[:2]} have no place: set lora.targets to the adapter's"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != required[name]:
            yield (
                f"{file}: {name} is {list(tensor.shape)}, lora.rank = {lora.rank} and the model's config.json say "
                f"{list(required[name])}: is it another model's?"
            )
        wrong = "holds numbers that are not finite" if tensor.is_floating_point() else f"is {tensor.dtype}"
        if not tensor.is_floating_point() or not all_finite(tensor):
            yield f"{file}: {name} {wrong}: its training failed, or the file is damaged; give another one"


def write(directory: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str, digest: str) -> None:
    """Writes a LoRA adapter's files in peft's format, and a file that identifies its base model.

    `base`: the base model's path or hub name.
    `digest`: the base model's `base_digest`.

    peft and vLLM can load the directory directly.
    """
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(directory / WEIGHTS) as temporary:
        try:
            save_file(contiguous, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # raised if the disk is full
            raise OSError(f"{temporary} cannot be written: {error}") from error
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if HEAD in tensors else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": ["score"] if HEAD in tensors else None,
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / BASE).write_text(json.dumps({"path": base, "digest": digest}, indent=2) + "\n")


def read_settings(directory: Path) -> Lora:
    """Reads the settings of a LoRA adapter written by peft or by `write`.

    Raises ConfigError if the settings cannot be read, or if the adapter is of another form than W + alpha / r B A.
    """
    file = directory / CONFIG
    with refusing(lambda error: f"{file} cannot be read ({error!r}): is it a LoRA adapter?", *_ODD):
        config = read_object(file)
        refuse(*(f"{file}: {refusal(config, odd)}" for odd in not_plain(config)[:1]))
        targets = target_names(config) or {
            _MATRIX.sub(r"\1", name) for name in safetensors_headers.read_file(directory / WEIGHTS)
        }
        return Lora(rank=config["r"], alpha=config["lora_alpha"], targets=cast(Any, tuple(sorted(targets))))


def base_of(directory: Path) -> Path:
    """Returns the directory of the base model that a LoRA adapter's config names. Raises ConfigError if the model is
    not found.
    """
    base_missing = f"{directory}: the model that it was trained on is not found"
    with refusing(lambda error: f"{base_missing} ({error}); name it by --model", *_ODD):
        return hf_model.local_directory(read_object(directory / CONFIG)["base_model_name_or_path"])


def base_digest(path: str | Path) -> str:
    """Returns a digest that identifies the weight files in a model directory: a hash of the files' names and quick
    digests (run.file_checksums).
    """
    directory, base_hash = hf_model.local_directory(path), hashlib.sha256()
    # config.json is left out, because tools rewrite it (dtype, transformers version) without changing the weights
    for file in sorted({stored.file for stored in safetensors_headers.read_directory(directory).values()}):
        base_hash.update(f"{file.name} {quick_digest(file)}\n".encode())
    return base_hash.hexdigest()


def other_base(directory: Path, path: str | Path) -> str | None:
    """Returns an error sentence if the LoRA adapter in `directory` was trained on other weights than the model at
    `path`; otherwise returns None.
    """
    file = directory / BASE
    try:
        base_record = read_object(file)
        digest, trained_on = base_record["digest"], base_record["path"]
    except _ODD as error:
        return f"{file} cannot be read ({error!r}): the checkpoint is not one of adapters, or it is damaged"
    if digest == base_digest(path):
        return None
    return (
        f"{directory} was trained on {trained_on} as it was then (digest {digest[:16]}...), and the weights at {path} "
        "are others: an adapter means nothing without its base; set model.path to that model"
    )


def difference(directory: Path, lora: Lora | None, path: str | Path) -> str | None:
    """Returns an error sentence if a role cannot resume from a checkpoint, because the LoRA settings or the base models
    differ. Returns None if the role can resume.

    `directory`: path of the adapter in the checkpoint. It does not exist if the checkpoint holds a whole model.
    `lora`: the role's LoRA settings; None if the role trains the whole model.
    `path`: the role's base model.
    """
    if not directory.is_dir():
        return f"{directory.parent} holds a whole model, and the role trains adapters: leave lora out, or start anew"
    if lora is None:
        return f"{directory.parent} holds adapters alone, and the role trains a whole model: set lora as it was"
    saved = read_settings(directory)
    for key in ("rank", "alpha"):
        was, now = vars(saved)[key], vars(lora)[key]
        if was != now:
            return f"lora.{key} = {now}, and {directory} has {was}: set it to that, or start anew"
    if {*saved.targets} != {*lora.targets}:
        return f"lora.targets = {list(lora.targets)}, and {directory} has {list(saved.targets)}: set them to these"
    return other_base(directory, path)


def merged(
    tensors: Iterator[tuple[str, Tensor]], sizes: Sizes, lora: Lora, adapter: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, tensor) of the base model with the adapter merged: W + alpha / r B A, in W's dtype. A
    head that was trained with the adapter replaces the base model's head and is yielded last.
    """
    pairs = {}
    for layer in range(sizes.num_layers):
        for module in adapted(sizes, layer, lora):
            names = (_peft_name(layer, module, part) for part in PARTS)
            pairs[f"{HF_LAYER.format(layer)}{module.module}.weight"] = tuple(adapter[name].float() for name in names)
    scale, kind = lora.alpha / lora.rank, None
    for name, tensor in tensors:
        kind = tensor.dtype if name == EMBEDDING else kind
        if name == SCORE and HEAD in adapter:
            continue
        if name not in pairs:
            yield name, tensor
            continue
        a, b = pairs[name]
        merged_tensor, row = tensor.clone(), 0
        for part in blocks(merged_tensor):  # block by block, so that only one block at a time is converted to float32
            part.copy_(part.float() + scale * (b[row : row + len(part)] @ a))
            row += len(part)
        yield name, merged_tensor
    if HEAD in adapter:
        yield SCORE, adapter[HEAD].to(kind)


def _peft_name(layer: int, projection: Projection, part: str) -> str:
    """Returns peft's tensor name of a LoRA matrix."""
    return f"{_PREFIX}{HF_LAYER.format(layer)}{projection.module}.{PARTS[part]}.weight"


def _find(sizes: Sizes, name: str, rank: int = 1) -> tuple[Projection, Source, Partition]:
    """Returns (adapted projection, name and shape of peft's tensor, sharding over tensor-parallel ranks) of a LoRA
    matrix.

    `rank`: the LoRA rank r.

    Raises KeyError if the name does not belong to an adapter of the model.
    """
    parts = _NAME.fullmatch(name)
    layer, part = (int(parts[1]), parts[3]) if parts else (0, "")
    projection = next((p for p in projections(sizes, layer) if parts and p.name == parts[2]), None)
    if projection is None:
        raise KeyError(f"{name!r} is no parameter of an adapter of a {sizes.family} model")
    tensor = _peft_name(layer, projection, part)
    if part == "lora_a":
        return projection, Source(tensor, rank, projection.columns), ByColumns() if projection.inward else Whole()
    return projection, Source(tensor, projection.rows, rank), Whole() if projection.inward else ByRows()
