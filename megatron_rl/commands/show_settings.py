"""`megatron-rl settings [PREFIX | --all]`: lists settings with their defaults and descriptions."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from megatron_rl.commands.settings import COMMON, SCHEMAS
from megatron_rl.config.base import ConfigError
from megatron_rl.config.describe import settings_of

WIDEST = 100  # maximum width of a description in columns, even if the terminal is wider


def run(args: argparse.Namespace) -> int:
    """Prints the settings of a command that `settings_of` finds for the prefix or words in `args.prefix`. Without a
    prefix, prints the settings of COMMON, or all settings if `args.all` is True.

    Returns 0. Raises ConfigError if there are none."""
    rows = settings_of(SCHEMAS[args.schema], args.prefix)
    brief = not args.prefix and not args.all
    total = len(rows)
    if brief:
        first = {text.partition(" = ")[0]: (text, comment) for text, comment in reversed(rows)}
        rows = [row for name, row in reversed(first.items()) if name in COMMON[args.schema]]
    if not rows:
        raise ConfigError(
            f"no setting of {args.schema} has {args.prefix!r} in its name or its description, and no setting of TRL or "
            "verl that is known here in its name; without a word all are listed"
        )
    width = min(WIDEST, shutil.get_terminal_size((80, 24)).columns)
    for setting, comment in rows:
        print(setting)
        for line in textwrap.wrap(comment, width - 4):
            print(f"    {line}")
    if brief:
        command = "" if args.schema == "train" else f" --command {args.schema}"
        print(
            f"\nThese are the settings that most configs set. All {total} settings: megatron-rl settings --all{command}"
        )
    return 0
