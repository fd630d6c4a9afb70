"""Parses the settings on a command line, YAML files followed by a.b=c overrides, into a config."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs

METAVAR = "CONFIG.yaml | a.b=c"
SCHEMAS: dict[str, Any] = {
    "train": configs.TrainConfig,
    "sft": configs.SftConfig,
    "generate": configs.GenerateConfig,
    "eval": configs.EvalConfig,
}


def load(settings: Sequence[str], command: str | None = None) -> tuple[str, Any]:
    """Parses YAML files and overrides. Returns (name of the command that the settings are for, config of the command).

    If `command` is None, it is inferred from the keys of the files. Raises ConfigError for a missing file, for keys
    that no command has, and for an invalid config.
    """
    files, overrides = split(settings)
    command = command or _command_of(files)
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


def positive(text: str) -> int:
    """Parses an integer of at least 1. For use as the `type` of an argparse argument."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def _command_of(files: Sequence[Path]) -> str:
    """Returns the name of the first command whose config schema has all top-level keys of the files. Raises ConfigError
    if no command has them."""
    keys = config_files.read_keys(files)
    for name, schema in SCHEMAS.items():
        if keys <= {f.name for f in dataclasses.fields(schema)}:
            return name
    raise configs.ConfigError(f"no command takes all of these keys: {', '.join(sorted(keys))}; name one with --command")
