"""Reads the settings of a command line, YAML files and then a.b=c arguments, into a config."""

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
    """Returns the command that the settings are for (None: found from the files' keys), and the config.

    Raises ConfigError for a file that is not there, for keys that no command takes, and for a wrong config.
    """
    files, overrides = split(settings)
    command = command or _command_of(files)
    return command, config_files.load(SCHEMAS[command], files, overrides)


def split(settings: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Splits settings into files and overrides. Raises ConfigError for a file that is not there."""
    overrides = [s for s in settings if "=" in s and not os.path.isfile(s)]  # runs/lr=1e-3/config.yaml is a file
    files = [Path(s) for s in settings if s not in overrides]
    missing = [str(f) for f in files if not f.exists()]
    if missing:
        raise configs.ConfigError(f"no such config file: {', '.join(missing)} (an override has the form a.b=c)")
    return files, overrides


def positive(text: str) -> int:
    """Reads a whole number of 1 or more, as the type of an argument."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def _command_of(files: Sequence[Path]) -> str:
    """Returns the first command whose schema has all the files' keys. Raises ConfigError when there is none."""
    keys = config_files.read_keys(files)
    for name, schema in SCHEMAS.items():
        if keys <= {f.name for f in dataclasses.fields(schema)}:
            return name
    raise configs.ConfigError(f"no command takes all of these keys: {', '.join(sorted(keys))}; name one with --command")
