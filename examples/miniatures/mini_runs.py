"""Starts commands of megatron-rl for miniatures, and reads the curves of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

Metrics = Mapping[str, float]
Value = TypeVar("Value")
console = Console(soft_wrap=True)


def command(*arguments: str) -> None:
    """Runs `megatron-rl *arguments`. Leaves with its status when it fails."""
    console.rule(" ".join(arguments[:2]))
    status = subprocess.run([sys.executable, "-m", "megatron_rl.main", *arguments]).returncode
    if status:
        sys.exit(status)


def series(
    run: Path, scope: str, name: str, *, counted: str, more: Callable[[Metrics], Metrics] = lambda metrics: {}
) -> list[tuple[int, float]]:
    """Returns (updates before it, metric) of every line of a run's metrics in `scope` that has the metric.

    An update has one line in the scope `counted`, which is its first; `more` makes further metrics of those lines.
    """
    points, done = {}, 0
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        metrics = dict(line["metrics"])
        if line["scope"] == counted:
            metrics |= more(metrics)
            done += 1
        if line["scope"] == scope and name in metrics:
            points[done] = metrics[name]
    return sorted(points.items())


def start_middle_end(values: Sequence[float], *, width: int = 1) -> list[float]:
    """Returns the mean of `width` neighbouring values at the start, at the middle and at the end."""
    return [sum(own) / len(own) for own in windows(values, width=width)]


def windows(values: Sequence[Value], *, width: int) -> list[Sequence[Value]]:
    """Returns `width` neighbouring values at the start, at the middle and at the end."""
    width = min(width, len(values))
    firsts = [int(place * (len(values) - width)) for place in (0.0, 0.5, 1.0)]
    return [values[first : first + width] for first in firsts]
