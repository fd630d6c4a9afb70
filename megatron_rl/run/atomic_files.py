"""Writes files atomically and durably."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from megatron_rl.lib.regular_files import move, regular


@contextmanager
def replacing(path: Path, *, writer: str = "", durable: bool = True) -> Iterator[Path]:
    """A context manager that yields the path of a temporary file in the directory of `path`. When the block ends, the
    file replaces `path` atomically. If the block raises, the temporary file is removed, and `path` stays as it was.

    `writer`: name of the writer, if several may write `path` at the same time. `durable`: whether the file and its name
    are flushed to the disk, so that a power cut leaves the old or the new file.
    """
    temporary = path.with_name(f".{path.name}{writer and '.'}{writer}.tmp")
    try:
        with suppress(IsADirectoryError):
            temporary.unlink(missing_ok=True)  # a writer might follow a link
        yield temporary
        push([temporary] if durable else [])
        move(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    push([path.parent] if durable else [])


def write_text(path: Path, text: str, *, writer: str = "", durable: bool = True, mode: int = 0o666) -> None:
    """Writes a text file atomically, see `replacing`. `mode`: the permissions of the file."""
    with (
        replacing(path, writer=writer, durable=durable) as temporary,
        open(temporary, "w", encoding="utf-8", opener=partial(regular, mode=mode)) as file,
    ):
        file.write(text)


def push(paths: Iterable[Path]) -> None:
    """Flushes files or directories to the disk (fsync), so that their contents are on the disk before a later
    rename."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def push_tree(directory: Path) -> None:
    """Flushes a directory, everything below it, and the two directories above it to the disk. The two directories above
    are included because they may also be new."""
    inside = sorted(directory.rglob("*"))
    push(path for path in inside if path.is_file())
    push([*(path for path in inside if path.is_dir()), directory, directory.parent, directory.parent.parent])
