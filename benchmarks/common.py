"""What every benchmark shares: its options, the table it prints, the JSON file it writes and the bars it is held to."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --check."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, the bars and the machine to FILE")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a figure is under its bar")


def finish(figures: Mapping[str, float], bars: Mapping[str, float], args: argparse.Namespace) -> None:
    """Prints the table, writes the JSON file, and with --check exits 1 when a figure is under its bar.

    `bars` holds the least acceptable value of the figures that have one. Raises KeyError for a bar without a figure.
    """
    table = Table(title=Path(sys.argv[0]).name, title_justify="left")
    for column in ("figure", "value", "bar", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, value in figures.items():
        verdict = "" if name not in bars else "ok" if value >= bars[name] else "MISSED"
        table.add_row(name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}", f"{bars[name]:g}" if name in bars else "", verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    missed = [name for name, bar in bars.items() if not figures[name] >= bar]
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"figures": dict(figures), "bars": dict(bars), "missed": missed, "machine": machine()}, indent=2) + "\n"
        )
    if args.check and missed:
        sys.exit(1)


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
