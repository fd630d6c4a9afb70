"""Removes the shared memory and the semaphores that killed servers leave in /dev/shm.

The processes of a server communicate (vLLM, SGLang, torch, NCCL) through files in /dev/shm. The names of these files do
not identify their owner. Python's multiprocessing has a process that removes the files when all other processes have
ended. If this process is killed too, the files stay until the machine is rebooted. Therefore, the process that starts a
server (the owner) keeps a list of the server's files, also in /dev/shm, and locks the list as long as the owner runs.
Later processes of the same user on this machine remove the files in lists whose owner has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.lib import processes

SHARED_MEMORY = Path("/dev/shm")
# prefix of the names of the list files; shared memory of weight syncs (refits) has another prefix
LISTS = "megatron_rl_servers"
# Matches the names of files that Python's shared memory and semaphores, torch, NCCL, CUDA and vLLM create.
# Files with other names are never removed, because they may be model files, which servers map too.
KINDS = re.compile(
    r"psm_[0-9a-f]+|sem\.mp-\w+|torch_\d+_\w+|nccl-\w+|cuda\.shm\.[\w.]+"
    r"|(VLLM_OBJECT_STORAGE_SHM_BUFFER|vllm_offload|vllm_ec)_[\w.-]+"
)
MAPPED = re.compile(r"\S+ \S+ \S+ \S+ (\d+) +/dev/shm/([^/\n]+)$", re.MULTILINE)  # line of /proc/PID/maps: inode, name
SPARE_S = 1.0  # seconds by which the time of a new file may lag behind the clock


class Segments:
    """The list of one server's shared memory segments (files in /dev/shm), kept by the process that starts the
    server.
    """

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._directory, self._begun = directory, time.time()
        self._known: set[tuple[str, int]] = set()
        self._file: int | None = None

    def note(self, pids: Iterable[int]) -> None:
        """Adds the segments that the given processes have mapped now, if the segments were created after this
        object.
        """
        found = {one for pid in pids for one in mapped(pid)} - self._known
        new = {
            (name, inode)
            for name, inode in found
            if KINDS.fullmatch(name)
            and (about := _own(self._directory / name, inode)) is not None
            and stat.S_ISREG(about.st_mode)
            and about.st_ctime > self._begun - SPARE_S
        }
        if new:
            self._known |= new
            self._write()

    def remove(self) -> None:
        """Removes the listed segments that no process uses, and the list file. Call it after the server has ended."""
        _unlink_unused(self._directory, self._known)
        self._known = set()
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            self._path = self._directory / f"{LISTS}-{os.getuid()}-{uuid.uuid4().hex[:16]}"
            # If the list file cannot be created (e.g. /dev/shm is full), the segments of a killed server remain.
            with contextlib.suppress(OSError):
                self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._file is not None:
            data = json.dumps(sorted(self._known)).encode()
            with contextlib.suppress(OSError):
                os.pwrite(self._file, data, 0)  # overwrites all of the old data, because the list only grows


def mapped(pid: int) -> set[tuple[str, int]]:
    """Returns (name, inode) of the files of /dev/shm that a process has mapped; an empty set if the process cannot be
    read.
    """
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return set()
    return {(name, int(inode)) for inode, name in MAPPED.findall(text)}


def clear(directory: Path = SHARED_MEMORY) -> list[str]:
    """Removes the shared memory segments of servers whose owner process (of this user) has died, and returns the names
    of the segments. Segments of a server that is still running are kept.
    """
    out: list[str] = []
    for path in directory.glob(f"{LISTS}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # the list is gone, or its owner lives
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                about = os.fstat(file)
                if about.st_uid != os.getuid() or not about.st_size:  # an empty list has just been created
                    continue
                listed = _read(file, about.st_size)
                out += _unlink_unused(directory, listed)
                if all(_own(directory / name, inode) is None for name, inode in listed):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)
    return out


def _read(file: int, size: int) -> set[tuple[str, int]]:
    """Returns the entries (name, inode) of a list file; an empty set if the file is damaged."""
    with contextlib.suppress(ValueError, TypeError):
        rows = json.loads(os.pread(file, size, 0))
        return {(str(name), int(inode)) for name, inode in rows if KINDS.fullmatch(str(name))}
    return set()


def _unlink_unused(directory: Path, listed: Iterable[tuple[str, int]]) -> list[str]:
    left = {(name, inode) for name, inode in listed if _own(directory / name, inode) is not None}
    if not left:
        return []
    for pid in processes.everybody():
        left -= mapped(pid)
    for name, _ in left:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    return [name for name, _ in left]


def _own(path: Path, inode: int) -> os.stat_result | None:
    """Returns the attributes of a file if it belongs to this user and has this inode, otherwise None."""
    with contextlib.suppress(OSError):
        about = path.lstat()
        if about.st_ino == inode and about.st_uid == os.getuid():
            return about
    return None
