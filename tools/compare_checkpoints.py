#!/usr/bin/env python3
"""Compares two models tensor by tensor, bit for bit and by norm; each is a checkpoint or a Hugging Face directory.

    python tools/compare_checkpoints.py runs/demo runs/demo/models/generator --role generator

Exit status: 0 the same to the last bit, 1 not, 2 they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.commands.arguments import Families
from megatron_rl.commands.parser import add_arguments
from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion.compare import compare
from megatron_rl.conversion.weight_source import find
from megatron_rl.models import registry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "first", type=Path, help="a run directory (its newest checkpoint), a checkpoint, or a Hugging Face directory"
    )
    parser.add_argument("second", type=Path, help="as `first`")
    parser.add_argument("--model", type=Path, help="model directory of checkpoints that have no run above them")
    add_arguments(parser, Families)
    parser.add_argument("--role", help="which role's model, where a checkpoint holds several")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative difference in norm that still counts as the same"
    )
    parser.add_argument("--show", type=int, default=20, help="rows of the largest differences")
    args = parser.parse_args()
    try:
        registry.add(args.family, "--family")
        rows = compare(*(find(path, role=args.role, model=args.model) for path in (args.first, args.second)))
    except ConfigError as error:
        print(f"compare_checkpoints: {error}", file=sys.stderr)
        return 2
    differing = [row for row in rows if not row["equal"]]
    if differing:
        table = Table(title="tensors that differ")
        for column in ("tensor", "|a - b| / |a|", "largest"):
            table.add_column(column, justify="left" if column == "tensor" else "right")
        for row in sorted(differing, key=lambda row: -row["relative"])[: args.show]:
            table.add_row(row["name"], f"{row['relative']:.2e}", f"{row['largest']:.2e}")
        Console(width=max(110, Console().width)).print(table)
    same = all(row["equal"] or (args.tolerance and row["relative"] <= args.tolerance) for row in rows)
    print(f"{len(rows) - len(differing)} of {len(rows)} tensors are equal to the last bit")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
