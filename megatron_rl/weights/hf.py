"""Reading a Hugging Face model directory: the few facts the trainer and the engines need, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_rl.config import ConfigError
from megatron_rl.weights.rectangles import Rect
from megatron_rl.weights.sizes import Sizes

ACTOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral")  # proved by tests/test_parity.py


@dataclass(frozen=True, kw_only=True)
class Architecture(Sizes):
    """A model directory's sizes, and what its arithmetic needs besides."""

    norm_eps: float
    rope_theta: float
    config: PretrainedConfig

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, head_dim] (float32) of integer positions [N], with the scaling the config asks for."""
        rotary = LlamaRotaryEmbedding(self.config)
        angles = positions.float()[:, None] * rotary.inv_freq.to(positions.device)[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


def local_directory(path: str | Path) -> Path:
    """The model directory itself, or that of a Hugging Face Hub name, downloaded once to the hub's cache.

    Raises FileNotFoundError for a path that looks local and is not there.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1:
        raise FileNotFoundError(f"no model directory {path}: give a local Hugging Face directory or a hub name like Qwen/Qwen2.5-7B")
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise FileNotFoundError(f"there is no directory {path} here, and no such model could be had from the hub: {error}") from error


def read_architecture(directory: str | Path) -> Architecture:
    """Reads config.json. Raises ConfigError for a model that the actor cannot run, with the value it stumbles over."""
    config = AutoConfig.from_pretrained(local_directory(directory))
    if config.model_type not in ACTOR_FAMILIES:
        raise ConfigError(f"{directory}: model_type {config.model_type!r} is not supported; {', '.join(ACTOR_FAMILIES)} are")
    sizes = Sizes.read(config.to_dict(), str(directory))
    theta = config.rope_parameters["rope_theta"] if hasattr(config, "rope_parameters") else config.rope_theta
    return Architecture(**vars(sizes), norm_eps=config.rms_norm_eps, rope_theta=float(theta), config=config)


def tensor_files(directory: str | Path) -> dict[str, Path]:
    """Tensor name -> safetensors file. Raises FileNotFoundError naming what is missing."""
    directory = local_directory(directory)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = directory / "model.safetensors"
    if not single.exists():
        raise FileNotFoundError(f"{directory} holds no model.safetensors: give a downloaded model directory, or set model.init to random")
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


class Tensors:
    """The tensors of a directory, of which only what is asked for is read."""

    def __init__(self, directory: str | Path) -> None:
        self._files = tensor_files(directory)
        self._open: dict[Path, Any] = {}

    def read(self, rect: Rect) -> Tensor:
        """One rectangle of one tensor, [rows, columns], or [rows] of a 1-D tensor. Raises ConfigError when it is not there."""
        if rect.tensor not in self._files:
            raise ConfigError(f"{next(iter(self._files.values())).parent} holds no tensor {rect.tensor!r}: the directory is not complete")
        path = self._files[rect.tensor]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt").__enter__()
        part = self._open[path].get_slice(rect.tensor)
        shape = part.get_shape()
        if rect.row + rect.rows > shape[0] or (len(shape) > 1 and rect.column + rect.columns > shape[1]):
            raise ConfigError(f"{path}: {rect.tensor} is {shape}, too small for what config.json says")
        if rect.rows == shape[0] and (len(shape) == 1 or rect.columns == shape[1]):
            return self._open[path].get_tensor(rect.tensor)
        rows = slice(rect.row, rect.row + rect.rows)
        return part[rows] if len(shape) == 1 else part[rows, rect.column : rect.column + rect.columns]


def read_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the directory under its name, one at a time."""
    by_file: dict[Path, list[str]] = {}
    for name, path in tensor_files(directory).items():
        by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, "pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def write_tensors(directory: str | Path, tensors: dict[str, Tensor]) -> None:
    """Writes model.safetensors in one atomic step."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "model.safetensors.partial"
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")


def eos_tokens(directory: str | Path, arch: Architecture) -> frozenset[int]:
    """Every token id that ends a sequence: the config's and the generation config's."""
    ids: set[int] = set()
    generation = Path(directory) / "generation_config.json"
    sources = [arch.config.eos_token_id]
    if generation.exists():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    for source in sources:
        ids |= set(source) if isinstance(source, (list, tuple)) else set() if source is None else {source}
    return frozenset(ids)
