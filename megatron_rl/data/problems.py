"""Reads problems and prompt/response pairs from files and Hugging Face data sets.

`PromptReader` deals the problems out; its place among them is part of a checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config.data_settings import resolve
from megatron_rl.config.schema import ConfigError, PromptSet, SftData
from megatron_rl.types import Prompt

SHOWN = 5  # most bad rows named in a message
# A directory's files belong to a split when their names begin with one of these.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
# The name of a data set on the hub, `name` or `owner/name`, but not that of a file.
_HUB_NAME = re.compile(r"(?!.*\.(jsonl?|parquet|csv)$)[\w-][\w.-]*(/[\w-][\w.-]*)?")
_log = logging.getLogger(__name__)


class DataError(ValueError):
    """A data set that cannot be used; the message names rows by file and line."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, with our field names: `question`, `answer`, and whatever else `fields` maps.

    `row` counts the rows that pass the filters.
    """

    row: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _BadRow:
    """A row that cannot be used: its file and line, and the reason."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class _Absent:
    """The result of looking up a dotted key that is not in the row. (None would be the value null.)"""


def read_problems(source: PromptSet) -> list[Problem]:
    """Returns all usable rows of `source` as problems, in file order.

    A warning names bad rows (not JSON, a missing field, an empty question) by file and line. Raises DataError when they
    are more than max_bad_share of the rows that pass the filters, or when no row passes, and ConfigError for a path
    without data.
    """
    source = resolve(source)
    pattern = _compiled(source.answer_pattern)

    def read(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if any(_reach(row, key) != value for key, value in source.filters.items()):
            return None
        return _mapped(row, source, pattern)

    return read_rows(source, read)


def read_rows(source: PromptSet, read: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> list[Problem]:
    """Returns problems as `read_problems` does, but `read` turns each row into its values.

    `read` returns None for a row to pass over and raises DataError for a bad one. Of `source` only path, split, subset,
    file, limit and max_bad_share are used.
    """
    problems: list[Problem] = []
    bad: list[_BadRow] = []
    count = total = 0
    for where, row in _rows(source.path, source.split, source.subset, source.file):
        if source.limit is not None and len(problems) >= source.limit:
            break
        count += 1
        values, why = (None, row) if isinstance(row, _BadRow) else _understood(row, where, read)
        if why is not None:
            bad.append(why)
        elif values is not None:
            problems.append(Problem(total, values))
        total += values is not None or why is not None
    if not total:
        raise DataError(
            f"none of the {count} rows of {source.path} passes the filters {source.filters}: look at data.filters and "
            "data.path"
        )
    _refuse(bad, total, source.max_bad_share, source.path)
    return problems


def read_pairs(data: SftData, *, split: str = "train") -> list[tuple[str, str]]:
    """Returns the (prompt, response) texts of data.train, by the same rules as `read_problems`.

    `split` is used where the path is a directory or a data set.
    """
    pairs: list[tuple[str, str]] = []
    bad: list[_BadRow] = []
    for where, row in _rows(data.train, split, None):
        if isinstance(row, _BadRow):
            bad.append(row)
            continue
        try:
            pairs.append((_text(row, "prompt", data.prompt_field), _text(row, "response", data.response_field)))
        except DataError as error:
            bad.append(_BadRow(where, str(error)))
    total = len(pairs) + len(bad)
    if not total:
        raise DataError(f"{data.train} has no rows: look at data.train and data.validation")
    _refuse(bad, total, data.max_bad_share, data.train)
    return pairs


def place_of(prompt: Prompt) -> tuple[int, int]:
    """Returns the epoch and the row of a prompt from a PromptReader, by its id. Raises DataError for another's."""
    epoch, slash, row = prompt.id.partition("/")
    if not (slash and epoch.isdecimal() and row.isdecimal()):
        raise DataError(f"prompt {prompt.id!r} is not from a data set: its id is no epoch/row")
    return int(epoch), int(row)


class PromptReader:
    """An endless, deterministic stream of prompts over problems.

    Every epoch goes once through all of them, in its own order. `encode` turns a problem's values into prompt tokens,
    once the stream reaches the problem. Prompts over `max_prompt_tokens` are dropped and counted in `dropped`, again in
    every epoch. A prompt's id is `epoch/row`. `state_dict()` is the place in the stream.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        encode: Callable[[Mapping[str, Any]], list[int]],
        *,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int,
    ) -> None:
        if not problems:
            raise DataError("the data set has no problems: look at data.path and data.filters")
        self._problems, self._encode = list(problems), encode
        self._seed, self._shuffle, self._max = seed, shuffle, max_prompt_tokens
        self._epoch, self._position, self.dropped = 0, 0, 0
        self._order = self._order_of(0)

    def restarted(self) -> PromptReader:
        """Returns a new reader over the same data, at its beginning."""
        return PromptReader(
            self._problems, self._encode, seed=self._seed, shuffle=self._shuffle, max_prompt_tokens=self._max
        )

    def once(self, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of the first epoch, each problem at most once, without over-long ones."""
        problems = (self._problems[i] for i in self._order_of(0))
        kept = (p for p in ((problem, self._encode(problem.values)) for problem in problems) if len(p[1]) <= self._max)
        return [
            Prompt(id=f"0/{problem.row}", tokens=tokens, payload=problem.values)
            for problem, tokens in itertools.islice(kept, count)
        ]

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts. Raises DataError when a whole epoch gives none that fits."""
        out: list[Prompt] = []
        misses = 0
        while len(out) < count:
            problem = self._next()
            tokens = self._encode(problem.values)
            if len(tokens) > self._max:
                self.dropped, misses = self.dropped + 1, misses + 1
                if misses >= 2 * len(self._problems) - 1:  # this many misses in a row include a whole epoch
                    raise DataError(
                        f"every prompt is longer than max_prompt_tokens = {self._max}, e.g. {len(tokens)}: raise it"
                    )
                continue
            misses = 0
            out.append(Prompt(id=f"{self._epoch}/{problem.row}", tokens=tokens, payload=problem.values))
        return out

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream, as plain numbers and text."""
        place = {"epoch": self._epoch, "position": self._position, "dropped": self.dropped}
        return place | {"problems": len(self._problems), "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place. Raises DataError when it was saved over other data."""
        if state["digest"] != self._digest:
            raise DataError(
                f"the checkpoint was made over {state['problems']} problems, these are {len(self._problems)}, and "
                "rows, "
                "seed or shuffle differ: put the data and run.seed back, or start a new run"
            )
        self._epoch, self._position, self.dropped = state["epoch"], state["position"], state["dropped"]
        self._order = self._order_of(self._epoch)

    def _next(self) -> Problem:
        if self._position == len(self._problems):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        self._position += 1
        return self._problems[self._order[self._position - 1]]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self._seed} {self._shuffle}".encode())
        for problem in self._problems:
            digest.update(json.dumps(dict(problem.values), sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as Parquet, whole or not at all.

    The columns are all rows' keys; a row without a key has null there.
    """
    columns = dict.fromkeys(name for row in rows for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows]), partial)
    partial.replace(path)


def _mapped(row: Mapping[str, Any], source: PromptSet, pattern: re.Pattern[str] | None) -> dict[str, Any]:
    """Returns a row's values under our field names. Raises DataError that says what the row lacks."""
    values = {name: _reach(row, key) for name, key in source.fields.items()}
    missing = [f"{name} (from {source.fields[name]!r})" for name, value in values.items() if isinstance(value, _Absent)]
    if missing:
        raise DataError(f"no {', '.join(missing)}; the row has {', '.join(map(str, row))}")
    question = _text(row, "question", source.fields["question"])
    if source.remove_suffix:
        question = question.removesuffix(source.remove_suffix)
    if not question.strip():
        raise DataError("the question is empty without data.remove_suffix")
    answer = _text(row, "answer", source.fields["answer"], numbers=True)
    if pattern is not None:
        matches = list(pattern.finditer(answer))
        found = matches[-1].group(1 if pattern.groups else 0) if matches else None
        if found is None:
            raise DataError(
                f"the answer {answer[-60:]!r} does not match data.answer_pattern = {source.answer_pattern!r}"
            )
        answer = found
    if source.answer_commas is False:
        answer = answer.replace(",", "")
    if not answer.strip():
        raise DataError("the answer is empty")
    return {**values, "question": question, "answer": answer}


def _understood(
    row: Mapping[str, Any], where: str, read: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
) -> tuple[Mapping[str, Any] | None, _BadRow | None]:
    """Returns (values, None) for a good row, (None, the bad row) for a bad one, (None, None) for a row to pass over."""
    try:
        return read(row), None
    except DataError as error:
        return None, _BadRow(where, str(error))


def _text(row: Mapping[str, Any], name: str, key: str, *, numbers: bool = False) -> str:
    """Returns the text at a dotted key. Raises DataError when there is none, or it cannot be written as UTF-8."""
    value = _reach(row, key)
    if numbers and isinstance(value, (int, float)) and math.isfinite(value):
        value = str(value)
    if isinstance(value, _Absent):
        raise DataError(f"no {name} (from {key!r}); the row has {', '.join(map(str, row))}")
    if isinstance(value, (list, tuple, Mapping)):
        raise DataError(
            f"the {name} (from {key!r}) is a {type(value).__name__}: reach inside it with a dotted key, such as {key}.0"
        )
    if not isinstance(value, str):
        raise DataError(f"the {name} (from {key!r}) is {value!r}, not text")
    if not value.strip():
        raise DataError(f"the {name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the {name} has a lone surrogate: {error}") from error
    return value


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern) if pattern else None
    except re.error as error:
        raise ConfigError(f"data.answer_pattern = {pattern!r} is not a regular expression: {error}") from error


def _reach(row: Any, key: str) -> Any:
    """Returns the value at a dotted key, in which numbers index lists; _Absent when it is not there."""
    for part in key.split("."):
        if isinstance(row, Mapping) and part in row:
            row = row[part]
        elif isinstance(row, (list, tuple)) and part.isdecimal() and int(part) < len(row):
            row = row[int(part)]
        else:
            return _Absent()
    return row


def _rows(path: str, split: str, subset: str | None, file: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (file:line, row) of a file, a directory of files, or a Hugging Face data set.

    A row is a dict or a _BadRow.
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


def _files_of(place: Path, split: str) -> list[Path]:
    """Returns the files whose names begin with the split; all files where no name begins with any split."""

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


def _file_rows(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".parquet":
        try:
            for number, row in enumerate(
                (row for batch in pq.ParquetFile(file).iter_batches() for row in batch.to_pylist()), start=1
            ):
                yield f"{file}:{number}", row
        except pa.ArrowException as error:
            raise DataError(f"{file} cannot be read as Parquet: {error}; make it again") from error
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
                row = _BadRow(
                    where, f"not UTF-8: {error}" if isinstance(error, UnicodeDecodeError) else f"not JSON ({error})"
                )
            yield where, row if isinstance(row, (dict, _BadRow)) else _BadRow(where, "not a JSON object")


def _hub_rows(path: str, split: str, subset: str | None, file: str | None) -> Iterator[tuple[str, Any]]:
    """Yields rows of a directory that save_to_disk wrote, a local data set directory, or a data set on the hub."""
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise ConfigError(
            f"data.path = {path!r} is a Hugging Face data set: pip install datasets, or give a JSONL or Parquet file"
        ) from error
    try:
        if _saved_by_datasets(Path(path)):
            found = datasets.load_from_disk(path)
            if isinstance(found, datasets.DatasetDict) and split not in found:
                raise ConfigError(
                    f"{path} has no split {split!r}; there are {', '.join(map(str, found))}: set data.split"
                )
            rows = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            rows = datasets.load_dataset(path, subset, split=split, data_files=None if file is None else {split: file})
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"data.path = {path!r}, subset {subset!r}, split {split!r} cannot be read as a Hugging Face data set "
            f"({error}): "
            "look at the three, and at the network when it is a hub name"
        ) from error
    number = 0
    for table in cast(Any, rows.with_format("arrow").iter(batch_size=1024)):  # Arrow tables
        for row in table.to_pylist():
            number += 1
            yield f"{path}[{split}]:{number}", row


def _refuse(bad: Sequence[_BadRow], total: int, max_share: float, path: str) -> None:
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
