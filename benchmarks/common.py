"""Holds what all benchmarks share: options, the printed table, the JSON file, and the bars that metrics must reach."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

import psutil
import torch
from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --check."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics, the bars and the machine to FILE")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a metric misses its bar")


def finish(
    metrics: Mapping[str, float],
    bars: Mapping[str, float],
    args: argparse.Namespace,
    *,
    limits: Mapping[str, float] | None = None,
    unmeasured: Mapping[str, str] | None = None,
    more: Mapping[str, object] | None = None,
) -> None:
    """Prints the table, writes the JSON file, and with --check exits 1 when a metric misses its bar.

    `bars`: least acceptable values by metric; `limits`: greatest ones. `unmeasured`: why a metric could not be had; it
    misses its bar. `more`: what the JSON file holds beside metrics. Raises KeyError for a bar without a metric.
    """
    limits, unmeasured = limits or {}, unmeasured or {}
    held = bars.keys() | limits.keys()
    missed = [name for name in unmeasured if name in held]
    missed += [name for name, bar in bars.items() if name not in missed and not metrics[name] >= bar]
    missed += [name for name, limit in limits.items() if name not in missed and not metrics[name] <= limit]
    table = Table(title=Path(sys.argv[0]).name, title_justify="left")
    for column in ("figure", "value", "bar", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, value in metrics.items():
        conditions = [f"{sign} {bounds[name]:g}" for sign, bounds in ((">=", bars), ("<=", limits)) if name in bounds]
        verdict = "" if not conditions else "MISSED" if name in missed else "ok"
        table.add_row(name, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}", ", ".join(conditions), verdict)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, reason in unmeasured.items():
        console.print(f"{name}: not measured{' (MISSED)' if name in missed else ''}: {reason}", highlight=False)
    report = {
        "metrics": dict(metrics),
        "bars": dict(bars),
        "limits": dict(limits),
        "missed": missed,
        **({"not_measured": dict(unmeasured)} if unmeasured else {}),
    }
    write_json(args.json, report | dict(more or {}))
    if args.check and missed:
        sys.exit(1)


def write_json(file: Path | None, fields: Mapping[str, object]) -> None:
    """Writes what was measured, and the machine, to a file. Nothing is done without one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**fields, "machine": machine()}, indent=2) + "\n")


class Peak:
    """A meter of the highest number that `look` returns within a block, in bytes; it looks every `pause_s` seconds."""

    def __init__(self, look: Callable[[], int], pause_s: float) -> None:
        self._look, self._pause_s = look, pause_s

    def __enter__(self) -> Self:
        self.start = self.most = self._look()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    @property
    def mib(self) -> float:
        """Returns what was added within the block at the most, in MiB."""
        return (self.most - self.start) / 2**20

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, self._look())
            if self._done.wait(self._pause_s):
                return


class AnonymousPeak(Peak):
    """A meter of the anonymous memory (not page cache) of this process."""

    def __init__(self) -> None:
        super().__init__(anonymous_bytes, 0.002)


class FamilyPeak(Peak):
    """A meter of the anonymous memory of this process and its descendants. Memory that several processes share counts
    by its share (Linux)."""

    def __init__(self) -> None:
        super().__init__(family_bytes, 0.01)


def family_bytes() -> int:
    """Returns the sum of Pss_Anon of this process and its descendants in bytes."""
    process_here = psutil.Process()
    return sum(proportional_bytes(process.pid) for process in (process_here, *process_here.children(recursive=True)))


def proportional_bytes(pid: int) -> int:
    """Returns Pss_Anon of a process in bytes; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return 0


def anonymous_bytes() -> int:
    """Returns RssAnon of this process in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def cpu_seconds(processes: Iterable[int]) -> float:
    """Returns the CPU time of the processes and all their descendants, in seconds."""
    roots = [psutil.Process(process) for process in processes]
    spent = 0.0
    for process in [p for root in roots for p in (root, *root.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(process.cpu_times()[:4])  # children that have ended count too
    return spent


def machine() -> dict[str, str | int]:
    """Describes the machine on which metrics are measured."""
    facts: dict[str, str | int] = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
