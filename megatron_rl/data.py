"""Problems and prompt/response pairs from files and Hugging Face data sets, and a reader whose place is part of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import ConfigError, PromptSet, SftData
from megatron_rl.data_settings import resolve
from megatron_rl.types import Prompt

SHOWN = 5  # bad rows named in a message
_log = logging.getLogger(__name__)


class DataError(ValueError):
    """A data set that cannot be used; the message names rows by file and line."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row in our names: `question`, `answer`, and whatever else `fields` maps."""

    row: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _BadRow:
    where: str
    why: str


def read_problems(source: PromptSet) -> list[Problem]:
    """All usable rows of `source`, in file order. Bad rows are reported by file and line and refused above max_bad_share."""
    source = resolve(source)
    problems: list[Problem] = []
    bad: list[_BadRow] = []
    total = 0
    for where, row in _rows(source.path, source.split):
        if source.limit is not None and len(problems) >= source.limit:
            break
        if isinstance(row, _BadRow):
            total, bad = total + 1, [*bad, row]
            continue
        if any(_reach(row, key) != value for key, value in source.filters.items()):
            continue
        total += 1
        try:
            problems.append(Problem(total - 1, _mapped(row, source)))
        except DataError as error:
            bad.append(_BadRow(where, str(error)))
    _refuse(bad, total, source.max_bad_share, source.path)
    return problems


def read_pairs(data: SftData) -> list[tuple[str, str]]:
    """Prompt/response texts of data.train, by the same rules. [N] pairs."""
    pairs: list[tuple[str, str]] = []
    bad: list[_BadRow] = []
    for where, row in _rows(data.train, "train"):
        if isinstance(row, _BadRow):
            bad.append(row)
            continue
        values = [row.get(name) for name in (data.prompt_field, data.response_field)]
        if all(isinstance(v, str) and v for v in values):
            pairs.append((values[0], values[1]))
        else:
            bad.append(_BadRow(where, f"no text in {data.prompt_field!r} or {data.response_field!r}; the row has {', '.join(row)}"))
    _refuse(bad, len(pairs) + len(bad), data.max_bad_share, data.train)
    return pairs


class PromptReader:
    """An endless, deterministic stream of prompts over problems: every epoch once through all of them, in its own order.

    `encode` turns a problem's values into prompt tokens. Prompts over `max_prompt_tokens` are dropped and counted in `dropped`.
    The place in the stream is `state_dict()`.
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
        """A reader over the same data, at its beginning."""
        return PromptReader(self._problems, self._encode, seed=self._seed, shuffle=self._shuffle, max_prompt_tokens=self._max)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises DataError when a whole epoch gives none that fits."""
        out: list[Prompt] = []
        misses = 0
        while len(out) < count:
            problem = self._next()
            tokens = self._encode(problem.values)
            if len(tokens) > self._max:
                self.dropped, misses = self.dropped + 1, misses + 1
                if misses >= len(self._problems):
                    raise DataError(f"every prompt is longer than max_prompt_tokens = {self._max}, e.g. {len(tokens)}: raise it")
                continue
            misses = 0
            out.append(Prompt(id=f"{self._epoch}/{problem.row}", tokens=tokens, payload=problem.values))
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "dropped": self.dropped, "digest": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place. Raises DataError when it was saved over other data."""
        if state["digest"] != self._digest():
            raise DataError("the checkpoint was made with other data (rows or seed differ): put the data back, or start a new run")
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

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self._seed} {self._shuffle}".encode())
        for problem in self._problems:
            digest.update(json.dumps(dict(problem.values), sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as Parquet, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), partial)
    partial.replace(path)


def _mapped(row: Mapping[str, Any], source: PromptSet) -> dict[str, Any]:
    values = {name: _reach(row, key) for name, key in source.fields.items()}
    missing = [f"{name} (from {source.fields[name]!r})" for name, value in values.items() if value is None]
    if missing:
        raise DataError(f"no {', '.join(missing)}; the row has {', '.join(map(str, row))}")
    question = str(values["question"])
    if source.remove_suffix:
        question = question.removesuffix(source.remove_suffix)
    if not question.strip():
        raise DataError("the question is empty")
    answer = str(values["answer"])
    if source.answer_pattern is not None:
        found = re.findall(source.answer_pattern, answer)
        if not found:
            raise DataError(f"the answer {answer[-60:]!r} does not match {source.answer_pattern!r}")
        answer = str(found[-1]).replace(",", "")
    if not answer.strip():
        raise DataError("the answer is empty")
    return {**values, "question": question, "answer": answer}


def _reach(row: Any, key: str) -> Any:
    """Value at a dotted key; numbers index lists. None when it is not there."""
    for part in key.split("."):
        if isinstance(row, Mapping):
            row = row.get(part)
        elif isinstance(row, (list, tuple)) and part.isdigit() and int(part) < len(row):
            row = row[int(part)]
        else:
            return None
    return row


def _rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """(file:line, row) of a file, a directory of files, or a Hugging Face data set."""
    place = Path(path)
    if place.is_dir() and not (place / "dataset_info.json").exists() and not (place / "dataset_dict.json").exists():
        files = sorted([*place.glob("*.jsonl"), *place.glob("*.parquet")])
        chosen = [f for f in files if f.stem == split or f.stem.startswith(f"{split}-")] or files
        if chosen:
            for file in chosen:
                yield from _file_rows(file)
            return
    if place.is_file():
        yield from _file_rows(place)
        return
    if not place.exists() and (place.suffix or place.is_absolute() or path.startswith(".") or path.count("/") > 1):
        raise ConfigError(f"no data at {path}: give a JSONL or Parquet file, a directory of them, or a Hugging Face data set")
    yield from _hub_rows(path, split)


def _file_rows(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".parquet":
        number = 0
        for batch in pq.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{file}:{number}", row
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = _BadRow(where, f"not JSON ({error.msg})")
            yield where, row if isinstance(row, (dict, _BadRow)) else _BadRow(where, "not a JSON object")


def _hub_rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data.path = {path!r} is a Hugging Face data set: pip install datasets, or give a JSONL or Parquet file"
        ) from error
    if Path(path).is_dir() and ((Path(path) / "dataset_info.json").exists() or (Path(path) / "dataset_dict.json").exists()):
        found = datasets.load_from_disk(path)
        rows = found[split] if isinstance(found, datasets.DatasetDict) else found
    else:
        rows = datasets.load_dataset(path, split=split)
    for number, row in enumerate(rows, start=1):
        yield f"{path}[{split}]:{number}", row


def _refuse(bad: Sequence[_BadRow], total: int, max_share: float, path: str) -> None:
    if not bad:
        return
    shown = "\n  ".join(f"{row.where}: {row.why}" for row in bad[:SHOWN])
    more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    message = f"{len(bad)} of {total} rows of {path} cannot be used:\n  {shown}{more}"
    if len(bad) > max_share * total:
        raise DataError(f"{message}\nthat is more than max_bad_share = {max_share}: mend the rows or the field names, or raise it")
    _log.warning("%s", message)
