"""Converts between checkpoints and Hugging Face directories, one parameter at a time, without distributed ranks or
GPU."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from megatron_rl.config.base import ConfigError, read_object, refusing
from megatron_rl.config.model import Model
from megatron_rl.conversion.dist_writer import FILE_BYTES, DistWriter
from megatron_rl.conversion.weight_source import WeightSource
from megatron_rl.models.blocks import EMBEDDING
from megatron_rl.models.sizes import Sizes
from megatron_rl.run.file_checksums import write_sums
from megatron_rl.session.output_directory import copy_side_files, describe_head, fresh
from megatron_rl.spec.model_gate import LoadedModel, check_model
from megatron_rl.weights import hf_model, tensor_copies
from megatron_rl.weights.dist_checkpoint import DistCheckpoint, whole_names
from megatron_rl.weights.dist_names import counts, extra_states, spellings
from megatron_rl.weights.hf_writer import SHARD_BYTES, HfWriter, Planned, plan_tensors
from megatron_rl.weights.parameter_mapping import WHOLE, hf_shapes, kept_float32, megatron
from megatron_rl.weights.safetensors_headers import read_directory

# JSON files of a checkpoint directory that do not belong to the config or tokenizer, and are not copied with them
OF_CHECKPOINTS = ("metadata.json", "COMPLETE.json", "state.json")
EMPTY = [None]  # value that Megatron-core saves for a module without extra state
LOGITS = 1e-3  # tolerance for float32 logits: largest difference relative to the largest logit
MERGED = 1e-5  # tolerance for merged float32 weights: largest difference relative to a tensor's largest element


def to_hf(
    source: WeightSource,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
) -> str:
    """Writes a Hugging Face directory with weights, config and tokenizer, ready to be loaded by transformers.

    `dtype`: the dtype to which the weights are cast; None keeps the stored dtype.
    `shard_bytes`: the maximum size of a weight file.
    `verify`: whether to read the written weights back and compare them bit for bit. If the source is a checkpoint, its
    logits in Megatron are also compared with the logits of the written model in transformers. If the source is an
    adapter, the merged weights are also compared with weights merged by peft.

    Returns a sentence with the result of the logits or peft comparison, or with the reason why the comparison was
    skipped. Returns "" without `verify`.

    Raises ConfigError if `target` exists, if there is too little disk space, if a tensor has non-finite values, or if a
    comparison fails.
    """
    sizes = source.sizes
    _check_model(source, cast=dtype is not None)
    planned, comparison = _planned(source, sizes, dtype), ""
    with fresh(target, wanted_bytes=sum(t.nbytes for t in planned)) as folder:
        steps = track(source.tensors(), description="tensors", total=len(planned), transient=True)
        kept, lacks = kept_float32(sizes), "which the model's config.json asks for"
        cast = ((name, tensor if dtype is None or name in kept else tensor.to(dtype)) for name, tensor in steps)
        with refusing(lambda error: f"{source.path} holds no {error.args[0]}, {lacks}", KeyError):
            HfWriter(folder, planned, shard_bytes=shard_bytes).write_all(
                (name, _finite(source, name, tensor)) for name, tensor in cast
            )
        copy_side_files(source.model, folder, keep=OF_CHECKPOINTS)
        _set_dtype(folder / "config.json", dtype)
        describe_head(folder, sizes.head)
        write_sums(folder)
        if verify:
            _verify(source, hf_model.DirectoryTensors(folder), dtype)
            compare = _compare_logits if source.adapter is None else _compare_merged
            comparison = compare(source, sizes, folder, exact=dtype is None)
    return comparison


def to_megatron(
    source: WeightSource,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    verify: bool = False,
) -> None:
    """Writes a Hugging Face directory as a Megatron distributed checkpoint, together with its config and tokenizer.

    The checkpoint has no optimizer state. Megatron-core can load the checkpoint under any layout. Raises ConfigError if
    `source` is not a Hugging Face directory, if `target` exists, if there is too little disk space, if a tensor has
    non-finite values, or if a comparison fails.
    """
    if source.checkpoint is not None:
        raise ConfigError(f"{source.path} is a checkpoint already: give a Hugging Face directory")
    if source.adapter is not None:
        raise ConfigError(f"{source.adapter} is an adapter: merge it by to-hf first, and give what that writes")
    sizes = source.sizes
    _check_model(source, cast=dtype is not None)
    tensors, names = hf_model.DirectoryTensors(source.path), whole_names(sizes)
    dtypes = (hf_model.DTYPES[stored.dtype] for stored in tensors.stored.values())
    num_bytes = sum(math.prod(shape) for shape in hf_shapes(sizes).values()) * (dtype or next(dtypes)).itemsize
    with fresh(target, wanted_bytes=num_bytes) as folder, DistWriter(folder, file_bytes=file_bytes) as writer:
        copy_side_files(source.path, folder, keep=OF_CHECKPOINTS)
        _set_dtype(folder / "config.json", dtype)
        for name in track(names, description="parameters", transient=True):
            parameter = _parameter(source, sizes, tensors, name, dtype)
            for place in spellings(sizes, name):
                offsets = (*place.at, *(0,) * parameter.dim())
                writer.add(
                    place.key, (*counts(sizes, place), *parameter.shape), offsets, parameter[(None,) * len(place.at)]
                )
        empty = io.BytesIO()  # an empty extra state, as written by Megatron-core
        torch.save(EMPTY, empty)
        for key in extra_states(sizes):
            writer.add_bytes(key, empty.getvalue())
        writer.finish({})
        if verify:
            _verify(WeightSource(folder, folder, DistCheckpoint(folder)), tensors, None, cast=dtype)


def _check_model(source: WeightSource, *, cast: bool) -> None:
    """Raises ConfigError if the model directory of `source` is not one that other commands would load. `cast`: whether
    the tensors are cast to one dtype."""
    model = LoadedModel(
        model=Model(path=str(source.model)), head=source.head, trained=True, has_weights=source.checkpoint is None
    )
    check_model(model, cast=cast)


def _planned(source: WeightSource, sizes: Sizes, dtype: torch.dtype | None) -> list[Planned]:
    """Returns name, shape and dtype of the tensors to write, in the order in which `source` yields them."""
    kept = kept_float32(sizes)
    if source.checkpoint is not None:
        common = dtype or source.checkpoint.dtype(whole_names(sizes)[0])
        of = {name: source.checkpoint.dtype(name) if name in kept else common for name in whole_names(sizes)}
        names = {rect.tensor: kind for name, kind in of.items() for rect in megatron(sizes, name, WHOLE)[1]}
    else:
        stored = read_directory(source.path)
        # the head of an adapter has the dtype of the base model
        dtypes = {name: hf_model.DTYPES[stored.get(name, stored[EMBEDDING]).dtype] for name in hf_shapes(sizes)}
        names = {name: kind if dtype is None or name in kept else dtype for name, kind in dtypes.items()}
    return plan_tensors(sizes, names)


def _parameter(
    source: WeightSource, sizes: Sizes, tensors: hf_model.DirectoryTensors, name: str, dtype: torch.dtype | None
) -> Tensor:
    """Returns one whole Megatron parameter, built from Hugging Face tensors, without vocabulary padding. Raises
    ConfigError if the parameter has non-finite values."""
    (rows, columns), rects = megatron(sizes, name, WHOLE)
    for tensor in dict.fromkeys(rect.tensor for rect in rects):
        _finite(source, tensor, tensors.whole(tensor))
    first = tensors.whole(rects[0].tensor)
    kind = first.dtype if dtype is None or name in kept_float32(sizes) else dtype
    parameter = torch.empty((rows, columns) if first.dim() > 1 else (rows,), dtype=kind)
    tensor_copies.fill(parameter, rects, tensors.read)
    return parameter


def _finite(source: WeightSource, name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor. Raises ConfigError if it has values that are not finite."""
    if not tensor_copies.all_finite(tensor):
        file = source.path if source.checkpoint is not None else hf_model.tensor_files(source.path)[name]
        raise ConfigError(f"{file}: {name} holds numbers that are not finite: its run failed, or the file is damaged")
    return tensor


def _set_dtype(file: Path, dtype: torch.dtype | None) -> None:
    """Sets the dtype in a config.json to `dtype`. If `dtype` is None, the weights were not cast and the file is
    unchanged."""
    config = read_object(file)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _verify(
    source: WeightSource,
    reference: hf_model.DirectoryTensors,
    dtype: torch.dtype | None,
    *,
    cast: torch.dtype | None = None,
) -> None:
    """Compares every tensor of `source` with the tensor of the same name in `reference`, bit for bit.

    `dtype`: the dtype to which the tensors of `source` are cast before the comparison. None: they are not cast.
    `cast`: the dtype to which the tensors of `reference` are cast before the comparison. None: they are not cast.

    Raises ConfigError if a tensor differs or is missing.
    """
    expected, names, kept = hf_shapes(source.sizes).keys(), set(), kept_float32(source.sizes)
    for name, tensor in track(source.tensors(), description="verify", total=len(expected), transient=True):
        if name not in expected:
            continue
        a, b = tensor, reference.whole(name)
        if name not in kept:
            a, b = a if dtype is None else a.to(dtype), b if cast is None else b.to(cast)
        if a.dtype != b.dtype or not torch.equal(a, b):
            raise ConfigError(f"{name} does not read back as it was written: is the disk failing?")
        names.add(name)
    if names != expected:
        raise ConfigError(f"the tensors written are not the model's: {sorted(names ^ expected)[:5]} differ")


def _compare_logits(source: WeightSource, sizes: Sizes, folder: Path, *, exact: bool) -> str:
    """Compares the logits of the Megatron model with the logits of transformers for the same weights, and returns a
    sentence with the result.

    `exact`: whether to raise ConfigError for a difference above the tolerance LOGITS. `exact` is False for a cast
    model, whose difference is only reported.
    """
    if source.checkpoint is None:
        return "logits not compared: the source is no checkpoint"
    from megatron_rl.conversion import parity  # imported late: parity imports Megatron-core

    if why := parity.obstacle(sizes):
        return f"logits not compared: {why}"
    gap, largest = parity.logits_gap(source.path, folder, sizes.head)
    if exact and not gap <= LOGITS * largest:
        raise ConfigError(
            f"{source.path}: its Megatron model's logits differ from those of transformers by {gap:.2e}; "
            f"the largest logit is {largest:.2e}"
        )
    return f"logits differ from those of transformers by {gap:.1e} at most, of {largest:.1e}"


def _compare_merged(source: WeightSource, sizes: Sizes, folder: Path, *, exact: bool) -> str:
    """Compares every merged tensor with the same tensor as merged by peft from the same base model and adapter, and
    returns a sentence with the result.

    `exact`: whether to raise ConfigError for a difference beyond rounding. `exact` is False for a cast model, whose
    difference is only reported.
    """
    if importlib.util.find_spec("peft") is None:
        return "not compared with peft, which is not installed"
    from megatron_rl.conversion import parity  # imported late: parity imports Megatron-core

    if why := parity.obstacle(sizes):
        return f"not compared with peft: {why}"
    assert source.adapter is not None
    theirs, most = parity.merged_by_peft(source.path, source.adapter, sizes), 0.0
    ours = hf_model.DirectoryTensors(folder)
    for name in ours.stored:
        merged = ours.whole(name)
        gap, largest = float((merged.float() - theirs[name]).abs().max()), float(theirs[name].abs().max())
        if exact and not gap <= max(MERGED, 2 * torch.finfo(merged.dtype).eps) * largest:
            raise ConfigError(
                f"{name} differs from what peft makes of {source.adapter} when it loads it by {gap:.2e}; its largest "
                f"number is {largest:.2e}: the adapter is no plain LoRA adapter"
            )
        most = max(most, gap)
    return f"peft's merged weights differ by {most:.1e} at most"
