"""Refuses models whose weights are not those whose checksums stand beside them, for every command that reads models.

Light: every supervisor of a server imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.model import Model, TandemConfig
from megatron_rl.run.sums import refuse, wrong_of


def refuse_damaged_models(config: Any) -> None:
    """Reads the weights of all model directories that a config, or a part of one, names and that have a SHA256SUMS.

    Raises ConfigError with the first file that differs.
    """
    for directory in dict.fromkeys(model_directories(config)):
        refuse(wrong_of(directory))


def model_directories(config: Any) -> Iterator[Path]:
    """Yields the directory of every model that stands anywhere in a config. A name on the hub is none."""
    if isinstance(config, Model):
        named = [config.path]
    elif isinstance(config, TandemConfig):
        named = [config.junior or ""]
    else:
        named = []
    yield from (Path(name) for name in named if name and Path(name).is_dir())
    if is_dataclass(config):
        parts: Any = [getattr(config, each.name) for each in fields(config)]
    else:
        parts = config.values() if isinstance(config, Mapping) else config if isinstance(config, (list, tuple)) else []
    for part in parts:
        yield from model_directories(part)
