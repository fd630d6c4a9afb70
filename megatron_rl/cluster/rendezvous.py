"""Lets the ranks of a job find each other: rank 0 opens a key-value store at a free port, and writes its address and a
new secret to a shared file that this user alone can read.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl.key_value_store.rank_store import RankStore
from megatron_rl.key_value_store.store_client import KeyValueClient, KeyValueError
from megatron_rl.key_value_store.store_server import KeyValueServer

POLL_S = 0.05
JOIN_S = 2.0  # the longest try to reach a store: the file may be of a start that has ended, and a new one comes
SECRET_BYTES = 32
NOT_OURS = (
    "rank 0 writes it as the same user; if nobody of this job wrote it, remove it, and let only this user write to the "
    "directory"
)


class MeetingError(RuntimeError):
    """Raised when the ranks do not find each other; the message says which file was looked for, and what is wrong."""


def meet(file: Path, *, rank: int, address: str, timeout: timedelta) -> RankStore:
    """Returns the store that a process group starts from. Every rank calls it, and keeps it as long as the group.

    `file` belongs to this start of the ranks alone. Rank 0 listens at `address`, which is that of its host, and nowhere
    else. Raises MeetingError when rank 0 cannot listen, when another rank does not reach it within `timeout`, and when
    somebody else owns `file` or can read it.
    """
    if rank == 0:
        secret = secrets.token_bytes(SECRET_BYTES)
        try:
            server = KeyValueServer(address, secret)
        except OSError as error:
            raise MeetingError(
                f"rank 0 cannot listen at {address} ({error}): MASTER_ADDR must be an address of the first rank's host"
            ) from error
        client = KeyValueClient(address, server.port, secret, timeout.total_seconds())
        weakref.finalize(client, server.close)
        write_private(file, {"address": address, "port": server.port, "secret": secret.hex()})
        return RankStore(client, timeout)
    end = time.monotonic() + timeout.total_seconds()
    why = f"rank 0 did not write {file}: is this directory on a file system that all hosts share?"
    while True:
        try:
            # a listing looks past what NFS remembers of single files
            if file.parent.exists() and file.name in os.listdir(file.parent):
                found = read_private(file)
                client = KeyValueClient(found["address"], found["port"], bytes.fromhex(found["secret"]), JOIN_S)
                return RankStore(client, timeout)
        except MeetingError:
            raise
        except (KeyValueError, OSError, ValueError, KeyError, TypeError) as error:  # it is old, or just being replaced
            why = f"{file} does not lead to rank 0 ({error})"
        if time.monotonic() > end:
            raise MeetingError(f"{why} (waited {timeout.total_seconds():.0f} s)")
        time.sleep(POLL_S)


def write_private(file: Path, value: Any) -> None:
    """Writes JSON to a file that this user alone can read. Whoever reads it sees all of it, or the file before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pending = file.with_name(f".{file.name}.{os.getpid()}")
    pending.unlink(missing_ok=True)
    with os.fdopen(os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(pending, file)


def read_private(file: Path) -> Any:
    """Returns the JSON of a file that `write_private` wrote. Raises MeetingError when another user owns the file or can
    read it, OSError when it is not there, ValueError when it is no JSON.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP):
            raise MeetingError(f"{file} cannot be read ({error.strerror}): {NOT_OURS}") from error
        raise
    with os.fdopen(descriptor) as source:
        status = os.fstat(source.fileno())
        if status.st_uid != os.geteuid():
            raise MeetingError(f"{file} belongs to user {status.st_uid}, this rank to {os.geteuid()}: {NOT_OURS}")
        if status.st_mode & 0o077:
            raise MeetingError(
                f"{file} can be read by other users (mode {status.st_mode & 0o777:o}), and holds the secret of the "
                "ranks: put the run's directory on a file system that keeps modes"
            )
        return json.load(source)
