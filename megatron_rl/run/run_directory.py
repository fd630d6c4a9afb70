"""The directory of a run: its files, its lock, its summary, and the check whether a run may resume in it. The class
Interrupts lets signals stop a run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_rl.config.files import parse
from megatron_rl.config.schema import ConfigError, Run
from megatron_rl.lib.regular_files import read_text, regular
from megatron_rl.run import directory_lock
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.checkpoint import Checkpoints, read_json, write_json
from megatron_rl.run.json_lines import UNREADABLE
from megatron_rl.run.metrics import FILE_NAME

# Settings that may change when a run is resumed.
# These settings change neither the results nor the number and order of iterations.
FREE_KEYS = (
    "run.dir", "run.name", "run.resume", "run.keep", "run.save_every", "run.async_save", "run.save_rollouts_every",
    "run.hang_after_s", "run.peak_tflops", "sinks", "job",
)  # fmt: skip
# settings for which a run chooses a value that it keeps, if the config says `auto`
AUTOMATIC = re.compile(r"rollouts\.max_staleness|roles\..+\.ranks")
WANDB_ID = "wandb_id"  # file in the logs with the id of the W&B run, which all starts of a run share
SWEEP = "sweep.json"  # file in a sweep's directory: [{"run": name of the run's directory, "changes": {setting: value}}]
ENDING_S = 3.0  # seconds that the last process of a killed run may need to end
FAILED = "failed"  # key of the summary: reason why the last start of the run failed, in one line; null if it did not
_END = b"\0"  # byte that stops the thread that reads signal numbers; no signal has number 0
_log = logging.getLogger(__name__)


class RunError(ConfigError):
    """Raised when a run cannot start in its directory. The message gives the reason and what to do."""


class RunBusy(RuntimeError):
    """Raised when another process is using the run directory."""


class RunDirectory:
    """The paths of a run's files. The constructor accesses no file, so every rank may call it; only the driver rank
    writes files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / FILE_NAME
        self.refits = path / "refits.jsonl"
        self.timeline = path / "timeline.jsonl"  # when each role's ranks and engines work
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.logs = path / "logs"
        self.summary = path / "summary.json"
        self.evaluations = path / "evaluations"  # results of the evaluations during training
        self.best = path / "best"  # models of the best checkpoints

    def has_begun(self) -> bool:
        """Returns whether the run has logged metrics or saved a complete checkpoint."""
        return (self.metrics.exists() and self.metrics.stat().st_size > 0) or Checkpoints(
            self.checkpoints
        ).newest() is not None

    def load_summary(self) -> dict[str, Any]:
        """Returns the content of summary.json; {} if there is no such file. Raises OSError, ValueError or
        RecursionError if the file cannot be read or is damaged."""
        summary = read_json(self.summary) if self.summary.exists() else {}
        if not isinstance(summary, dict):
            raise ValueError(f"it holds a {type(summary).__name__}, not a mapping")
        return summary

    def read_summary(self) -> dict[str, Any]:
        """Returns the content of summary.json; {} if there is no such file, or, with a warning, if it is damaged."""
        try:
            return self.load_summary()
        except (OSError, *UNREADABLE) as error:
            _log.warning("%s cannot be read (%s): its metrics are left out", self.summary, error)
            return {}

    def update_summary(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes `values` to summary.json, without changing its other keys, and returns the new content."""
        merged = {**self.read_summary(), **values}
        write_json(self.summary, merged)
        return merged


def check_start(run: Run, config_text: str) -> list[str]:
    """Checks whether a run with this config may start in its directory. Changes no file.

    `run.resume` decides:
      auto   An empty directory: start. A run with the same config: continue from its newest complete checkpoint, or
             from the beginning if there is none. A run with another config: start again if it has no complete
             checkpoint, otherwise an error.
      never  An empty directory: start. A directory with a run: an error.
      must   Continue from the newest complete checkpoint, also with a changed config. An error without a checkpoint.
    Returns `key: old -> new` for the settings that differ from those of the existing run, except FREE_KEYS. Raises
    RunError if the run may not start.
    """
    directory = RunDirectory(Path(run.dir) / run.name)
    refuse_shared(directory.path)
    old_text = _config_text(directory)
    saved = Checkpoints(directory.checkpoints).newest() is not None
    changes = config_changes(old_text, config_text) if old_text is not None else []
    wrong = None
    if run.resume == "must" and not saved:
        wrong = f"run.resume=must, but {directory.checkpoints} holds no complete checkpoint: start with run.resume=auto"
    elif run.resume == "never" and (old_text is not None or directory.metrics.exists()):
        wrong = (
            f"run.resume=never, but {directory.path} holds a run: "
            "give another run.name, or continue it with run.resume=auto"
        )
    elif run.resume != "must" and old_text is None and directory.metrics.exists():
        wrong = f"{directory.path} has metrics of a run but no config.yaml: give another run.name"
    elif changes and saved and run.resume != "must":
        listed = "\n  ".join(changes)
        wrong = (
            f"{directory.path} holds a run with another config:\n  {listed}\n"
            "give another run.name, put the values back, or continue with the new ones by run.resume=must"
        )
    if wrong is not None:
        raise RunError(wrong)
    return changes


def refuse_shared(directory: Path) -> None:
    """Raises RunError if another user may create or replace files in a run directory or in a directory below it. Such a
    user could choose which files a run reads and writes, and to which servers it sends prompts. A directory that does
    not exist is accepted; the program creates directories that only their owner may write to (see `main`)."""
    for place, *_ in os.walk(directory):
        status = os.stat(place)
        if status.st_uid not in (os.geteuid(), 0):
            raise RunError(f"{place} belongs to user {status.st_uid}: give another run.name, or run.dir")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RunError(
                f"{place} can be written to by other users (mode {stat.S_IMODE(status.st_mode):o}), who could replace "
                f"its files by links: look for files that are not yours, then `chmod -R go-w {directory}`"
            )


def _config_text(directory: RunDirectory) -> str | None:
    """Returns the text of config.yaml; None if there is no such file."""
    return read_text(directory.config, errors="replace") if os.path.lexists(directory.config) else None


def open_run(run: Run, config_text: str) -> RunDirectory:
    """Creates or reopens the run directory run.dir/run.name for the resolved config. The driver rank calls this
    function before it writes to the directory.

    If the config has changed, the old config is kept as config.1.yaml, config.2.yaml, ... The files of an earlier start
    without a checkpoint are moved to former.1, former.2, ... Raises RunError if the run may not start in the directory
    (see `check_start`).
    """
    changes, directory = check_start(run, config_text), RunDirectory(Path(run.dir) / run.name)
    old_text = _config_text(directory) if changes else None
    if changes and run.resume != "must" and (directory.has_begun() or [*directory.rollouts.glob("*")]):
        _log.warning("a former start with another config is kept in %s", _set_aside(directory.path))
    elif changes and run.resume == "must":
        _log.warning("%s continues with a changed config: %s", directory.path, "; ".join(changes))
        kept = len(list(directory.path.glob("config.*.yaml"))) + 1
        write_text(directory.path / f"config.{kept}.yaml", old_text or "")
    for place in (directory.path, directory.checkpoints, directory.rollouts, directory.logs):
        place.mkdir(parents=True, exist_ok=True)
    write_text(directory.config, config_text)
    return directory


def _set_aside(run: Path) -> Path:
    """Moves the files of an earlier start into a new subdirectory former.N, and returns the subdirectory. Logs and job
    records are not moved, because the current start already writes to them."""
    place = run / f"former.{len(list(run.glob('former.*'))) + 1}"
    place.mkdir()
    written = (
        "metrics.jsonl",
        "refits.jsonl",
        "timeline.jsonl",
        "summary.json",
        "inputs.json",
        "rollouts",
        "checkpoints",
        "evaluations",
        "best",
    )
    for name in (*written, f"logs/{WANDB_ID}"):
        if (run / name).exists():
            os.rename(run / name, place / Path(name).name)
    # The file config.yaml is moved last, so that an interrupted move is repeated at the next start
    os.rename(run / "config.yaml", place / "config.yaml")
    return place


@contextlib.contextmanager
def only_one(directory: Path, *, job: str = "", restart: int = 0) -> Iterator[None]:
    """Context manager that locks the run directory for this process. The lock is released if the process is killed.

    `job`, `restart`: id and restart count of the process's Slurm job. Raises RunBusy if another process still holds the
    lock after ENDING_S seconds. Without the lock, two trainers could write the same files and send different weights to
    the same engines.
    """
    directory.mkdir(parents=True, exist_ok=True)
    caller, until = directory_lock.own_name(job, restart), time.monotonic() + ENDING_S
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(directory / "lock", "a+", errors="replace", opener=regular))
        while True:
            try:
                stack.enter_context(directory_lock.held(file.fileno(), directory / "lock.held", caller))
                break
            except directory_lock.Taken as error:
                if time.monotonic() > until:
                    file.seek(0)
                    who = str(error) or file.read().strip() or "another process"
                    cure = f", or, {error.cure}" if error.cure else ""
                    raise RunBusy(f"{directory} is being run by {who}: end that first{cure}") from None
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def config_changes(old_text: str, new_text: str) -> list[str]:
    """Returns `key: old -> new` for every setting that differs between two YAML configs, except FREE_KEYS.

    The new value `auto` counts as equal to any old value, because a resumed run keeps what was chosen at the first
    start.
    """
    try:
        old, new = (flatten(parse(text, "config.yaml") or {}) for text in (old_text, new_text))
    except ConfigError as error:
        return [f"config.yaml of the run is damaged, so that its settings are not known: {error}"]
    absent = "(not set)"
    return [
        f"{key}: {old.get(key, absent)} -> {new.get(key, absent)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, absent) != new.get(key, absent)
        and not (AUTOMATIC.fullmatch(key) and new.get(key) == "auto")
        and not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
    ]


class Interrupts:
    """Context manager in which signals request a stop: `with Interrupts() as stop: ... if stop.requested: save, exit`.

    It is used in the main thread; the earlier signal handlers are restored when the block ends. The first SIGINT,
    SIGTERM or SIGUSR1 (Slurm's early warning) sets `requested`. A second SIGINT ends the process at once with status
    130 if it arrives more than SAME_PRESS_S seconds after the first, because a terminal and a launcher may both deliver
    one Ctrl-C. This also works while the main thread waits in a collective, where Python runs no signal handlers: a
    thread reads the signal numbers from a pipe to which the interpreter writes them.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    SAME_PRESS_S = 0.4

    def __init__(self, *, announce: bool = True) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._announce = announce
        self._active = False

    def __enter__(self) -> Interrupts:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._thread.start()
        self._active = True
        os.register_at_fork(after_in_child=self._forget)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()
        os.write(self._write_end, _END)
        self._thread.join()
        os.close(self._write_end)
        os.close(self._read_end)

    def _restore(self) -> None:
        self._active = False
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)

    def _forget(self) -> None:
        """Restores the earlier signal handlers in a forked child, so that a signal to the child does not stop the
        parent through the common pipe."""
        if self._active:
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested and self._announce:
            name = signal.Signals(number).name
            os.write(
                2, f"\n{name}: saving and leaving after this iteration; Ctrl-C once more leaves at once\n".encode()
            )
        self.requested = True
        self.signal_name = self.signal_name or signal.Signals(number).name

    def _watch(self) -> None:
        first: float | None = None
        while _END not in (received := os.read(self._read_end, 64)):
            if signal.SIGINT in received:
                now = time.monotonic()
                first = now if first is None else first
                if now - first > self.SAME_PRESS_S:
                    os._exit(130)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings, such as {"run": {"seed": 1}} to {"run.seed": 1}. Empty mappings stay as values."""
    if not isinstance(value, Mapping) or (prefix and not value):
        return {prefix: value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
