"""Checks the model files on this machine for `megatron-rl check --deep`, as a command does when it starts."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.model import Model
from megatron_rl.spec.run_spec import Spec
from megatron_rl.weights import hf_model, lora_adapters


def check_models(spec: Spec) -> None:
    """Checks the models on this machine. Raises ConfigError if a model's weights do not match its config.json, or if a
    LoRA adapter does not match the settings."""
    models = [(role.model, role.lora) for role in spec.roles.values() if role.endpoint is None]
    juniors = [role.tandem.junior for role in spec.roles.values() if role.tandem is not None]
    models += [(Model(path=path), None) for path in juniors if path is not None]
    for model, lora in models:
        if Path(model.path).is_dir() and model.init == "pretrained":
            sizes = hf_model.read_architecture(model.path)
            hf_model.check(model.path, sizes, cast=True)
            if lora is not None and lora.path is not None:
                lora_adapters.read(lora.path, sizes, lora)
