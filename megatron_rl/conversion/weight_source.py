"""Finds weights by path: a Hugging Face directory, one role of a checkpoint with its model directory, or a LoRA adapter
with its base model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from megatron_rl.config.base import ConfigError, read_object, refusing
from megatron_rl.config.files import read_yaml
from megatron_rl.config.model import Head
from megatron_rl.models import registry
from megatron_rl.models.blocks import SCORE
from megatron_rl.models.lora_targets import CONFIG, WEIGHTS
from megatron_rl.models.sizes import Sizes
from megatron_rl.run.checkpoint import Checkpoints, damage, known_digests
from megatron_rl.run.file_checksums import refuse, wrong, wrong_of
from megatron_rl.weights import hf_model, lora_adapters, safetensors_headers
from megatron_rl.weights.dist_checkpoint import DistCheckpoint, has_head


@dataclass(frozen=True)
class WeightSource:
    """Weights on disk: a Hugging Face directory, an adapter with its base model, or one role of a checkpoint together
    with the directory of the model that the role was initialized from."""

    path: Path
    given_model: Path | None  # directory with config.json and tokenizer; None: looked up in the run's config.yaml
    checkpoint: DistCheckpoint | None  # None for a Hugging Face directory
    adapter: Path | None = None  # directory of an adapter that is merged into the weights at `path`

    @property
    def model(self) -> Path:
        """Returns the directory with config.json and tokenizer. Raises ConfigError if the directory is not found."""
        return self.given_model or _model_of(self.path)

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of the model, such as the number of layers. Raises ConfigError if config.json is missing,
        is damaged, or describes an unknown architecture."""
        return read_sizes(self.model).with_head(self.head)

    @property
    def head(self) -> Head | None:
        """Returns what the model's head computes, or None if the weights are those of a language model.

        Whether there is a head follows from the tensors. What the head computes follows from the run's config.yaml, or
        else from the model's config.json. If neither file says it, the result is "value".
        """
        if self.checkpoint is not None:
            headed = bool(has_head(self.checkpoint))
        elif self.adapter is not None:
            headed = lora_adapters.HEAD in safetensors_headers.read_file(self.adapter / WEIGHTS)
        else:
            headed = SCORE in self.shapes()
        if not headed:
            return None
        scores = [
            name for name in read_object(self.model / "config.json").get("architectures") or () if "Sequence" in name
        ]
        stated_head = _settings_of(self.adapter.parent if self.adapter else self.path).get("head")
        return stated_head if stated_head in get_args(Head) else "score" if scores else "value"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor), loading one tensor at a time. If there is an adapter, it is merged
        into the tensors."""
        if self.checkpoint is not None:
            return self.checkpoint.tensors(self.sizes)
        base = hf_model.read_tensors(self.path)
        if self.adapter is None:
            return base
        settings = lora_adapters.read_settings(self.adapter)
        return lora_adapters.merged(base, self.sizes, settings, lora_adapters.read(self.adapter, self.sizes, settings))

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns {name: (shape, dtype)} of every stored tensor. For a checkpoint, the names are Megatron's and include
        the optimizer state."""
        if self.checkpoint is not None:
            stored_shapes = self.checkpoint.shapes.items()
            return {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in stored_shapes}
        stored = safetensors_headers.read_directory(self.path).items()
        return {name: (entry.shape, entry.dtype) for name, entry in stored}


def read_sizes(model: Path) -> Sizes:
    """Reads the sizes of a model, such as the number of layers, from the model directory's config.json.

    Raises ConfigError if config.json is missing, is damaged, or describes an unknown architecture.
    """
    file = model / "config.json"
    return registry.read(read_object(file), str(file))


def find(path: Path, *, role: str | None = None, model: Path | None = None, trust: bool = False) -> WeightSource:
    """Finds the weights at a path.

    `path`: a run directory (its newest checkpoint is used), a checkpoint iteration_N, a role's directory in a
    checkpoint, an adapter's directory, or a Hugging Face directory.
    `role`: the name of the role, required if a checkpoint holds several roles.
    `model`: the directory with config.json and tokenizer of a checkpoint's model. Required if no parent directory of
    the checkpoint has a run's config.yaml.
    `trust`: whether the pickled parts of a checkpoint may run code when they are loaded.

    Raises ConfigError if no weights are found, if the role is missing or ambiguous, or if files do not match their
    recorded checksums.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"no directory {path}")
    if (path / ".metadata").is_file():
        return _checkpoint(path, model, trust)
    if (path / CONFIG).is_file():
        return _adapted(path, model or lora_adapters.base_of(path))
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")) and not (path / safetensors_headers.INDEX).is_file():
            pickled = "; pytorch_model.bin is not read: save it as safetensors" if any(path.glob("*.bin")) else ""
            raise ConfigError(f"{path} has a config.json and no *.safetensors: the weights are missing{pickled}")
        refuse(wrong_of(path))
        return WeightSource(path, path, None)
    path = iteration_directory(path)
    names = roles(path)
    if role is None and len(names) == 1:
        role = names[0]
    if not names:
        raise ConfigError(
            f"{path} holds neither config.json with *.safetensors nor a checkpoint (.metadata): "
            "give a model directory or a run"
        )
    if role is None or role not in names:
        raise ConfigError(f"{path} holds {', '.join(names)}: name one by --role" + (f", not {role!r}" if role else ""))
    return _checkpoint(path / role, model, trust)


def _checkpoint(path: Path, model: Path | None, trust: bool) -> WeightSource:
    """Returns the weights in one role's directory of a checkpoint. First checks the files against the checksums that
    the run recorded, and raises ConfigError if a file differs."""
    digests = {name: value for name, value in known_digests(path.parent).items() if name.startswith(f"{path.name}/")}
    refuse(wrong(path.parent, digests))
    if (path / lora_adapters.DIRECTORY).is_dir():
        return _adapted(path / lora_adapters.DIRECTORY, model or _model_of(path))
    return WeightSource(path, model, DistCheckpoint(path, trust=trust))


def _adapted(path: Path, base: Path) -> WeightSource:
    """Returns the weights of the base model `base` with the adapter at `path` merged. Raises ConfigError if the adapter
    was trained on a different model."""
    refuse(wrong_of(base))
    if (path / lora_adapters.BASE).is_file() and (mismatch := lora_adapters.other_base(path, base)):
        raise ConfigError(mismatch)
    return WeightSource(base, base, None, path)


def iteration_directory(path: Path) -> Path:
    """Returns the newest checkpoint of a run directory; any other path is returned unchanged.

    Raises ConfigError if the run directory has no complete checkpoint (a checkpoint with all its files), or if `path`
    is a checkpoint with missing or damaged files.
    """
    if (path / "checkpoints").is_dir():
        newest = Checkpoints(path / "checkpoints").newest()
        if newest is None:
            raise ConfigError(f"{path / 'checkpoints'} holds no complete checkpoint")
        return newest.path
    if path.name.startswith("iteration_") and (wrong := damage(path)):
        raise ConfigError(f"{path} is not a complete checkpoint: {wrong}")
    return path


def roles(step: Path) -> list[str]:
    """Returns the sorted names of the roles whose weights are in the checkpoint directory `step`."""
    return sorted(file.parent.name for file in step.glob("*/.metadata"))


def _settings_of(path: Path) -> Any:
    """Returns the settings of a checkpoint's role in the run's config.yaml, or for SFT the settings of the run. Returns
    an empty dict if no parent directory of `path` contains a config.yaml."""
    config = _config_of(path)
    tree = {} if config is None else read_yaml(config)
    return tree.get("roles", {}).get(path.name) or tree


def _config_of(path: Path) -> Path | None:
    """Returns the config.yaml of the run to which `path` belongs, or None if no parent directory has one."""
    return next((file for parent in path.resolve().parents if (file := parent / "config.yaml").is_file()), None)


def _model_of(path: Path) -> Path:
    """Returns the directory with config.json and tokenizer for a role's checkpoint: the checkpoint itself if it has a
    config.json, otherwise the model from which the run started or the model that the run exported.

    Raises ConfigError if none of these directories is found.
    """
    if (path / "config.json").is_file():
        return path
    config = _config_of(path)
    if config is None:
        raise ConfigError(
            f"{path}: no run's config.yaml stands above it; give the model directory it started from by --model"
        )
    lacks = f"{config} names no model of {path.name}"
    with refusing(lambda error: f"{lacks} ({error!r}): name it by --model", AttributeError, KeyError, TypeError):
        started = str(_settings_of(path)["model"]["path"])
    for place in (Path(started), config.parent / "models" / path.name, config.parent / "model"):
        if (place / "config.json").is_file():
            return place
    gone = f"{path}: the run started from {started}, which is not here"
    with refusing(lambda error: f"{gone} ({error}); name it by --model", OSError):
        return hf_model.local_directory(started)
