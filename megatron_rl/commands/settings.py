"""Parses the settings on a command line, YAML files followed by a.b=c overrides, into a config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs

SCHEMAS: dict[str, Any] = {
    "train": configs.TrainConfig,
    "sft": configs.SftConfig,
    "generate": configs.GenerateConfig,
    "eval": configs.EvalConfig,
}


def load(settings: Sequence[str], command: str | None = None) -> tuple[str, Any]:
    """Parses YAML files and overrides. Returns (name of the command that the settings are for, config of the command).

    If `command` is None, infers the command from the keys of the files. Raises ConfigError for a missing file, for keys
    that no command has, and for an invalid config.
    """
    files, overrides = split(settings)
    if command is None:
        keys = config_files.read_keys(files)
        command = next((n for n, s in SCHEMAS.items() if keys <= {f.name for f in dataclasses.fields(s)}), None)
        if command is None:
            listed = ", ".join(sorted(keys))
            raise configs.ConfigError(f"no command takes all of these keys: {listed}; name one with --command")
    return command, config_files.load(SCHEMAS[command], files, overrides)


def split(settings: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Splits settings into (YAML files, overrides). Raises ConfigError for a missing file."""
    # a path of an existing file with '=' in it, such as runs/lr=1e-3/config.yaml, is a file and not an override
    overrides = [s for s in settings if "=" in s and not os.path.isfile(s)]
    files = [Path(s) for s in settings if s not in overrides]
    missing = [str(f) for f in files if not f.exists()]
    if missing:
        raise configs.ConfigError(f"no such config file: {', '.join(missing)} (an override has the form a.b=c)")
    return files, overrides
