"""Checkpoints as Hugging Face directories: conversion, contents and comparison. One parameter in memory at a time, no ranks, no GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.checkpoint import Checkpoints, damage
from megatron_rl.commands.common import copy_side_files
from megatron_rl.config import ConfigError
from megatron_rl.weights import hf
from megatron_rl.weights.dist_checkpoint import DistCheckpoint
from megatron_rl.weights.rectangles import hf_shapes
from megatron_rl.weights.sizes import Sizes

SHARD_BYTES = 4 * 10**9
SPARE = 1.02  # disk space wanted, of what the tensors take


@dataclass(frozen=True)
class Source:
    """Weights at rest: a Hugging Face directory, or one role of a run's checkpoint with the model directory that the role started from."""

    path: Path
    given_model: Path | None  # config.json and tokenizer; None: of a checkpoint, as the run's config says
    checkpoint: DistCheckpoint | None

    @property
    def model(self) -> Path:
        """The directory with config.json and tokenizer. Raises ConfigError when it is not to be found."""
        return self.given_model or _model_of(self.path)

    @property
    def sizes(self) -> Sizes:
        return Sizes.read(json.loads((self.model / "config.json").read_text(encoding="utf-8")), str(self.model / "config.json"))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor), one at a time."""
        return hf.read_tensors(self.path) if self.checkpoint is None else self.checkpoint.tensors(self.sizes)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """What is stored -> (shape, dtype): of a checkpoint under Megatron's names, optimizer included."""
        if self.checkpoint is not None:
            return {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in self.checkpoint.shapes.items()}
        out = {}
        for name, path in hf.tensor_files(self.path).items():
            with safe_open(path, "pt") as file:
                part = file.get_slice(name)
                out[name] = (tuple(part.get_shape()), str(part.get_dtype()))
        return out


def find(path: Path, *, role: str | None = None, model: Path | None = None) -> Source:
    """A run directory (its newest checkpoint), a checkpoint step_N, a role's directory in one, or a Hugging Face directory.

    `role` is needed where a checkpoint holds several; `model` where no run's config.yaml stands above. Raises ConfigError.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"no directory {path}")
    if (path / "config.json").is_file():
        return Source(path, path, None)
    if (path / "checkpoints").is_dir():
        newest = Checkpoints(path / "checkpoints").newest()
        if newest is None:
            raise ConfigError(f"{path / 'checkpoints'} holds no complete checkpoint")
        path = newest.path
    if not (path / ".metadata").is_file():
        if path.name.startswith("step_") and (wrong := damage(path)):
            raise ConfigError(f"{path} is not a complete checkpoint: {wrong}")
        roles = sorted(p.parent.name for p in path.glob("*/.metadata"))
        if role is None and len(roles) == 1:
            role = roles[0]
        if role is None or role not in roles:
            raise ConfigError(f"{path} holds {', '.join(roles) or 'no role'}: name one by --role" + (f", not {role!r}" if role else ""))
        path = path / role
    return Source(path, model, DistCheckpoint(path))


def _model_of(path: Path) -> Path:
    """The model directory that the run of a role's checkpoint directory started from, or the one that it wrote."""
    for parent in path.resolve().parents:
        config = parent / "config.yaml"
        if not config.is_file():
            continue
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        started = str((tree.get("roles", {}).get(path.name) or tree)["model"]["path"])
        for place in (Path(started), parent / "models" / path.name, parent / "model"):
            if (place / "config.json").is_file():
                return place
        try:
            return hf.local_directory(started)
        except OSError as error:
            raise ConfigError(f"{path}: the run started from {started}, which is not here ({error}); name it by --model") from error
    raise ConfigError(f"{path}: no run's config.yaml stands above it; give the model directory it started from by --model")


def to_hf(source: Source, target: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES, verify: bool = False) -> None:
    """Writes a Hugging Face directory with config and tokenizer, loadable as it stands; at first under another name, so that one
    that was cut short never looks complete. `verify` reads it back and compares bit for bit. Raises ConfigError when there is
    something at `target` already, too little disk space, or a tensor with numbers that are not finite."""
    if target.exists():
        raise ConfigError(f"{target} exists: remove it, or give another place")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _check_space(source, partial, dtype)
        _write(source, partial, dtype, shard_bytes)
        copy_side_files(source.model, partial)
        _set_dtype(partial / "config.json", dtype)
        if verify:
            _verify(source, partial, dtype)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_space(source: Source, place: Path, dtype: torch.dtype | None) -> None:
    elements = sum(rows * columns for rows, columns in hf_shapes(source.sizes).values())
    wanted = int(SPARE * elements * (dtype or torch.float32).itemsize)
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise ConfigError(f"{place.parent} has {free / 1e9:.1f} GB free, the model takes up to {wanted / 1e9:.1f} GB: choose another disk")


def _write(source: Source, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Shards of at most `shard_bytes` (a larger tensor goes alone), and their index when there are several."""
    shards: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal waiting, size
        save_file(waiting, folder / f"part-{len(shards):05d}.safetensors", metadata={"format": "pt"})
        shards.append([*waiting])
        waiting, size = {}, 0

    with Progress(transient=True) as progress:
        task = progress.add_task("tensors", total=len(hf_shapes(source.sizes)))
        for name, tensor in source.tensors():
            own = tensor if dtype is None else tensor.to(dtype)
            if not bool(torch.isfinite(own).all()):
                raise ConfigError(f"{source.path}: {name} holds numbers that are not finite: the checkpoint is of a run that failed")
            if waiting and size + own.nbytes > shard_bytes:
                flush()
            waiting[name] = own.contiguous()
            size, total = size + own.nbytes, total + own.nbytes
            progress.advance(task)
        flush()
    if len(shards) == 1:
        (folder / "part-00000.safetensors").rename(folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}.safetensors").rename(folder / file)
        index |= dict.fromkeys(names, file)
    whole = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _set_dtype(file: Path, dtype: torch.dtype | None) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _verify(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    files = hf.tensor_files(folder)
    names = set()
    for name, tensor in source.tensors():
        with safe_open(files[name], "pt") as file:
            if not torch.equal(file.get_tensor(name), tensor if dtype is None else tensor.to(dtype)):
                raise ConfigError(f"{folder}: {name} is not what was written: is the disk failing?")
        names.add(name)
    if names != files.keys() or names != hf_shapes(source.sizes).keys():
        raise ConfigError(f"{folder}: other tensors than the model's: {sorted(names ^ hf_shapes(source.sizes).keys())[:5]}")


def compare(first: Source, second: Source) -> list[dict[str, Any]]:
    """A row per tensor: name, equal (bit for bit), relative = |a - b| / |a| (Frobenius), largest |a - b|.

    Raises ConfigError when names or shapes differ.
    """
    other = dict(second.tensors()) if second.checkpoint is not None else None
    files = {} if other is not None else hf.tensor_files(second.path)
    rows, names = [], set()
    for name, a in first.tensors():
        names.add(name)
        if name not in (files if other is None else other):
            raise ConfigError(f"{second.path} has no tensor {name}, which {first.path} has")
        if other is not None:
            b = other[name]
        else:
            with safe_open(files[name], "pt") as file:
                b = file.get_tensor(name)
        if a.shape != b.shape:
            raise ConfigError(f"{name} is {tuple(a.shape)} in {first.path} and {tuple(b.shape)} in {second.path}")
        gap = (a.double() - b.double()).abs()
        norm = float(a.double().norm())
        relative = float(gap.norm()) / (norm or 1.0)
        rows.append({"name": name, "equal": torch.equal(a, b), "relative": relative, "largest": float(gap.max())})
    left = sorted((files if other is None else other).keys() - names)
    if left:
        raise ConfigError(f"{first.path} has no tensor {left[0]}, which {second.path} has")
    return rows
