"""Writes and finds atomic checkpoint directories, each complete or not there. The caller decides what lies inside."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.run.atomic_files import push, write_text
from megatron_rl.run.file_checksums import digests
from megatron_rl.run.json_lines import UNREADABLE

MANIFEST = "COMPLETE.json"
STATE = "state.json"
_NAME = re.compile(r"iteration_(\d+)|\.iteration_(\d+)\.old")
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written; the message says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint, made when `number` iterations were done."""

    number: int
    path: Path

    def read_state(self) -> Any:
        """Returns what the caller wrote to `state.json`."""
        return read_json(self.path / STATE)


class Checkpoints:
    """The checkpoints `iteration_000012`, ... under one directory. The newest `keep` complete ones stay.

    All ranks save into one temporary directory on a file system that they share:
        rank 0:     begin(number)                 then a barrier
        all ranks:  save into pending(number)     then a barrier
        rank 0:     commit(number)                then a barrier before anybody reads it
    A run that is killed anywhere in between finds the checkpoint before. `newest` only reads. Call it on one rank and
    broadcast the number, so that all ranks agree.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"run.keep = {keep}: at least one checkpoint must stay; set it to 1 or more")
        self.directory = Path(directory)
        self.keep = keep

    def path(self, number: int) -> Path:
        """Returns the directory of the finished checkpoint `number`."""
        return self.directory / f"iteration_{number:06d}"

    def pending(self, number: int) -> Path:
        """Returns the directory in which `number` is written before it is committed. Any rank may call it."""
        return self.directory / f".iteration_{number:06d}.tmp"

    def begin(self, number: int) -> Path:
        """Removes what interrupted writes left and makes the empty `pending(number)`. Only rank 0 calls it."""
        if number < 0:
            raise CheckpointError(f"checkpoint number {number}: give the number of iterations done, 0 or more")
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".iteration_*.tmp"):
            shutil.rmtree(leftover)
        for replaced in self.directory.glob(".iteration_*.old"):
            if damage(self.directory / replaced.name[1:].removesuffix(".old")) is None:
                shutil.rmtree(replaced)
        pending = self.pending(number)
        pending.mkdir()
        return pending

    def commit(self, number: int) -> Checkpoint:
        """Makes `pending(number)` the checkpoint `number`, in one rename, and removes the oldest beyond `keep`.

        Only rank 0 calls it, after a barrier. The manifest lists every file with its size and its checksum, which ranks
        may have computed (`sum_up`). Raises CheckpointError when
        nothing was begun or nothing was saved.
        """
        pending = self.pending(number)
        if not pending.is_dir():
            raise CheckpointError(f"{pending} does not exist: call begin({number}) on rank 0 before saving")
        if not _files(pending):
            raise CheckpointError(f"{pending} is empty: every rank must save into it before commit({number})")
        seal(pending, number)
        self._publish(number)
        self._prune(number)
        return Checkpoint(number, self.path(number))

    def write(self, number: int, save: Callable[[Path], None]) -> Checkpoint:
        """Begins, saves and commits a checkpoint in one process."""
        save(self.begin(number))
        return self.commit(number)

    def newest(self, verify: Callable[[Path], Sequence[str]] = lambda path: ()) -> Checkpoint | None:
        """Returns the complete checkpoint with the highest number; None without one.

        A warning names each damaged one above. `verify` returns what else is wrong with one.
        """
        for number, path in self._candidates():
            wrong = damage(path) or "; ".join(verify(path))
            if not wrong:
                return Checkpoint(number, path)
            _log.warning("checkpoint %s is skipped: %s", path, wrong)
        return None

    def _candidates(self) -> list[tuple[int, Path]]:
        """Lists (number, directory), highest number first. For one number the plain name comes before
        `.iteration_N.old`."""
        if not self.directory.is_dir():
            return []
        found = [(match, path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        numbered = [(int(match[1] or match[2]), path) for match, path in found]
        return sorted(numbered, key=lambda item: (-item[0], item[1].name.startswith(".")))

    def _publish(self, number: int) -> None:
        """Renames the pending directory to its final name. An older checkpoint of the same number is renamed first and
        removed afterwards."""
        final, aside = self.path(number), self.directory / f".iteration_{number:06d}.old"
        if final.exists():
            if aside.exists():
                shutil.rmtree(aside)
            os.rename(final, aside)
        os.rename(self.pending(number), final)
        push([self.directory])
        if aside.exists():
            shutil.rmtree(aside)

    def _prune(self, just_written: int) -> None:
        complete = 0
        for number, path in self._candidates():
            if complete >= self.keep and number != just_written:
                doomed = self.pending(
                    number
                )  # a removal that is cut short leaves a directory that counts as a leftover
                os.rename(path, doomed)
                shutil.rmtree(doomed)
            elif damage(path) is None:
                complete += 1


def sum_up(directory: Path, rank: int) -> None:
    """Writes the checksums of the files that one rank wrote into a checkpoint directory (`__RANK_N.distcp`) to a file
    that `seal` reads. One rank alone would have to read the whole checkpoint again."""
    own = [str(file.relative_to(directory)) for file in directory.rglob(f"__{rank}_*.distcp")]
    write_json(directory / f".sums.{rank}.json", digests(directory, own))


def seal(directory: Path, number: int) -> None:
    """Writes the manifest of a checkpoint directory, with the size and the checksum of every file, and flushes
    everything to the disk. Checksums that ranks have computed (`sum_up`) are taken from their files."""
    known: dict[str, str] = {}
    for left in directory.glob(".sums.*.json"):
        known |= read_json(left)
        left.unlink()
    files = {str(file.relative_to(directory)): file.stat().st_size for file in _files(directory)}
    known |= digests(directory, [name for name in files if name not in known])
    write_json(directory / MANIFEST, {"number": number, "files": files, "digests": known})
    push([directory / name for name in files])
    push([folder for folder in (directory, *directory.rglob("*")) if folder.is_dir()])


def damage(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint directory, or None when its manifest and all file sizes agree."""
    if not (path / MANIFEST).is_file():
        return f"it has no {MANIFEST}, so it was never finished"
    try:
        files = read_json(path / MANIFEST)["files"].items()
    except (OSError, *UNREADABLE) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    for name, size in files:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None


def known_digests(path: Path) -> dict[str, str]:
    """Returns the checksums in a checkpoint directory's manifest as {file: SHA-256}. Returns an empty dict when the
    manifest is missing or cannot be read."""
    try:
        found = read_json(path / MANIFEST)["digests"]
        return {name: value for name, value in found.items() if isinstance(value, str)}
    except (OSError, *UNREADABLE):
        return {}


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file. Raises OSError, and ValueError for a file that is damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
