"""Stores the iterations of a run on disk, one Parquet file each. The files are used to resume a run, to generate
rollouts ahead of training, to replay a run, and for the report.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.lib.regular_files import regular
from megatron_rl.lib.user_code import one_line
from megatron_rl.run.atomic_files import replacing
from megatron_rl.run.json_lines import RESUME, DiskError
from megatron_rl.texts.text import Decoded
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
from megatron_rl.training.write_ahead import WriteAhead
from megatron_rl.types import STEP, Rollout

FORMAT = 7  # version of the file format; files of other versions are rejected
ROLLOUTS = "rollouts"  # name of the subdirectory of a run directory that holds the iterations
CHUNK_BYTES = 32 << 20  # approximate size of the arrays that are written in one chunk
State = dict[str, Any]  # a state of JSON values, for checkpoints
Decode = Callable[[str, np.ndarray], Decoded]  # (role, tokens [T]) -> decoded text
_NAME = re.compile(r"iteration_[0-9]{1,18}\.parquet")
_HEAD = b"megatron_rl"  # key of the project's entry in the file's metadata
# Number of bytes of the digest that is before the Parquet footer, and number of bytes that are after the footer (the
# footer's length and the magic number).
_DIGEST_BYTES, _TAIL_BYTES = 16, 8
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, RecursionError,
    AttributeError, pa.ArrowException,
)  # fmt: skip
_log = logging.getLogger(__name__)


class StoreError(RuntimeError):
    """Raised if the file of an iteration cannot be read or must not be used. The message names the file and the
    remedy.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileHead:
    """The metadata of a file as JSON values: the iteration, the settings under which its rollouts were generated, and
    all other data that is not per rollout. The metrics are those of the rollout stage.
    """

    format: int
    number: int  # number of the iteration
    roles: tuple[str, ...]  # roles that the iteration trains, in order
    fingerprint: str  # hash of the settings under which the rollouts were generated, see `fingerprint`
    kept: bool  # True if the file has decoded texts for the report
    rows: Mapping[str, int]  # number of rollouts of each role
    metrics: Mapping[str, Mapping[str, float]]  # metrics by role
    handed_over: Mapping[str, Any]  # values of Collected.handed_over
    data: State  # positions of the prompt readers after the iteration


@dataclass(frozen=True, slots=True)
class Waiting:
    """Counts of the iterations that a stopped run had generated ahead of its last checkpoint. `kept`: number of files
    that the resumed run uses. `dropped`: number of files that were removed. `begun`: number of incomplete iterations
    whose finished samples the resumed run uses.
    """

    kept: int
    dropped: int
    begun: int = 0


class IterationStore:
    """The iteration files (iteration_000012.parquet, ...) of one directory, written and removed by one driver.

    A file has an iteration as the method `rollout` of the recipe returned it, before scores and credit. A process that
    reads the file computes both again. The readable columns show the advantages and rewards after the credit, if they
    were computed when the file was written.

    A file is kept until a checkpoint that is completely written covers its iteration, so a run that is killed and
    resumed does not generate an iteration twice. Then the file is removed, unless the iteration's number is a multiple
    of `keep_every` (0: all files are removed). The texts of permanently kept iterations are decoded with `decode`, for
    the report. `ahead` has the write-ahead files of iterations that are not complete yet.
    """

    def __init__(
        self, directory: Path, fingerprint: str = "", *, keep_every: int = 1, decode: Decode | None = None
    ) -> None:
        """Opens the store of a directory. `fingerprint` is a hash of the settings of the run; `get` ignores files that
        were written under other settings.
        """
        self.directory = Path(directory)
        self._fingerprint, self._every, self._decode = fingerprint, keep_every, decode
        self.ahead = WriteAhead(self.directory, fingerprint)
        self._dropped = 0  # number of the iteration before which `drop` has already removed all files

    def path(self, number: int) -> Path:
        return self.directory / f"iteration_{number:06d}.parquet"

    def keeps(self, number: int) -> bool:
        """Returns whether the file of iteration `number` is kept after a checkpoint covers the iteration."""
        return self._every > 0 and number % self._every == 0

    def put(
        self, iteration: Iteration, collected: Collected, data: State, *, credited: Collected | None = None
    ) -> Path:
        """Writes the file of an iteration atomically, and removes the iteration's write-ahead file.

        `collected`: the iteration before scores and credit. `data`: positions of the prompt readers after the
        iteration. `credited`: the iteration after the credit, which determines only the readable columns.

        Raises TypeError if a payload, metric or position is not JSON, and DiskError if the file cannot be written.
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
            "handed_over": collected.handed_over,
            "data": data,
        }
        tables = _tables(iteration.number, collected, credited, self._decode if kept else None)
        path = self.path(iteration.number)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(head), tables)
            self.ahead.drop(iteration.number)
        except OSError as error:
            raise DiskError(f"{path} cannot be written ({one_line(error)}): {RESUME}") from error
        return path

    def get(self, iteration: Iteration) -> tuple[Collected, State] | None:
        """Returns the data given to `put` for this iteration, or None if the rollouts must be generated.

        Returns None if the iteration has no file or its file was written under other settings or for other roles. Also
        returns None, with a warning, if the file is damaged.
        """
        path = self.path(iteration.number)
        if not path.is_file():
            return None
        wanted = self._fingerprint, iteration.roles, iteration.number
        try:
            with _opened(path) as file:
                head = _head(file)
                if (head.fingerprint, head.roles, head.number) == wanted:
                    return _collected(file, head), head.data
        except _UNREADABLE as error:
            _log.warning(
                "%s cannot be read (%s): iteration %d is collected again", path, one_line(error), iteration.number
            )
        return None

    def read(self, iteration: Iteration) -> tuple[Collected, State]:
        """Returns a recorded iteration and the positions of the prompt readers after it, for a replay. The settings of
        the recorded run may differ from the settings of this run.

        Raises FileNotFoundError if the iteration has no file, and StoreError if the file is damaged or the recorded
        iteration trained other roles.
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
                    return _collected(file, head), head.data
        except _UNREADABLE as error:
            raise StoreError(
                f"{path} cannot be read ({one_line(error)}): bring a whole copy of it, or replay another run"
            ) from None
        raise StoreError(
            f"{path} trained {', '.join(head.roles)}; iteration {iteration.number} of this run trains "
            f"{', '.join(iteration.roles)}: replay a run of the same recipe and arguments"
        )

    def drop(self, before: int) -> None:
        """Removes the files of iterations before number `before`, which a completely written checkpoint covers, except
        files that are kept permanently.

        Whether a file is kept permanently was decided by `keep_every` when the file was written. So the file is kept
        even if the run was resumed with another `keep_every`.
        """
        for path in iteration_files(self.directory):
            number = iteration_number(path)
            if self._dropped <= number < before and not self.keeps(number):
                head = _head_of(path, "it is removed")
                if head is None or not head.kept:
                    path.unlink()
        self._dropped = max(self._dropped, before)

    def clean(self, number: int, *, fresh: bool = False) -> Waiting:
        """Removes files that a run resumed at iteration `number` cannot use: temporary files of interrupted writes, and
        files of iterations from `number` on that are damaged or were written under other settings.

        With `fresh`, removes the files of all iterations from `number` on. Returns the numbers of files from `number`
        on that were kept and removed. Also removes write-ahead files that are not needed.
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
        begun = self.ahead.clean(lambda own: not fresh and own >= number and not self.path(own).exists())
        return Waiting(kept, dropped, begun)


def open_replay(place: Path, *, own: Path) -> IterationStore:
    """Returns the store from which another run is replayed.

    `place`: directory of the run to replay, or its subdirectory `rollouts`.
    `own`: directory of the run that replays.

    Raises FileNotFoundError if `place` has no iteration files. Raises StoreError if `place` and `own` are the same run,
    because the run would overwrite the files that it reads.
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
    """Returns a short hash of the settings and the file format version."""
    return hashlib.sha256(f"{FORMAT}\n{settings}".encode()).hexdigest()[:16]


def iteration_files(directory: Path) -> list[Path]:
    """Returns the iteration files in a run's rollouts directory, sorted by iteration."""
    found = Path(directory).glob("iteration_*.parquet")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=iteration_number)


def iteration_number(path: Path) -> int:
    return int(path.stem.removeprefix("iteration_"))


def read_rows(path: Path, role: str | None = None) -> list[dict[str, Any]]:
    """Returns the human-readable columns of one iteration file, as one mapping {column: value} per rollout. If `role`
    is given, returns only the rollouts of this role.

    The value of `rewards` is a mapping {name: reward}. The texts are None if the file was not written to be kept for
    the report. Raises StoreError for a damaged file.
    """
    try:
        with _opened(path) as file:
            # no threads: the files are small, and threads would use more memory
            table = file.read(columns=READABLE.names, use_threads=False)
        if table.num_columns < len(READABLE.names):
            raise ValueError("it lacks columns, as another version wrote it")
        rows = table.to_pylist()
    except _UNREADABLE as error:
        raise StoreError(f"{path} cannot be read ({one_line(error)}): remove it") from None
    return [{**row, "rewards": dict(row["rewards"] or [])} for row in rows if role in (None, row["role"])]


def _tables(number: int, collected: Collected, credited: Collected | None, decode: Decode | None) -> Iterator[pa.Table]:
    """Yields the rollouts as tables, role by role, in chunks of about CHUNK_BYTES to limit the memory needed for
    writing. `credited`: the rollouts that the readable columns show. The credit may leave out rollouts, which are shown
    as in `collected`.
    """
    for role, rollouts in collected.rollouts.items():
        first, size = 0, 0
        # the credit copies a rollout without copying its tokens
        after = {} if credited is None else {id(r.tokens): r for r in credited.rollouts.get(role, ())}
        for end, rollout in enumerate(rollouts, start=1):
            size += num_bytes(rollout)
            if size >= CHUNK_BYTES or end == len(rollouts):
                chunk = rollouts[first:end]
                shown = [after.get(id(r.tokens), r) for r in chunk]
                yield to_table(number, chunk, shown, None if decode is None else _texts(role, shown, decode))
                first, size = end, 0


def _texts(role: str, rollouts: Sequence[Rollout], decode: Decode) -> list[RolloutText]:
    prompts: dict[bytes, str] = {}  # cache of decoded prompts, because the rollouts of a group share one prompt
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
    """Writes an iteration file atomically and durably."""
    schema = SCHEMA.with_metadata({_HEAD: head.encode()})
    with replacing(path) as temporary:
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


def _seal(path: Path) -> None:
    """Inserts a digest of a Parquet file's footer before the footer, at a position that Parquet readers ignore. Parquet
    has checksums for pages, but not for the footer.
    """
    with open(path, "r+b", opener=regular) as file:
        footer = _footer(file)
        file.seek(-len(footer), os.SEEK_END)
        file.write(_digest(footer) + footer)


def _footer(file: BinaryIO) -> bytes:
    """Returns the footer of a Parquet file and the bytes after the footer. Raises OSError or ValueError if the file is
    too short.
    """
    file.seek(-_TAIL_BYTES, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little") + _TAIL_BYTES
    file.seek(-length, os.SEEK_END)
    return file.read(length)


def _opened(path: Path) -> pq.ParquetFile:
    """Opens an iteration file after checking the digest of its footer. Raises ValueError if the digest is missing or
    wrong.
    """
    with open(path, "rb", opener=regular) as file:
        footer = _footer(file)
        file.seek(-len(footer) - _DIGEST_BYTES, os.SEEK_END)
        if file.read(_DIGEST_BYTES) != _digest(footer):
            raise ValueError("it is damaged, or it is no iteration of a run")
    return pq.ParquetFile(path, page_checksum_verification=True)


def _head(file: pq.ParquetFile) -> _FileHead:
    """Returns the metadata of an iteration file. Raises ValueError if the file has another format version or if the
    number of its rows differs from the number of rollouts in the metadata.
    """
    values = json.loads(file.metadata.metadata[_HEAD])
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']}, and this version reads {FORMAT}")
    head = _FileHead(**{**values, "roles": tuple(values["roles"])})
    if file.metadata.num_rows != sum(head.rows.values()):
        raise ValueError(f"it has {file.metadata.num_rows} rows of {sum(head.rows.values())}")
    return head


def _head_of(path: Path, consequence: str) -> _FileHead | None:
    """Returns the metadata of an iteration file. If the file cannot be read, logs a warning that ends with
    `consequence` and returns None.
    """
    try:
        with _opened(path) as file:
            return _head(file)
    except _UNREADABLE as error:
        _log.warning("%s cannot be read (%s): %s", path, one_line(error), consequence)
        return None


def _collected(file: pq.ParquetFile, head: _FileHead) -> Collected:
    """Returns the content of an iteration file. The rollouts are in the order in which they were written."""
    by_role: dict[str, list[Rollout]] = {role: [] for role in head.rows}
    for group in range(file.num_row_groups):
        for rollout in from_table(file.read_row_group(group, _EXACTLY)):
            by_role[rollout.role].append(rollout)
    if {role: len(rollouts) for role, rollouts in by_role.items()} != dict(head.rows):
        raise ValueError("its rows are not those of its roles")
    return Collected(rollouts=by_role, metrics=head.metrics, handed_over=head.handed_over)


_EXACTLY = ["role", "group", "stop", *EXACT.names]  # the columns that `from_table` reads


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
