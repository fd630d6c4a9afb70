"""Shows a run to a person: a live table in a terminal, plain lines elsewhere and always in logs/driver.log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megatron_rl.run.metrics import MetricsRow

# The metrics that a column shows: the first of these names that a role logs.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/trained", "reward", "reward/total", "reward/outcome", "reward/*"),
    "loss": ("loss", "train_loss"),
    "val": ("validation_loss",),
    "kl": ("kl_ref", "kl"),
    "entropy": ("entropy",),
    "length": ("length", "tokens_per_sample"),
    "answers": ("turns",),  # of the seats of an episode
    "gap": ("engine_gap",),
}
NOTES = ("eval", "gate")  # scopes whose rows are not turns
QUIET_S = 0.25  # least seconds between two plain lines on the screen; the log file has all lines
SMOOTHING = 0.9  # weight of the past in the running mean


@dataclass(slots=True)
class _Scope:
    """The last values of one role, and the running mean of its reward."""

    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    smoothed: float | None = None


class RunConsole:
    """A metric sink (see metrics.Sink) for people, on the driver rank alone.

    It is a context manager that closes itself. `first_turn`: turns that were done before a resume; `total_turns`: turns
    of the whole run, None when not known. Warnings of the package's loggers are shown like the lines. `stream` receives
    the output, as a live table when it is a terminal.
    """

    name = "console"

    def __init__(
        self, log_path: Path, total_turns: int | None, *, first_turn: int = 0, stream: TextIO | None = None
    ) -> None:
        self._log_path = log_path
        self._total = total_turns
        self._rich = RichConsole(file=stream if stream is not None else sys.stdout, soft_wrap=True)
        self._scopes: dict[str, _Scope] = {}
        self._printed = 0.0  # time (time.monotonic) of the last plain line
        self._handler: logging.Handler | None = None
        self._file: TextIO | None = None
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("turn"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._rich,
        )
        self._bar = self._progress.add_task("turns", total=total_turns, completed=first_turn)

    def open(self) -> None:
        """Starts the log file and, in a terminal, the live table. Further calls do nothing."""
        if self._handler is not None:
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._log_path.open("a", encoding="utf-8", buffering=1)
        if self._rich.is_terminal:
            live = Live(self._render(), console=self._rich, refresh_per_second=4)
            live.start()
            self._live = live
        self._handler = _Forward(self)
        logger = logging.getLogger("megatron_rl")
        logger.addHandler(self._handler)
        logger.propagate = False  # else the root's handler would print every line a second time

    def log(self, row: MetricsRow) -> None:
        """Shows one metrics line."""
        scope = self._scopes.setdefault(row.scope, _Scope())
        shown = headline(row.metrics)
        scope.seconds = sum(row.time.values())
        scope.values.update(shown)
        if "reward" in shown:
            past = scope.smoothed
            scope.smoothed = shown["reward"] if past is None else SMOOTHING * past + (1 - SMOOTHING) * shown["reward"]
        self._to_file(line(row, self._total))
        if self._live is None:
            now = time.monotonic()
            if row.scope in NOTES or row.turn + 1 == self._total or now - self._printed >= QUIET_S:
                self._printed = now
                self._rich.print(line(row, self._total), markup=False, highlight=False)
        else:
            if row.scope not in NOTES:
                self._progress.update(self._bar, completed=row.turn + 1)
            self._live.update(self._render())

    def message(self, text: str) -> None:
        """Prints plain text above the table and into the log file."""
        self._to_file(text)
        self._rich.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Closes the log file and stops the live table. Further calls do nothing."""
        if self._handler is None:
            return
        logger = logging.getLogger("megatron_rl")
        logger.removeHandler(self._handler)
        logger.propagate = True
        self._handler = None
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
            self._live = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RunConsole:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _to_file(self, text: str) -> None:
        if self._file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        for part in text.splitlines() or [""]:
            self._file.write(f"{stamp} {part}\n")

    def _render(self) -> Group:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)  # narrow: fits in 80 characters
        seen = {column for name, scope in self._scopes.items() if name not in NOTES for column in scope.values}
        shown = [
            column for name in COLUMNS if name in seen for column in ((name, "smooth") if name == "reward" else (name,))
        ]
        columns = ("role", *shown, "s")
        for column in columns:
            table.add_column(column, justify="left" if column == "role" else "right", no_wrap=True)
        notes = []
        for name, scope in self._scopes.items():
            if not scope.values:
                continue
            if name in NOTES:
                notes += _notes(name, scope.values)
                continue
            cells = [
                _cell(scope.smoothed if column == "smooth" else scope.values.get(column)) for column in columns[1:-1]
            ]
            table.add_row(name, *cells, f"{scope.seconds:.1f}")
        return Group(table, *notes, self._progress)


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures for a line: the console's columns when there are any, otherwise (an evaluation) everything.

    In COLUMNS, a name that ends in `/*` stands for the first metric, by name, below it.
    """
    shown: dict[str, float] = {}
    for column, names in COLUMNS.items():
        for name in names:
            found = (
                sorted(key for key in metrics if key.startswith(name[:-1]))
                if name.endswith("/*")
                else [name] * (name in metrics)
            )
            if found:
                shown[column] = metrics[found[0]]
                break
    return shown or {name: value for name, value in metrics.items() if not name.rpartition("/")[2].startswith("num_")}


def line(row: MetricsRow, total_turns: int | None) -> str:
    """Returns one metrics line as plain text: `turn 12/440  generator  reward 0.512  loss -1.2e-03  12.3 s`.

    Turns count from 1.
    """
    of = f"/{total_turns}" if total_turns is not None else ""
    values = "  ".join(f"{name} {_cell(value)}" for name, value in headline(row.metrics).items())
    seconds = f"  {sum(row.time.values()):.1f} s" if row.time else ""
    place = (
        f"step {row.step}" if row.scope in NOTES else f"{'step' if row.scope == 'sft' else 'turn'} {row.turn + 1}{of}"
    )
    return f"{place}  {row.scope}  {values}{seconds}"


def _notes(scope: str, values: Mapping[str, float]) -> list[str]:
    """Returns one line for each role, such as `eval generator  accuracy_sampled 0.512`."""
    lines: dict[str, list[str]] = {}
    for name, value in values.items():
        role, _, figure = name.rpartition("/")
        lines.setdefault(role, []).append(f"{figure} {_cell(value)}")
    return [f"{scope} {role}  {'  '.join(figures)}" for role, figures in lines.items()]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


class _Forward(logging.Handler):
    """A log handler that shows the package's warnings and errors as lines of the console."""

    def __init__(self, console: RunConsole) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.message(f"{record.levelname.lower()}: {record.getMessage()}")
