"""Reads the sizes and features of a model from its config.json, or by its public name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.base import ConfigError, read_object
from megatron_rl.models import registry
from megatron_rl.models.sizes import Features, Sizes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The name, the sizes and the features of a model."""

    name: str
    sizes: Sizes
    features: Features = Features()
    guessed: bool = False  # True if only words in a path say which public model this is

    @property
    def active(self) -> int:
        """Returns the number of experts per token; 0 for a dense model."""
        return self.features.experts_per_token


def read_shape(source: str) -> Shape:
    """Reads a model's shape. `source`: a model directory, a config.json, or the name of a public model
    (`Qwen/Qwen2.5-Math-7B`).

    A path that contains the words of a public model's name (`runs/sft_qwen2.5_math_7b/model`) is resolved to that model
    and marked `guessed`. Raises ConfigError if `source` is neither an existing file or directory nor the name of a
    known public model, or if the config.json is not supported.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        facts, name = read_object(file), file.parent.name if file.name == "config.json" else file.stem
        return Shape(name=name, sizes=registry.read(facts, str(file)), features=registry.features(facts, str(file)))
    public = registry.known()
    fits = [name for name in public if _words(name) <= _words(source)]
    if not fits:
        raise ConfigError(
            f"no config.json at {source}, and no public model of this name is known here ({', '.join(public)}): "
            "give its sizes with --shape ROLE=FILE (a config.json, or a directory with one) or --shape ROLE=NAME"
        )
    name = max(fits, key=len)
    guessed = source.count("/") > 1
    sizes, features = registry.read(public[name], name), registry.features(public[name], name)
    return Shape(name=name, sizes=sizes, features=features, guessed=guessed)


def _words(name: str) -> set[str]:
    """Splits a name into lower-case words: `Meta-Llama-3.1-8B-Instruct` gives {meta, llama, 3.1, 8b, instruct}."""
    return set(re.findall(r"\d+x\d+b|a?\d+(?:\.\d+)?b|\d+(?:\.\d+)?|[a-z]+", name.lower()))
