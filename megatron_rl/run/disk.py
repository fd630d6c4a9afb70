"""Writes files so that they are whole or not there, and on the disk before anything says that they are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a text file through a temporary neighbour and a rename, so that it is whole or not there."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    push([path.parent])


def push(paths: Iterable[Path]) -> None:
    """Pushes files or directories to the disk, so that a later rename is never on disk before their contents."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def push_tree(directory: Path) -> None:
    """Pushes a directory to the disk, with all that lies below it, and the two directories above it, which may be as
    new as it is.
    """
    inside = sorted(directory.rglob("*"))
    push(path for path in inside if path.is_file())
    push([*(path for path in inside if path.is_dir()), directory, directory.parent, directory.parent.parent])
