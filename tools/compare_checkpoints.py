#!/usr/bin/env python3
"""Compares two models tensor by tensor, bit for bit and by norm; each is a checkpoint or a Hugging Face directory.

    python tools/compare_checkpoints.py runs/demo runs/demo/models/generator --role generator

Exit status: 0 the same to the last bit, 1 not, 2 they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from megatron_rl.commands.arguments import Families
from megatron_rl.commands.parser import add_arguments
from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion.weight_source import WeightSource, find
from megatron_rl.models import registry
from megatron_rl.weights import hf_model, tensor_copies
from megatron_rl.weights.parameter_mapping import hf_shapes


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


def compare(first: WeightSource, second: WeightSource) -> list[dict[str, Any]]:
    """Compares two models tensor by tensor. Returns one dict per tensor, with these keys:

    - `name`: the tensor's name.
    - `equal`: whether the tensors are bit-identical.
    - `relative`: the relative difference |a - b| / |a| with Frobenius norms, where a is the tensor of `first` and b the
      tensor of `second`.
    - `largest`: the largest absolute difference of two elements.

    Raises ConfigError if the two models have different tensor names or shapes.
    """
    rows = []
    total = len(first.shapes()) if first.checkpoint is None else len(hf_shapes(first.sizes))
    screen = Console(stderr=True)
    steps = track(
        _pairs(first, second), "tensors", total, console=screen, transient=True, disable=not screen.is_terminal
    )
    for name, a, b in steps:
        if a.shape != b.shape:
            raise ConfigError(f"{name} is {tuple(a.shape)} in {first.path} and {tuple(b.shape)} in {second.path}")
        rows.append({"name": name, "equal": torch.equal(a, b), **_gap(a, b)})
    return rows


def _pairs(first: WeightSource, second: WeightSource) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name of a tensor, the tensor in `first`, the tensor in `second`) for all tensors.

    A checkpoint is read in its stored order, and the tensors of a directory are looked up by name. Raises ConfigError
    if the two models have different tensor names or sizes, or if both are adapters.
    """
    if first.checkpoint is not None and second.checkpoint is not None:
        if first.sizes != second.sizes:
            raise ConfigError(
                f"{first.path} and {second.path} are models of different sizes: {first.sizes} and {second.sizes}"
            )
        for (name, a), (_, b) in zip(first.tensors(), second.tensors(), strict=True):
            yield name, a, b
        return
    if first.adapter is not None and second.adapter is not None:
        raise ConfigError(f"{first.adapter} and {second.adapter} are both adapters: merge one of them by to-hf first")
    swap = second.checkpoint is not None or second.adapter is not None
    leading, following = (second, first) if swap else (first, second)
    files, names = hf_model.DirectoryTensors(following.path), set()
    for name, a in leading.tensors():
        if name not in files.stored:
            raise ConfigError(f"{following.path} has no tensor {name}, which {leading.path} has")
        names.add(name)
        yield (name, files.whole(name), a) if swap else (name, a, files.whole(name))
    if missing := sorted(files.stored.keys() - names):
        raise ConfigError(f"{leading.path} has no tensor {missing[0]}, which {following.path} has")


def _gap(a: Tensor, b: Tensor) -> dict[str, float]:
    """Returns {"relative": |a - b| / |a| with Frobenius norms, "largest": largest absolute difference of two elements}.
    Both are computed in float64, block by block."""
    gap = norm = largest = 0.0
    for x, y in zip(tensor_copies.blocks(a), tensor_copies.blocks(b), strict=True):
        x = x.double()
        difference = (x - y.double()).abs()
        gap += float(difference.square().sum())
        norm += float(x.square().sum())
        largest = max(largest, float(difference.max()))
    return {"relative": gap**0.5 / (norm**0.5 or 1.0), "largest": largest}


if __name__ == "__main__":
    sys.exit(main())
