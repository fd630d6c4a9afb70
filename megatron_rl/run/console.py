"""Shows the progress of a run: a live table in a terminal, otherwise plain lines. The plain lines are always written to
logs/driver.log.

docs/explanation/concepts.md explains the columns.
"""

from __future__ import annotations

import fnmatch
import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_rl.lib.regular_files import regular
from megatron_rl.run.metrics import MetricsRow, Sink, failures_text

# {column: names of metrics}. A column shows the first of these metrics that a role logs.
# If the table is too wide, the last columns are left out.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "update": ("update",),
    "reward": ("reward/trained", "reward", "reward/total", "reward/outcome", "reward/*"),
    "loss": ("loss", "train_loss"),
    "val": ("validation_loss",),
    "acc": ("rewards/accuracies",),
    "length": ("length", "tokens_per_sample"),
    "answers": ("answers",),
    "entropy": ("entropy",),
    "kl": ("kl_ref", "kl"),
    "gap": ("engine_gap",),
    "mfu": ("mfu",),
}
ROLE, SMOOTH, SECONDS = "role", "smooth", "s"  # further columns of the live table
NOTES = ("eval", "preflight")  # scopes whose rows are not iterations
SMOOTHING = 0.9  # decay factor of the running mean of the reward
RECENT = 10  # number of iterations from which the remaining time is estimated
NARROW = 80  # maximum width of the table in characters, even in wider terminals
NAME = 40  # maximum number of characters of a row's name


@dataclass(slots=True)
class _Scope:
    """The newest values of one scope, such as a role, and the running mean of its reward."""

    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    smoothed: float | None = None


class RunConsole(Sink):
    """A metric sink (see metrics.Sink) that shows metrics on the console and writes them to the log file `log_path`.

    It is used on the driver rank only, inside a `with` block. Warnings of the package's loggers are shown as lines of
    the console.

    `total_iterations`: number of iterations of the whole run; None if unknown.
    `first_iteration`: number of iterations that were done before a resume.
    `stream`: the output, which shows a live table if it is a terminal.
    """

    name = "console"

    def __init__(
        self, log_path: Path, total_iterations: int | None, *, first_iteration: int = 0, stream: TextIO | None = None
    ) -> None:
        self._log_path = log_path
        self._total = total_iterations
        output = sys.stdout if stream is None else stream
        # with FORCE_COLOR, which notebooks and CI set, rich would treat any stream as a terminal
        self._rich = RichConsole(file=output, soft_wrap=True, force_terminal=None if output.isatty() else False)
        self._scopes: dict[str, _Scope] = {}
        self._evaluations: list[MetricsRow] = []  # the first and the last evaluation
        # pairs (number of completed iterations, time) at the ends of the most recent iterations
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        self._handler = _Forward(self)
        self._file: TextIO | None = None
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("iteration"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[cycle]}"),
            TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=self._rich,
        )  # fmt: skip
        self._bar = self._progress.add_task(
            "iterations", total=total_iterations, completed=first_iteration, cycle="", left=""
        )

    def __enter__(self) -> RunConsole:
        """Opens the log file and, in a terminal, starts the live table."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._log_path, "a", encoding="utf-8", buffering=1, opener=regular)
        if self._rich.is_terminal:
            self._live = Live(self._render(), console=self._rich, refresh_per_second=4)
            self._live.start()
        logger = logging.getLogger("megatron_rl")
        logger.addHandler(self._handler)
        logger.propagate = False  # so that the root logger's handler does not print every line again
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the log file and stops the live table."""
        logger = logging.getLogger("megatron_rl")
        logger.removeHandler(self._handler)
        logger.propagate = True
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
            self._live = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def log(self, row: MetricsRow) -> None:
        """Shows one metrics line on the console and writes it to the log file."""
        scope = self._scopes.setdefault(row.scope, _Scope())
        shown = headline({**row.metrics, **row.speed})
        scope.seconds = sum(row.time.values())
        scope.values.update(shown)
        if "reward" in shown:
            past = scope.smoothed
            scope.smoothed = shown["reward"] if past is None else SMOOTHING * past + (1 - SMOOTHING) * shown["reward"]
        if row.scope == "eval":
            self._evaluations = [*self._evaluations[:1], row]
        self._to_file(line(row, self._total))
        if row.scope not in NOTES:
            self._count(row)
        if self._live is not None:
            self._live.update(self._render())
            if text := failures_text(row.metrics):
                self._rich.print(f"iteration {row.iteration + 1}  {row.scope}  {text}", markup=False, highlight=False)
            return
        self._rich.print(line(row, self._total), markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Writes plain text to the log file only."""
        self._to_file(text)

    def message(self, text: str) -> None:
        """Prints plain text above the live table, and writes it to the log file."""
        self._to_file(text)
        self._rich.print(text, markup=False, highlight=False)

    def _to_file(self, text: str) -> None:
        if self._file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        for part in text.splitlines() or [""]:
            self._file.write(f"{stamp} {part}\n")

    def _count(self, row: MetricsRow) -> None:
        """Updates the progress bar and the remaining time, which is estimated from the last RECENT iterations."""
        done, now = row.iteration + 1, time.monotonic()
        if self._ends and self._ends[-1][0] == done:
            self._ends.pop()  # replace the entry of another role's line in the same iteration
        self._ends.append((done, now))
        (earlier, then), remaining = self._ends[0], ""
        if self._total is not None and done > earlier:
            remaining = f"{duration((self._total - done) * (now - then) / (done - earlier))} to go"
        self._progress.update(self._bar, completed=done, cycle=f"cycle {row.cycle + 1}", left=remaining)

    def _render(self) -> Group:
        scopes = {name: scope for name, scope in self._scopes.items() if name not in NOTES and scope.values}
        seen = {column for scope in scopes.values() for column in scope.values}
        shown = [c for name in COLUMNS if name in seen for c in ((name, SMOOTH) if name == "reward" else (name,))]
        rows = []
        for name, scope in scopes.items():
            values = {**scope.values, SMOOTH: scope.smoothed}
            rows.append([name, f"{scope.seconds:.1f}", *(_cell(values.get(c), c) for c in shown)])
        parts = [_table((ROLE, SECONDS, *shown), rows)] if rows else []
        if self._evaluations:
            heads = [f"iteration {row.iteration}" for row in self._evaluations]
            names = [name for name in self._evaluations[-1].metrics if not _is_count(name)]
            values = [[name, *(_cell(row.metrics.get(name)) for row in self._evaluations)] for name in names]
            parts.append(_table(("evaluation", *heads), values))
        if "preflight" in self._scopes and not rows:
            values = [[name, _cell(value)] for name, value in self._scopes["preflight"].values.items()]
            parts.append(_table(("preflight", ""), values))
        return Group(*parts, self._progress)


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns {column: value} of the console's table. A column is left out if `metrics` has none of its metrics.

    In an evaluation, no column has a metric. The function then returns {name: value} of all metrics except counts and
    metrics of single problem sets. In COLUMNS, a name that ends in `/*` means the alphabetically first metric with this
    prefix.
    """
    shown: dict[str, float] = {}
    for column, names in COLUMNS.items():
        present = [key for name in names for key in fnmatch.filter(sorted(metrics), name)]
        if present:
            shown[column] = metrics[present[0]]
    if shown:
        return shown
    present = {name: value for name, value in metrics.items() if not _is_count(name)}
    return {name: value for name, value in present.items() if name.count("/") < 2} or present


def line(row: MetricsRow, total_iterations: int | None) -> str:
    """Returns one metrics line as plain text, such as
    `iteration 12/440 (cycle 3)  generator  update 9  reward 0.512  12.3 s` or
    `after iteration 12  eval  generator/accuracy 0.512`. If samples were replaced or gradings were cut off, the line
    ends with their numbers, such as `3 samples replaced (2 timeout, 1 tool), 1 grading cut off`.

    The indices of iterations, cycles and updates in the text start at 1. `total_iterations`: None if unknown.
    """
    of = f"/{total_iterations}" if total_iterations is not None else ""
    values = "  ".join(f"{name} {_cell(value, name)}" for name, value in headline({**row.metrics, **row.speed}).items())
    seconds = f"  {sum(row.time.values()):.1f} s" if row.time else ""
    failures = f"  {text}" if (text := failures_text(row.metrics)) else ""
    if row.scope in NOTES:
        place = f"after iteration {row.iteration}"
    else:
        place = (
            f"step {row.iteration + 1}{of}"
            if row.scope == "sft"
            else f"iteration {row.iteration + 1}{of} (cycle {row.cycle + 1})"
        )
    return f"{place}  {row.scope}  {values}{seconds}{failures}"


def before_after(first: Mapping[str, float], last: Mapping[str, float]) -> str:
    """Returns a text table of the metrics of a run's first and last evaluation."""
    names = [name for name in last if not _is_count(name)]
    width = max([len("held-out problems"), *map(len, names)])
    lines = [f"{'held-out problems':<{width}}  {'before':>8}  {'after':>8}"]
    lines += [f"{name:<{width}}  {_cell(first.get(name)):>8}  {_cell(last[name]):>8}" for name in names]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Returns a duration as text, such as `4.2 s`, `40 s`, `12 min` or `3.5 h`."""
    if not 0 <= seconds < 1e12:
        return "an unknown time"
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _is_count(name: str) -> bool:
    """Returns whether a metric of an evaluation is a count of problems or samples (`num_...`)."""
    return name.rpartition("/")[2].startswith("num_")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Returns a table that is at most NARROW characters wide. The last columns are left out if they do not fit."""
    rows = [[row[0] if len(row[0]) <= NAME else f"{row[0][: NAME - 1]}…", *row[1:]] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in rows)) + 2 for i, column in enumerate(columns)]
    fitting = [i for i in range(len(columns)) if sum(widths[: i + 1]) <= NARROW]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i in fitting or [0]:
        table.add_column(columns[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in fitting or [0]))
    return table


def _cell(value: float | None, column: str = "") -> str:
    if value is None:
        return "-"
    if column == "update":
        return f"{value:.0f}"
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


class _Forward(logging.Handler):
    """A handler of the logging module that shows the package's warnings and errors as lines of the console."""

    def __init__(self, console: RunConsole) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.message(f"{record.levelname.lower()}: {record.getMessage()}")
