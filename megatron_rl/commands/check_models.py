"""Compares the files of models on this machine for `megatron-rl check --deep`, as a command does when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import EvalConfig, GenerateConfig, Lora, Model, SftConfig, TrainConfig
from megatron_rl.weights import adapters, hf


def check_models(config: Any) -> None:
    """Raises ConfigError for weights that are not those of the config.json beside them, and for an adapter that is not
    the settings'."""
    for model, lora in _models(config):
        if Path(model.path).is_dir() and model.init == "pretrained":
            sizes = hf.read_architecture(model.path)
            hf.check(model.path, sizes, cast=True)
            if lora is not None and lora.path is not None:
                adapters.read(lora.path, sizes, lora)


def _models(config: Any) -> Iterator[tuple[Model, Lora | None]]:
    """Yields every model whose weights the command reads, with its adapter."""
    if isinstance(config, SftConfig):
        yield config.model, config.lora
    elif isinstance(config, TrainConfig):
        for role in config.roles.values():
            if role.endpoint is None and role.same_as is None:
                yield role.model, role.lora
            if role.tandem is not None and role.tandem.junior is not None:
                yield Model(path=role.tandem.junior), None
    elif isinstance(config, EvalConfig | GenerateConfig):
        yield config.model, None
