"""Rendezvous of the ranks of a job. Rank 0 starts a key-value store at a free port. It writes the store's address and a
new secret to a file on a shared file system. Only this user can read the file.
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
from megatron_rl.run.atomic_files import write_text

POLL_S = 0.05
# timeout in seconds for reaching the store at one address; short, because the address may be of an earlier start
JOIN_S = 2.0
SECRET_BYTES = 32
NOT_OURS = (
    "rank 0 writes it as the same user; if nobody of this job wrote it, remove it, and let only this user write to the "
    "directory"
)


class MeetingError(RuntimeError):
    """Raised when the ranks of a process group do not find each other. The message names the shared file and the
    problem.
    """


def meet(file: Path, *, rank: int, address: str, timeout: timedelta) -> RankStore:
    """Returns the torch store through which the ranks of a process group find each other.

    Every rank calls this function, and must keep the store for the lifetime of the process group.

    `file`: file for the address and secret of the store. Each start of the ranks must use a different file.
    `address`: address of rank 0's host; rank 0 listens only there.
    `timeout`: longest wait for rank 0, and default timeout of requests to the store.

    Raises MeetingError when rank 0 cannot listen at `address`, when another rank does not reach rank 0 within
    `timeout`, and when another user owns `file` or can read it.
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
            # NFS may have cached that the file does not exist; listing the directory bypasses this cache
            if file.parent.exists() and file.name in os.listdir(file.parent):
                record = read_private(file)
                client = KeyValueClient(record["address"], record["port"], bytes.fromhex(record["secret"]), JOIN_S)
                return RankStore(client, timeout)
        except MeetingError:
            raise
        except (KeyValueError, OSError, ValueError, KeyError, TypeError) as error:  # an old or changing file
            why = f"{file} does not lead to rank 0 ({error})"
        if time.monotonic() > end:
            raise MeetingError(f"{why} (waited {timeout.total_seconds():.0f} s)")
        time.sleep(POLL_S)


def write_private(file: Path, value: Any) -> None:
    """Writes `value` as JSON to a file that only this user can read (mode 0600). Replaces the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(value), writer=str(os.getpid()), mode=0o600)


def read_private(file: Path) -> Any:
    """Returns the value in a JSON file that `write_private` wrote.

    Raises MeetingError when another user owns the file or can read it, OSError when the file does not exist, and
    ValueError when the file is not valid JSON.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP):
            raise MeetingError(f"{file} cannot be read ({error.strerror}): {NOT_OURS}") from error
        raise
    with os.fdopen(descriptor) as source:
        status, why = os.fstat(source.fileno()), ""
        if status.st_uid != os.geteuid():
            why = f"{file} belongs to user {status.st_uid}, this rank to {os.geteuid()}: {NOT_OURS}"
        elif status.st_mode & 0o077:
            why = f"{file} can be read by other users (mode {status.st_mode & 0o777:o}), and holds the secret of the "
            why += "ranks: put the run's directory on a file system that keeps modes"
        if why:
            raise MeetingError(why)
        return json.load(source)
