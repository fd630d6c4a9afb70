"""Writes files atomically and durably, and reads files that only a trusted user may have written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically: through a temporary file in the same directory and a rename. The file is on the
    disk when the function returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    push([path.parent])


def read_own(path: Path, *owners: int) -> str:
    """Returns the text of a file that belongs to one of the users `owners` (default: this user, or root).

    Any member of a group can put a file into a directory that the group may write to, but cannot give it to another
    user. Raises PermissionError when the file belongs to another user, and OSError when it cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (owners or (os.geteuid(), 0)):
            raise PermissionError(f"{path} belongs to user {owner}: remove it, and let only this user write there")
        return file.read()


def push(paths: Iterable[Path]) -> None:
    """Flushes files or directories to the disk, so that a later rename never reaches the disk before their contents."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def push_tree(directory: Path) -> None:
    """Flushes a directory, everything below it and the two directories above it to the disk. The two directories above
    may be as new as the directory itself."""
    inside = sorted(directory.rglob("*"))
    push(path for path in inside if path.is_file())
    push([*(path for path in inside if path.is_dir()), directory, directory.parent, directory.parent.parent])
