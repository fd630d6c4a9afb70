"""Writes checkpoint directories atomically, and finds complete checkpoints. The caller writes the contents."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.lib.regular_files import read_text
from megatron_rl.run.atomic_files import push, write_text
from megatron_rl.run.file_checksums import digests
from megatron_rl.run.json_lines import UNREADABLE

MANIFEST = "COMPLETE.json"
STATE = "state.json"
_NAME = re.compile(r"iteration_(\d+)|\.iteration_(\d+)\.old")
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written. The message gives the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, which was saved after `number` iterations."""

    number: int
    path: Path

    def read_state(self) -> Any:
        """Returns the value in the checkpoint's `state.json`, which the caller wrote."""
        return read_json(self.path / STATE)


class Checkpoints:
    """The checkpoints `iteration_000012`, ... in one directory. The newest `keep` complete checkpoints are kept.

    Two kinds of checkpoints are kept in addition, and are not counted: checkpoints whose numbers are in `protected`,
    and checkpoints that contain the reference model of a kept checkpoint. A number n in `reference_every` means that a
    resume from checkpoint k reads a reference model from checkpoint k - k % n.

    All ranks save into one temporary directory on a shared file system:
        rank 0:     begin(number)                 then a barrier
        all ranks:  save into pending(number)     then a barrier
        rank 0:     commit(number)                then a barrier before any rank reads the checkpoint
    If the run is killed before `commit`, the previous checkpoint remains the newest. `newest` changes no files. Call
    `newest` on one rank and broadcast the number, so that all ranks use the same checkpoint.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = Path(directory)
        self.keep = keep
        self.protected: frozenset[int] = frozenset()
        self.reference_every: tuple[int, ...] = ()

    def path(self, number: int) -> Path:
        """Returns the directory of the finished checkpoint `number`."""
        return self.directory / f"iteration_{number:06d}"

    def pending(self, number: int) -> Path:
        """Returns the directory in which checkpoint `number` is written before it is committed. Any rank may call this
        method."""
        return self.directory / f".iteration_{number:06d}.tmp"

    def begin(self, number: int) -> Path:
        """Removes the remains of interrupted saves, and creates and returns the empty directory `pending(number)`. Only
        rank 0 calls this method."""
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
        """Renames `pending(number)` to the final name of checkpoint `number`, and removes the oldest checkpoints if
        there are more than `keep`.

        Only rank 0 calls this method, after a barrier. Before the rename, the method writes the manifest, with the size
        and checksum of every file; the ranks may have computed checksums already (`sum_up`). Raises CheckpointError if
        `begin` was not called or nothing was saved.
        """
        pending = self.pending(number)
        if not _files(pending):
            raise CheckpointError(
                f"{pending} has no files: call begin({number}) on rank 0, and save into it on every rank, before commit"
            )
        seal(pending, number)
        self._publish(number)
        self.prune(number)
        return Checkpoint(number, self.path(number))

    def write(self, number: int, save: Callable[[Path], None]) -> Checkpoint:
        """Writes a checkpoint in a single process: `begin`, `save(directory)`, `commit`."""
        save(self.begin(number))
        return self.commit(number)

    def newest(self, verify: Callable[[Path], Sequence[str]] = lambda path: ()) -> Checkpoint | None:
        """Returns the complete checkpoint with the highest number, or None if there is none.

        Damaged checkpoints are skipped with a warning. `verify`: function that makes further checks of a checkpoint's
        directory and returns error messages; an empty list means that the checkpoint is valid.
        """
        for number, path in self._candidates():
            wrong = damage(path) or "; ".join(verify(path))
            if not wrong:
                return Checkpoint(number, path)
            _log.warning("checkpoint %s is skipped: %s", path, wrong)
        return None

    def _candidates(self) -> list[tuple[int, Path]]:
        """Returns [(number, directory)] of all checkpoint directories, highest number first, without checking their
        files. `.iteration_N.old`, which an interrupted `_publish` leaves, comes after `iteration_N`."""
        if not self.directory.is_dir():
            return []
        matches = [(match, path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        numbered = [(int(match[1] or match[2]), path) for match, path in matches]
        return sorted(numbered, key=lambda item: (-item[0], item[1].name.startswith(".")))

    def _publish(self, number: int) -> None:
        """Renames the pending directory to its final name. An existing checkpoint with the same number is moved away
        before the rename and removed after the rename."""
        final, aside = self.path(number), self.directory / f".iteration_{number:06d}.old"
        if final.exists():
            if aside.exists():
                shutil.rmtree(aside)
            os.rename(final, aside)
        os.rename(self.pending(number), final)
        push([self.directory])
        if aside.exists():
            shutil.rmtree(aside)

    def prune(self, just_written: int | None = None) -> None:
        """Removes the oldest checkpoints if there are more than `keep` that are not protected. Only rank 0 calls this
        method. `just_written`: number of a checkpoint that is not removed."""
        complete, references = 0, set[int]()
        for number, path in self._candidates():
            if number in self.protected | references and not path.name.startswith("."):
                pass
            elif complete >= self.keep and number != just_written:
                doomed = self.pending(number)  # an interrupted removal leaves a directory that `begin` removes
                os.rename(path, doomed)
                shutil.rmtree(doomed)
                continue
            elif damage(path) is None:
                complete += 1
            references |= {number - number % every for every in self.reference_every}


def sum_up(directory: Path, places: Mapping[str, int]) -> None:
    """Computes the checksums of the files that this rank wrote into a checkpoint directory, and writes them to files
    that `seal` reads. Each rank calls this function, so that no rank has to read the whole checkpoint.

    `places`: {role: index of this rank among the role's ranks}, of the roles that this rank saved. The files of a role
    are `ROLE/__PLACE_N.distcp`.
    """
    for role, place in places.items():
        files = [str(file.relative_to(directory)) for file in (directory / role).rglob(f"__{place}_*.distcp")]
        write_json(directory / role / f".sums.{place}.json", digests(directory, files))


def seal(directory: Path, number: int) -> None:
    """Writes the manifest of a checkpoint directory, with the size and checksum of every file, and flushes all files to
    the disk. Checksums that ranks computed with `sum_up` are used; all other checksums are computed here."""
    sums: dict[str, str] = {}
    for file_of_rank in directory.glob("*/.sums.*.json"):
        sums |= read_json(file_of_rank)
        file_of_rank.unlink()
    files = {str(file.relative_to(directory)): file.stat().st_size for file in _files(directory)}
    sums |= digests(directory, [name for name in files if name not in sums])
    write_json(directory / MANIFEST, {"number": number, "files": files, "digests": sums})
    push([directory / name for name in files])
    push([folder for folder in (directory, *directory.rglob("*")) if folder.is_dir()])


def damage(path: Path) -> str | None:
    """Returns a description of the damage of a checkpoint directory, or None if all files have the sizes in the
    manifest."""
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
    """Returns {file: SHA-256} from a checkpoint directory's manifest. Returns an empty dict if the manifest is missing
    or cannot be read."""
    try:
        sums = read_json(path / MANIFEST)["digests"]
        return {name: value for name, value in sums.items() if isinstance(value, str)}
    except (OSError, *UNREADABLE):
        return {}


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file. Raises OSError if the file cannot be read, and ValueError if it is damaged."""
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
