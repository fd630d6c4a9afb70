"""Lets the ranks of a job find each other: rank 0 listens at a free port and writes its address to a shared file."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl.run.checkpoint import read_json, write_json

POLL_S = 0.2


class MeetingError(RuntimeError):
    """Raised when rank 0 did not write its address; the message says where it was looked for."""


def meet(file: Path, *, rank: int, world_size: int, address: str, timeout: timedelta) -> dist.TCPStore:
    """Returns the store that a process group starts from. Every rank calls it.

    `file` belongs to this start of the ranks alone. `address` is that of this host; rank 0 listens there. Raises
    MeetingError when rank 0 does not write `file` within `timeout`.
    """
    if rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        store = dist.TCPStore(address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        write_json(file, {"address": address, "port": store.port})
        return store
    end = time.monotonic() + timeout.total_seconds()
    # a listing looks past what NFS remembers of single files
    while file.name not in (os.listdir(file.parent) if file.parent.exists() else ()):
        if time.monotonic() > end:
            raise MeetingError(
                f"rank 0 did not write {file} within {timeout.total_seconds():.0f} s: "
                "is this directory on a shared file system?"
            )
        time.sleep(POLL_S)
    found = read_json(file)
    return dist.TCPStore(found["address"], found["port"], world_size, is_master=False, timeout=timeout)
