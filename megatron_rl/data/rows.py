"""Reads rows of files, directories and Hugging Face data sets, looks up values in rows, and rejects data sets with too
many bad rows."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.lib.lazy_import import LazyModule
from megatron_rl.run.atomic_files import replacing
from megatron_rl.texts.chat_template import ChatError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = LazyModule("pyarrow"), LazyModule("pyarrow.parquet")

SHOWN = 5  # maximum number of bad rows named in a message
LARGEST = 1e300  # limit of the absolute value of answers that are numbers; larger numbers make a row bad
# Names of splits. A file in a directory belongs to a split if its name begins with the split's name.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
# A Parquet file is read in batches. BATCH_ROWS: number of rows in a batch. MOST_BATCH_BYTES: maximum size of a batch.
BATCH_ROWS, MOST_BATCH_BYTES = 1024, 1 << 30
# Matches the name of a data set on the Hugging Face hub, `name` or `owner/name`, but not a file name.
_HUB_NAME = re.compile(r"(?!.*\.(jsonl?|parquet|csv)$)[\w-][\w.-]*(/[\w-][\w.-]*)?")
_log = logging.getLogger(__name__)
T = TypeVar("T")


class DataError(ValueError):
    """Raised when a data set cannot be used. The message names the bad rows by file and line."""


def reject(*problems: str) -> None:
    """Raises DataError with the first of the error messages `problems`. Returns if there are no messages."""
    if problems:
        raise DataError(problems[0])


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, given by its file and line and the reason."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class NotThere:
    """The result of `reach` for a key that is not in a row. (None would be the value null.)"""


def rows_of(path: str, split: str, subset: str | None, file: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (location, row) for each row of a file, a directory of files, or a Hugging Face data set.

    A location is FILE:NUMBER or NAME[SPLIT]:NUMBER. A row is a dict or a BadRow. Raises ConfigError if there is no data
    at `path`.
    """
    place = Path(path)
    if place.is_file():
        yield from _file_rows(place)
    elif place.is_dir() and (files := [] if _saved_by_datasets(place) else _files_of(place, split)):
        for part in files:
            yield from _file_rows(part)
    elif place.exists() or _HUB_NAME.fullmatch(path):
        yield from _hub_rows(path, split, subset, file)
    else:
        raise ConfigError(
            f"no data at {path}: give a JSONL or Parquet file, a directory of them, or a Hugging Face data set"
        )


def read_all(
    rows: Iterable[tuple[str, Any]], read: Callable[[str, Any], T | None], *, limit: int | None = None
) -> tuple[list[tuple[int, T]], list[BadRow], int]:
    """Converts rows to values with the function `read`, and collects the bad rows. Stops after `limit` values.

    `read`: function (location, row) -> value, or None to skip the row. A row is bad if it is a BadRow, or if `read`
    raises DataError or ChatError. Returns (list of (index, value), list of bad rows, number of rows read). The index
    of a value counts good and bad rows from 0, without skipped rows. The number of rows read includes skipped rows.
    """
    values, bad, count = list[tuple[int, T]](), list[BadRow](), 0
    for where, row in rows:
        if limit is not None and len(values) >= limit:
            break
        count += 1
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            value = read(where, row)
        except (DataError, ChatError) as error:
            bad.append(BadRow(where, str(error)))
            continue
        if value is not None:
            values.append((len(values) + len(bad), value))
    return values, bad, count


def refuse(bad: Sequence[BadRow], total: int, max_share: float, path: str) -> None:
    """Logs a warning about bad rows, or raises DataError if they are more than `max_share` of `total` rows."""
    if not bad:
        return
    shown = "\n  ".join(f"{row.where}: {row.why}" for row in bad[:SHOWN])
    more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    message = f"{len(bad)} of {total} rows of {path} cannot be used:\n  {shown}{more}"
    if len(bad) > max_share * total:
        raise DataError(
            f"{message}\nthat is more than max_bad_share = {max_share}: mend the rows or the field names, or raise it"
        )
    _log.warning("%s", message)


def reach(row: Any, key: str) -> Any:
    """Returns the value at a dotted key, such as `choices.0.text`, in which numbers are indices of lists. Returns
    NotThere if the key is not in the row."""
    for part in key.split("."):
        if isinstance(row, Mapping) and part in row:
            row = row[part]
        elif isinstance(row, (list, tuple)) and part.isdecimal() and int(part) < len(row):
            row = row[int(part)]
        else:
            return NotThere()
    return row


def not_json(value: Any, key: str = "") -> Iterator[str]:
    """Yields an error message, with the dotted key, for each value that JSON cannot represent, such as a timestamp or
    NaN. Reward functions, environments and the store of rollouts receive a problem's values as JSON."""
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from not_json(member, f"{key}.{name}" if key else str(name))
            if not isinstance(name, str):
                yield f"{key} has the key {name!r}, and keys are texts: write it as text"
    elif isinstance(value, (list, tuple)):
        for place, member in enumerate(value):
            yield from not_json(member, f"{key}.{place}")
    elif not isinstance(value, (str, int, float, type(None))) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield (
            f"{key} is the {type(value).__name__} {str(value):.60}, which JSON does not know: write it as text or a "
            "number, or leave the column out"
        )


def text_at(row: Mapping[str, Any], name: str, key: str, *, numbers: bool = False) -> str:
    """Returns the text at a dotted key. Raises DataError if there is no text, or it cannot be encoded as UTF-8.

    `name`: name of the field for the message. `numbers`: convert a number to text instead of raising.
    """
    value = reach(row, key)
    if numbers and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST:
        value = str(value)
    if isinstance(value, NotThere):
        why = f"no {name} (from {key!r}); the row has {', '.join(map(str, row))}"
    elif isinstance(value, (list, tuple, Mapping)):
        advice = ", or name a conversation by data.fields.messages" if name == "question" else ""
        why = f"the {name} (from {key!r}) is a {type(value).__name__}: reach inside it with a dotted key, such as "
        why += f"{key}.0{advice}"
    elif not isinstance(value, str):
        large = isinstance(value, (int, float)) and abs(value) >= LARGEST  # Python cannot convert huge integers to text
        why = f"the {name} (from {key!r}) is {'a huge number' if large else repr(value)[:80]}, not text"
    elif value.strip():
        return encodable(value, f"the {name}")
    else:
        why = f"the {name} is empty"
    raise DataError(why)


def encodable(text: str, what: str) -> str:
    """Returns `text` if it can be encoded as UTF-8, otherwise raises DataError. `what`: name of the text for the
    message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} has a lone surrogate: {error}") from error
    return text


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Returns rows as a table. The columns are the union of the rows' keys; missing values are null. Raises
    pyarrow.ArrowException if the values of a column have incompatible types."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])


def write_parquet(path: Path, table: pa.Table) -> None:
    """Writes a table to a Parquet file atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def _files_of(place: Path, split: str) -> list[Path]:
    """Returns the files in a directory whose names begin with the name of the split, or all files if no file name
    begins with the name of any split. Raises ConfigError if there are only files of other splits."""

    def belongs(file: Path, name: str) -> bool:
        return re.match(rf"{re.escape(name)}([-_.]|$)", file.stem) is not None

    files = sorted([*place.glob("*.jsonl"), *place.glob("*.parquet")])
    chosen = [file for file in files if belongs(file, split)]
    others = [name for name in SPLITS if any(belongs(file, name) for file in files)]
    if others and not chosen:
        raise ConfigError(
            f"{place} has no files of the split {split!r}; there are {', '.join(others)}: set split, or name the file "
            "itself"
        )
    return chosen or files


def _saved_by_datasets(place: Path) -> bool:
    return (place / "dataset_info.json").exists() or (place / "dataset_dict.json").exists()


def json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields (file:line, row) for each non-empty line of a JSON Lines file. A row is a dict or a BadRow.

    Raises DataError if the file cannot be read.
    """
    try:
        lines = file.open("rb")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                row = BadRow(where, f"not UTF-8: {error}")
            except (ValueError, RecursionError) as error:  # not JSON, or an integer with thousands of digits
                row = BadRow(where, f"not JSON ({error})")
            yield where, row if isinstance(row, (dict, BadRow)) else BadRow(where, "not a JSON object")


def _file_rows(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".parquet":
        yield from json_rows(file)
        return
    try:
        first = 1
        for batch in pq.ParquetFile(file).iter_batches(BATCH_ROWS):
            if batch.nbytes > MOST_BATCH_BYTES:
                large = f"{len(batch)} rows from {first} on have more than {MOST_BATCH_BYTES} bytes"
                raise ValueError(f"{large} when they are unpacked")
            yield from ((f"{file}:{number}", row) for number, row in enumerate(batch.to_pylist(), start=first))
            first += len(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}; make it again") from error


def _hub_rows(path: str, split: str, subset: str | None, file: str | None) -> Iterator[tuple[str, Any]]:
    """Yields (location, row) for each row of a Hugging Face data set: a directory that `save_to_disk` wrote, another
    local data set directory, or a data set on the hub."""
    need = f"data.path = {path!r} is a Hugging Face data set: pip install datasets, or give a JSONL or Parquet file"
    with refusing(lambda error: need, ImportError):
        import datasets
        import datasets.exceptions

    def say(error: Exception) -> str:
        return (
            f"data.path = {path!r}, subset {subset!r}, split {split!r} cannot be read as a Hugging Face data set "
            f"({error}): look at the three, and at the network when it is a hub name"
        )

    with refusing(say, OSError, ValueError, datasets.exceptions.DatasetsError):
        if _saved_by_datasets(Path(path)):
            loaded: Any = datasets.load_from_disk(path)
        else:
            files = None if file is None else {split: file}
            loaded = datasets.load_dataset(path, subset, split=split, data_files=files)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"{path} has no split {split!r}; there are {', '.join(map(str, loaded))}: set data.split")
        loaded = loaded[split]
    number = 0
    for table in loaded.with_format("arrow").iter(batch_size=1024):  # Arrow tables
        for row in table.to_pylist():
            number += 1
            yield f"{path}[{split}]:{number}", row
