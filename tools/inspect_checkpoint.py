#!/usr/bin/env python3
"""Shows what a checkpoint or a model directory holds: tensors, shapes, sizes, and the number of iterations it comes
after.

python tools/inspect_checkpoint.py runs/demo --role generator
python tools/inspect_checkpoint.py runs/demo/models/verifier
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion.weight_source import find

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "F32": 4, "BF16": 2, "F16": 2, "float64": 8, "F64": 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="a run directory, a checkpoint, a role's directory in one, or a model directory"
    )
    parser.add_argument("--role", help="which role's model, where a checkpoint holds several")
    parser.add_argument("--optimizer", action="store_true", help="list the optimizer's tensors too")
    args = parser.parse_args()
    try:
        source = find(args.source, role=args.role)
        shapes = source.shapes()
    except ConfigError as error:
        print(f"inspect_checkpoint: {error}", file=sys.stderr)
        return 2
    table = Table(title=str(source.path))
    for column in ("tensor", "shape", "dtype", "MB"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    totals = {"model": 0, "optimizer": 0}
    for name, (shape, dtype) in sorted(shapes.items()):
        part = "optimizer" if name.startswith("optimizer.") else "model"
        size = math.prod(shape) * BYTES.get(dtype, 0)
        totals[part] += size
        if part == "model" or args.optimizer:
            table.add_row(name, "x".join(map(str, shape)), dtype, f"{size / 1e6:,.3f}")
    console = Console(width=max(110, Console().width))
    console.print(table)
    step = next(
        (parent.name for parent in (source.path, *source.path.parents) if parent.name.startswith("step_")), None
    )
    if step:
        console.print(f"{step}: the state after that many iterations")
    console.print(f"model {totals['model'] / 1e6:,.3f} MB, optimizer {totals['optimizer'] / 1e6:,.3f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
