"""Opens the files of run directories without following links and without waiting for FIFOs.

Other users may have written to a run directory before its owner took their rights away. Such a user could replace a
file by a link to another file of the owner, or by a FIFO, which blocks its reader. The module imports only the
standard library, because engine servers import it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class UntrustedFile(PermissionError):
    """Raised when a file of a run directory is a link or no regular file, or belongs to another user."""


def regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file, and returns its file descriptor. Used as `open(path, mode, opener=regular)`. `mode`: the
    permissions of a new file.

    Raises UntrustedFile if the path is a link, a FIFO or anything else but a regular file, and if a file is to be
    written and belongs to neither this user nor root.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # ENXIO: a socket, or a FIFO without a reader
            raise UntrustedFile(f"{path} is a link or no regular file: remove it") from None
        raise
    status = os.fstat(descriptor)
    reads, is_file = flags & os.O_ACCMODE == os.O_RDONLY, stat.S_ISREG(status.st_mode)
    if is_file and (reads or status.st_uid in (os.geteuid(), 0)):
        return descriptor
    os.close(descriptor)
    kind = f"belongs to user {status.st_uid}" if is_file else "is a link or no regular file"
    raise UntrustedFile(f"{path} {kind}: remove it")


def read_bytes(path: Path) -> bytes:
    """Returns the content of a regular file. Raises UntrustedFile if the path is a link or no regular file, and
    OSError if the file cannot be read."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Returns the text of a regular file in UTF-8. `errors`: treatment of invalid bytes, as of `open`. Raises OSError
    as `read_bytes`."""
    with open(path, encoding="utf-8", errors=errors, opener=regular) as file:
        return file.read()


def read_own(path: Path, *owners: int) -> str:
    """Returns the text of a regular file that is owned by one of the user ids `owners` (default: this user and root).

    Raises UntrustedFile if the file is owned by another user, or if the path is a link or no regular file, and OSError
    if the file cannot be read.
    """
    with open(path, encoding="utf-8", opener=regular) as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (owners or (os.geteuid(), 0)):
            raise UntrustedFile(f"{path} belongs to user {owner}: remove it, and let only this user write there")
        return file.read()


def move(source: Path, path: Path) -> None:
    """Renames a file to `path`, and replaces the file that has this name. Raises UntrustedFile if `path` is a
    directory."""
    try:
        os.replace(source, path)
    except IsADirectoryError:
        raise UntrustedFile(f"{path} is a directory: remove it") from None


def touch(path: Path) -> None:
    """Creates a regular file if it does not exist, and sets its modification time to now. Raises UntrustedFile as
    `regular`."""
    descriptor = regular(str(path), os.O_WRONLY | os.O_CREAT)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)
