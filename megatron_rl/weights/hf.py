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

FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True)
class Architecture:
    """A dense decoder of the Qwen2 / Qwen3 / Llama family, in Hugging Face's terms."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool  # output weights are the embedding
    qkv_bias: bool
    qk_norm: bool
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
    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))


def read_architecture(directory: str | Path) -> Architecture:
    """Reads config.json. Raises ConfigError for a family that is not supported, with the ones that are."""
    config = AutoConfig.from_pretrained(local_directory(directory))
    family = config.model_type
    if family not in FAMILIES:
        raise ConfigError(f"{directory}: model_type {family!r} is not supported; the dense families {', '.join(FAMILIES)} are")
    if getattr(config, "use_sliding_window", False):  # noqa: B009 - absent in Llama configs
        raise ConfigError(f"{directory}: use_sliding_window = true is not supported; set it to false in config.json")
    for key, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if getattr(config, key, wanted) != wanted:
            raise ConfigError(f"{directory}: {key} = {getattr(config, key)!r} is not supported, only {wanted!r} is")
    theta = config.rope_parameters["rope_theta"] if hasattr(config, "rope_parameters") else config.rope_theta
    head_dim = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    return Architecture(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(theta),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        config=config,
    )


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
    """The tensors of a directory by name, each read when it is asked for: `Tensors(path)[name]`."""

    def __init__(self, directory: str | Path) -> None:
        self._files = tensor_files(directory)
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise KeyError(f"no tensor {name!r} among the {len(self._files)} of {next(iter(self._files.values())).parent}")
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt").__enter__()
        return self._open[path].get_tensor(name)


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
