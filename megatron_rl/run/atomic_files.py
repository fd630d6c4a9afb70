"""Writes files atomically and durably, and reads files after checking that a trusted user owns them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, through a temporary file in the same directory and a rename. When the function
    returns, the file has been flushed to the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    push([path.parent])


def read_own(path: Path, *owners: int) -> str:
    """Returns the text of a file that is owned by one of the user ids `owners` (default: this user and root).

    The check protects group-writable directories: any group member can create a file there, but not in another user's
    name.
    Raises PermissionError if the file is owned by another user, and OSError if it cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (owners or (os.geteuid(), 0)):
            raise PermissionError(f"{path} belongs to user {owner}: remove it, and let only this user write there")
        return file.read()


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
