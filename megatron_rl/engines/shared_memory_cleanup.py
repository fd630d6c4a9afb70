"""Removes the shared memory and the semaphores that killed servers leave in /dev/shm.

vLLM, SGLang, torch and NCCL talk between the processes of a server through files there, whose names say nothing of
their owners. Python's multiprocessing has a process that removes them when all others have ended; killed together with
them, it leaves them until the machine's next start. So a server's owner keeps a list of them, in /dev/shm too, which it
locks while it lives. Whoever comes next on this machine, of the same user, clears the lists without an owner.
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

from megatron_rl import processes

SHARED_MEMORY = Path("/dev/shm")
LISTS = "megatron_rl_servers"  # begins the names of lists; those of refits' slots begin in another way
# Names that Python's shared memory, its semaphores, torch, NCCL, CUDA and vLLM make. A file of any other name may be
# somebody's model, which servers map too, and is never touched.
KINDS = re.compile(
    r"psm_[0-9a-f]+|sem\.mp-\w+|torch_\d+_\w+|nccl-\w+|cuda\.shm\.[\w.]+"
    r"|(VLLM_OBJECT_STORAGE_SHM_BUFFER|vllm_offload|vllm_ec)_[\w.-]+"
)
MAPPED = re.compile(r"\S+ \S+ \S+ \S+ (\d+) +/dev/shm/([^/\n]+)$", re.MULTILINE)  # of /proc/PID/maps: inode, name
SPARE_S = 1.0  # between a file's time and the clock


class Segments:
    """The list of one server's segments. It is for the process that starts the server."""

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._directory, self._begun = directory, time.time()
        self._known: set[tuple[str, int]] = set()
        self._file: int | None = None

    def note(self, pids: Iterable[int]) -> None:
        """Adds to the list what some processes have mapped now, if it was made since this object was."""
        found = {one for pid in pids for one in mapped(pid)} - self._known
        new = {one for one in found if self._is_own(*one)}
        if new:
            self._known |= new
            self._write()

    def remove(self) -> None:
        """Removes what is on the list and nobody uses, and the list. To be called when the server has ended."""
        _unlink_unused(self._directory, self._known)
        self._known = set()
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _is_own(self, name: str, inode: int) -> bool:
        with contextlib.suppress(OSError):
            about = (self._directory / name).lstat()
            same = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and about.st_ino == inode
            return same and KINDS.fullmatch(name) is not None and about.st_ctime > self._begun - SPARE_S
        return False

    def _write(self) -> None:
        if self._file is None:
            self._path = self._directory / f"{LISTS}-{os.getuid()}-{uuid.uuid4().hex[:16]}"
            with contextlib.suppress(OSError):  # without room there, or without locks, what is left stays
                self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._file is not None:
            data = json.dumps(sorted(self._known)).encode()
            with contextlib.suppress(OSError):
                os.pwrite(self._file, data, 0)  # a list only grows


def mapped(pid: int) -> set[tuple[str, int]]:
    """Returns (name, inode) of the files of /dev/shm that a process has mapped; none of one that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return set()
    return {(name, int(inode)) for inode, name in MAPPED.findall(text)}


def clear(directory: Path = SHARED_MEMORY) -> list[str]:
    """Removes what dead owners of this user left, and returns the names. A server that outlived its owner keeps all."""
    out: list[str] = []
    for path in directory.glob(f"{LISTS}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it is gone, or its owner lives
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                about = os.fstat(file)
                if about.st_uid != os.getuid() or not about.st_size:  # an empty one has just been made
                    continue
                listed = _read(file, about.st_size)
                out += _unlink_unused(directory, listed)
                if not any(_there(directory / name, inode) for name, inode in listed):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)
    return out


def _read(file: int, size: int) -> set[tuple[str, int]]:
    """Returns a list's lines; none of a damaged one."""
    with contextlib.suppress(ValueError, TypeError):
        rows = json.loads(os.pread(file, size, 0))
        return {(str(name), int(inode)) for name, inode in rows if KINDS.fullmatch(str(name))}
    return set()


def _unlink_unused(directory: Path, listed: Iterable[tuple[str, int]]) -> list[str]:
    left = {(name, inode) for name, inode in listed if _there(directory / name, inode)}
    if not left:
        return []
    for pid in processes.everybody():
        left -= mapped(pid)
    for name, _ in left:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    return [name for name, _ in left]


def _there(path: Path, inode: int) -> bool:
    try:
        about = path.lstat()
    except OSError:
        return False
    return about.st_ino == inode and about.st_uid == os.getuid()
