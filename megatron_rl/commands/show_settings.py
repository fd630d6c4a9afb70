"""`megatron-rl settings [PREFIX]`: lists settings with their defaults and descriptions."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from megatron_rl.commands.settings import SCHEMAS
from megatron_rl.config.base import ConfigError
from megatron_rl.config.describe import settings_of

WIDEST = 100  # maximum width of a description in columns, even if the terminal is wider


def run(args: argparse.Namespace) -> int:
    """Prints the settings of a command whose names begin with `args.prefix`. If there are none, prints the settings
    with names that contain the prefix.

    Returns 0. Raises ConfigError if no name contains the prefix."""
    rows = settings_of(SCHEMAS[args.schema], args.prefix)
    if not rows:
        raise ConfigError(f"no setting of {args.schema} has {args.prefix!r} in its name; without a word all are listed")
    width = min(WIDEST, shutil.get_terminal_size((80, 24)).columns)
    for setting, comment in rows:
        print(setting)
        for line in textwrap.wrap(comment, width - 4):
            print(f"    {line}")
    return 0
