"""Appends to JSON Lines files and reads them. If the disk is full or the process is killed, at most the line that is
being written is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_rl.lib.regular_files import UntrustedFile, regular

T = TypeVar("T")
# Exceptions that may be raised when a damaged text is decoded.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)
RESUME = (
    "free some space there, then start the same command again: the run goes on from its last complete checkpoint, or "
    "from its beginning where it has none"
)


class DiskError(RuntimeError):
    """Raised when a file of a run cannot be written. The message names the file, the reason and what to do."""


@dataclass(frozen=True)
class Lines(Generic[T]):
    """The values of the readable lines of a file, in order, and a message about the unreadable lines, if any."""

    values: list[T]
    damage: str | None = None


def append(path: Path, line: bytes) -> None:
    """Appends one line atomically, and flushes the file to the disk. `line`: the line without its line end.

    If a killed process left a partial line, a line end is added first. Raises DiskError if the line cannot be written;
    the file is then unchanged.
    """
    try:
        with open(path, "a+b", buffering=0, opener=regular) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            try:
                unwritten = line + b"\n"
                while unwritten:
                    unwritten = unwritten[os.write(file.fileno(), unwritten) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
    except UntrustedFile:
        raise
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror or error}): {RESUME}") from error


def each(path: Path, take: Callable[[Any], object]) -> str | None:
    """Calls the function `take` with the value of each line of a JSON Lines file, in order. Only one line is in memory
    at a time.

    A line is skipped if it is not JSON, if `take` raises one of UNREADABLE, or if it is the last line and has no line
    end. Returns a message about the skipped lines, or None if no line was skipped. Empty lines are ignored. A missing
    file has no lines.
    """
    if not path.exists():
        return None
    number, wrong, first = 0, 0, 0
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and not _taken(line, take):
                    wrong, first = wrong + 1, first or number
    except OSError as error:
        shown = f"nothing of it after line {number} is shown" if number else "nothing of it is shown"
        return f"{path} cannot be read ({error.strerror or error}): {shown}"
    if not wrong:
        return None
    which = f"line {first}" if wrong == 1 else f"{wrong} lines, the first of them line {first},"
    verb = "is" if wrong == 1 else "are"
    return f"{path}: {which} of {number} cannot be read and {verb} left out"


def read(path: Path, decode: Callable[[Any], T]) -> Lines[T]:
    """Reads a JSON Lines file, and returns the results of `decode` for its lines. Lines are skipped as in `each`. A
    missing file has no lines."""
    values: list[T] = []
    damage = each(path, lambda raw: values.append(decode(raw)))
    return Lines(values, damage)


def _taken(line: bytes, take: Callable[[Any], object]) -> bool:
    """Returns whether a line could be parsed and `take` accepted its value."""
    try:
        if not line.endswith(b"\n"):
            raise ValueError("a line without its end")
        take(json.loads(line))
    except UNREADABLE:
        return False
    return True
