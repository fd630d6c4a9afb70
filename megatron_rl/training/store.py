"""Keeps the iterations of a run on disk, one Parquet file each: for a killed run, collecting ahead, replays and the
report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError

from megatron_rl.run.atomic_files import push
from megatron_rl.run.json_lines import RESUME, DiskError
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.rollout_parquet import (
    EXACT,
    READABLE,
    REPEATED,
    SCHEMA,
    RolloutText,
    from_table,
    num_bytes,
    pieces_of,
    to_table,
)
from megatron_rl.types import STEP, Rollout

FORMAT = 4  # of a file; a file of another format is not read
ROLLOUTS = "rollouts"  # the directory of the iterations within a run's
CHUNK_BYTES = 32 << 20  # of arrays that are written at once
State = dict[str, Any]  # JSON values
Decode = Callable[[str, np.ndarray], "TokenText"]  # (role, tokens [T]) -> their text
_NAME = re.compile(r"iteration_[0-9]{1,18}\.parquet")
_HEAD = b"megatron_rl"  # key of the file's metadata
_DIGEST_BYTES, _TAIL_BYTES = 16, 8  # before the footer, and after it: its length and Parquet's magic number
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, RecursionError,
    AttributeError, pa.ArrowException, SafetensorError,
)  # fmt: skip
_log = logging.getLogger(__name__)


class TokenText(Protocol):
    """The text of some tokens: a text.Decoded."""

    @property
    def text(self) -> str: ...

    def text_of(self, first: int, end: int) -> str: ...


class StoreError(RuntimeError):
    """An iteration that cannot be read or must not be; the message names the file and the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileHead:
    """The metadata of a file: its iteration, the settings it was collected under, and what is not in its rows. JSON
    values."""

    format: int
    number: int  # of the iteration
    roles: tuple[str, ...]  # that the iteration trains, in order
    fingerprint: str  # of the settings that it was collected under
    kept: bool  # with readable texts, for the report
    rows: Mapping[str, int]  # number of rollouts by role, in the order of training
    metrics: Mapping[str, Mapping[str, float]]  # by role
    state: State  # of the collector after the iteration


@dataclass(frozen=True, slots=True)
class Waiting:
    """The number of iterations that a stopped run had collected ahead of its checkpoint: those that are kept for the
    run that goes on, and those that were removed."""

    kept: int
    dropped: int


class IterationStore:
    """The files iteration_000012.parquet in one directory, written and removed by one driver.

    A file stays until a complete checkpoint holds its iteration, so that a killed run collects no iteration twice.
    Afterwards the file stays when its number is a multiple of `keep_every` (0: never). The texts of such an iteration
    are decoded, by `decode`, for the report.
    """

    def __init__(
        self, directory: Path, fingerprint: str = "", *, keep_every: int = 1, decode: Decode | None = None
    ) -> None:
        """`fingerprint` stands for the settings of the run: `get` passes over iterations that were collected under
        others."""
        self.directory = Path(directory)
        self._fingerprint, self._every, self._decode = fingerprint, keep_every, decode
        self._dropped = 0  # iterations before this number were looked at by `drop`

    def path(self, number: int) -> Path:
        return self.directory / f"iteration_{number:06d}.parquet"

    def keeps(self, number: int) -> bool:
        """Returns whether the iteration's file stays when a checkpoint holds it."""
        return self._every > 0 and number % self._every == 0

    def put(self, iteration: Iteration, collected: Collected, state: State) -> Path:
        """Writes the iteration, whole or not at all. `state` is the collector's after the iteration.

        Raises TypeError for a payload, metric or state that is not JSON, and DiskError when the disk does not take it.
        """
        kept = self._decode is not None and self.keeps(iteration.number)
        head = {
            "format": FORMAT,
            "number": iteration.number,
            "roles": list(iteration.roles),
            "fingerprint": self._fingerprint,
            "kept": kept,
            "rows": {role: len(rollouts) for role, rollouts in collected.rollouts.items()},
            "metrics": {role: {name: float(v) for name, v in own.items()} for role, own in collected.metrics.items()},
            "state": state,
        }
        tables = _tables(iteration.number, collected, self._decode if kept else None)
        path = self.path(iteration.number)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(head), tables)
        except OSError as error:
            raise DiskError(f"{path} cannot be written ({_one_line(error)}): {RESUME}") from error
        return path

    def get(self, iteration: Iteration) -> tuple[Collected, State] | None:
        """Returns what `put` was given for the iteration; None when the iteration is to be collected.

        An iteration is to be collected when it has no file, when it was collected under other settings or for other
        roles, and, with a warning, when its file is damaged.
        """
        path = self.path(iteration.number)
        if not path.is_file():
            return None
        try:
            with _opened(path) as file:
                head = _head(file)
                if (head.fingerprint, head.roles) != (
                    self._fingerprint,
                    iteration.roles,
                ) or head.number != iteration.number:
                    return None
                return Collected(rollouts=_rollouts(file, head), metrics=head.metrics), head.state
        except _UNREADABLE as error:
            _log.warning(
                "%s cannot be read (%s): iteration %d is collected again", path, _one_line(error), iteration.number
            )
            return None

    def read(self, iteration: Iteration) -> tuple[Collected, State]:
        """Returns the iteration whatever settings it was collected under, for a replay.

        Raises FileNotFoundError when it is not there, and StoreError when it is damaged or trained other roles.
        """
        path = self.path(iteration.number)
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path}: iteration {iteration.number} ({', '.join(iteration.roles)}) was not kept there. "
                "A run keeps every iteration with run.save_rollouts_every=1; replay such a run, or fewer "
                "iterations (run.iterations)"
            )
        try:
            with _opened(path) as file:
                head = _head(file)
                if head.roles == iteration.roles:
                    return Collected(rollouts=_rollouts(file, head), metrics=head.metrics), head.state
        except _UNREADABLE as error:
            raise StoreError(
                f"{path} cannot be read ({_one_line(error)}): bring a whole copy of it, or replay another run"
            ) from None
        raise StoreError(
            f"{path} trained {', '.join(head.roles)}; iteration {iteration.number} of this run trains "
            f"{', '.join(iteration.roles)}: replay a run of the same recipe and arguments"
        )

    def drop(self, before: int) -> None:
        """Removes files of iterations before number `before`, which a complete checkpoint holds, unless they are kept.

        A file that was written to be kept stays also when the run went on with another `keep_every`.
        """
        for path in iteration_files(self.directory):
            number = iteration_number(path)
            if self._dropped <= number < before and not self.keeps(number):
                head = _head_of(path, "it is removed")
                if head is None or not head.kept:
                    path.unlink()
        self._dropped = max(self._dropped, before)

    def clean(self, number: int, *, fresh: bool = False) -> Waiting:
        """Removes what nobody will read when a run goes on at iteration `number`: iterations from there on that were
        collected under other settings or are damaged (where the run is to be `fresh`, all of them), and files not
        written to their end. Returns how many iterations from there on were kept and removed.
        """
        kept = dropped = 0
        for path in self.directory.glob(".iteration_*.tmp"):
            path.unlink()
        for path in iteration_files(self.directory):
            if iteration_number(path) < number:
                continue
            head = None if fresh else _head_of(path, "it is removed")
            if head is None or head.fingerprint != self._fingerprint:
                path.unlink()
                dropped += 1
            else:
                kept += 1
        return Waiting(kept, dropped)


def open_replay(place: Path, *, own: Path) -> IterationStore:
    """Returns the store to replay from. `place` is a run directory or its rollouts, `own` this run's directory.

    Raises FileNotFoundError when no iteration is there, and StoreError for the run's own iterations, which it would
    write over.
    """
    place = Path(place)
    directory = place / ROLLOUTS if (place / ROLLOUTS).is_dir() else place
    if directory.resolve() == (Path(own) / ROLLOUTS).resolve():
        raise StoreError(f"debug.replay = {place} is this run itself: give the replaying run another run.name")
    if not iteration_files(directory):
        raise FileNotFoundError(
            f"debug.replay = {place}: no iteration_*.parquet there; give the directory of a run that kept its "
            "iterations (run.save_rollouts_every=1)"
        )
    return IterationStore(directory)


def fingerprint(settings: str) -> str:
    """Returns a short text that differs where the settings or the files' format do."""
    return hashlib.sha256(f"{FORMAT}\n{settings}".encode()).hexdigest()[:16]


def iteration_files(directory: Path) -> list[Path]:
    """Returns the files of the iterations in a run's directory of rollouts, by iteration."""
    found = Path(directory).glob("iteration_*.parquet")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=iteration_number)


def iteration_number(path: Path) -> int:
    return int(path.stem.removeprefix("iteration_"))


def read_rows(path: Path, role: str | None = None) -> list[dict[str, Any]]:
    """Returns the columns for people of one file, a mapping per rollout; of one role if it is named.

    `rewards` is a mapping too. The texts are None in a file that was not kept for the report. Raises StoreError for a
    damaged file.
    """
    try:
        with _opened(path) as file:
            table = file.read(columns=READABLE.names, use_threads=False)  # threads take memory, and files are small
        if table.num_columns < len(READABLE.names):
            raise ValueError("it lacks columns, as another version wrote it")
        rows = table.to_pylist()
    except _UNREADABLE as error:
        raise StoreError(f"{path} cannot be read ({_one_line(error)}): remove it") from None
    return [{**row, "rewards": dict(row["rewards"] or [])} for row in rows if role in (None, row["role"])]


def _tables(number: int, collected: Collected, decode: Decode | None) -> Iterator[pa.Table]:
    """Yields the rows role by role, in pieces of about CHUNK_BYTES, so that writing takes little memory."""
    for role, rollouts in collected.rollouts.items():
        first, size = 0, 0
        for end, rollout in enumerate(rollouts, start=1):
            size += num_bytes(rollout)
            if size >= CHUNK_BYTES or end == len(rollouts):
                chunk = rollouts[first:end]
                yield to_table(number, chunk, None if decode is None else _texts(role, chunk, decode))
                first, size = end, 0


def _texts(role: str, rollouts: Sequence[Rollout], decode: Decode) -> list[RolloutText]:
    prompts: dict[bytes, str] = {}  # a group has one prompt
    out = []
    for rollout in rollouts:
        start = rollout.start
        prompt = rollout.tokens[:start]
        if (key := prompt.tobytes()) not in prompts:
            prompts[key] = decode(role, prompt).text
        rest = decode(role, rollout.tokens[start:])
        steps = [
            rest.text_of(first - start, end - start) if first >= start else decode(role, rollout.tokens[first:end]).text
            for first, end in rollout.annotations_of(STEP).ranges.tolist()
        ]
        pieces = [(own, rest.text_of(own.first - start, own.end - start)) for own in pieces_of(rollout)]
        out.append(RolloutText(prompt=prompts[key], text=rest.text, steps=steps, pieces=pieces))
    return out


def _write(path: Path, head: str, tables: Iterator[pa.Table]) -> None:
    """Writes a file atomically, through a temporary file and a rename, and flushes it to the disk before the rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    schema = SCHEMA.with_metadata({_HEAD: head.encode()})
    try:
        with pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=REPEATED,  # pyright: ignore[reportArgumentType]  # the stub knows no column names
            column_encoding={"logprobs.list.element": "BYTE_STREAM_SPLIT"},
            write_statistics=False,
            write_page_checksum=True,
        ) as writer:
            for table in tables:
                writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=table.num_rows)
        _seal(temporary)
        push([temporary])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    push([path.parent])


def _seal(path: Path) -> None:
    """Inserts a digest of a Parquet file's footer before the footer, where Parquet readers do not look. Pages have
    checksums of their own; footers have none."""
    with path.open("r+b") as file:
        footer = _footer(file)
        file.seek(-len(footer), os.SEEK_END)
        file.write(_digest(footer) + footer)


def _footer(file: BinaryIO) -> bytes:
    """Returns the footer with the bytes after it. Raises OSError or ValueError for a file too short to have one."""
    file.seek(-_TAIL_BYTES, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little") + _TAIL_BYTES
    file.seek(-length, os.SEEK_END)
    return file.read(length)


def _opened(path: Path) -> pq.ParquetFile:
    """Opens a file and checks the digest of its footer. Raises ValueError when the digest is missing or wrong."""
    with path.open("rb") as file:
        footer = _footer(file)
        file.seek(-len(footer) - _DIGEST_BYTES, os.SEEK_END)
        if file.read(_DIGEST_BYTES) != _digest(footer):
            raise ValueError("it is damaged, or it is no iteration of a run")
    return pq.ParquetFile(path, page_checksum_verification=True)


def _head(file: pq.ParquetFile) -> _FileHead:
    """Returns the metadata of a file. Raises ValueError for another format, and for a file with missing rows."""
    values = json.loads(file.metadata.metadata[_HEAD])
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']}, and this version reads {FORMAT}")
    head = _FileHead(**{**values, "roles": tuple(values["roles"])})
    if file.metadata.num_rows != sum(head.rows.values()):
        raise ValueError(f"it has {file.metadata.num_rows} rows of {sum(head.rows.values())}")
    return head


def _head_of(path: Path, consequence: str) -> _FileHead | None:
    """Returns the metadata of a file; None, with a warning, for a file that cannot be read."""
    try:
        with _opened(path) as file:
            return _head(file)
    except _UNREADABLE as error:
        _log.warning("%s cannot be read (%s): %s", path, _one_line(error), consequence)
        return None


def _rollouts(file: pq.ParquetFile, head: _FileHead) -> dict[str, list[Rollout]]:
    """Returns the rollouts by role, in the order that they were collected in."""
    by_role: dict[str, list[Rollout]] = {role: [] for role in head.rows}
    for group in range(file.num_row_groups):
        for rollout in from_table(file.read_row_group(group, _EXACTLY)):
            by_role[rollout.role].append(rollout)
    if {role: len(rollouts) for role, rollouts in by_role.items()} != dict(head.rows):
        raise ValueError("its rows are not those of its roles")
    return by_role


_EXACTLY = ["role", "group", "stop", *EXACT.names]  # the columns that `from_table` reads


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
