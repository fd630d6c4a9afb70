"""Stores the samples of an evaluation as JSON lines as soon as they are graded, so that an evaluation that was
killed can be continued."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.json_lines import UNREADABLE, append
from megatron_rl.run.json_lines import read as read_lines

Sample = dict[str, Any]  # `set`, `measure`, `id` (of the problem), `sample` (0..n-1), and what the measure found
PARTIAL = ".partial"
_log = logging.getLogger(__name__)


class Samples:
    """The samples of one evaluation, in the file NAME.jsonl.partial until all are there, then in NAME.jsonl.

    The partial file begins with a line that names the evaluation by its `digest`. A problem's samples are written
    together. When an evaluation with the same digest left a partial file, its whole problems are kept; a line that was
    cut, and the rows of a problem that is not whole, are dropped. Without a path nothing is written.
    """

    def __init__(self, path: Path | None, digest: str) -> None:
        self._path, self._partial, self._digest = path, None if path is None else Path(f"{path}{PARTIAL}"), digest
        self._rows: dict[tuple[str, str], dict[int, list[Sample]]] = defaultdict(dict)
        self.resumed = 0  # problems kept from an earlier start
        if self._partial is not None:
            self._resume(self._partial)

    def rows(self, name: str, measure: str) -> list[list[Sample]]:
        """Returns the samples of one measure on one set, [P][n], in the order of the problems' ids."""
        found = self._rows[name, measure]
        return [found[key] for key in sorted(found)]

    def missing(self, name: str, measure: str, ids: Iterable[int]) -> list[int]:
        """Returns those of the problems' ids that have no samples yet."""
        return [key for key in ids if key not in self._rows[name, measure]]

    def add(self, groups: Iterable[Sequence[Sample]]) -> None:
        """Adds whole problems: each group holds all samples of one. The file is on disk when this returns. Raises
        DiskError when the disk does not take them."""
        kept = [list(group) for group in groups if group]
        for group in kept:
            self._rows[group[0]["set"], group[0]["measure"]][group[0]["id"]] = group
        if self._partial is not None:
            whole = "\n".join(_line(row, len(group)) for group in kept for row in group)
            append(self._partial, whole.encode())

    def write(self) -> None:
        """Writes NAME.jsonl, with the sets in the order of their first rows."""
        if self._path is not None:
            write_text(
                self._path,
                "".join(json.dumps(row) + "\n" for key in self._rows for group in self.rows(*key) for row in group),
            )

    def forget(self) -> None:
        """Removes the partial file. Call it when all is done and written."""
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    def _resume(self, partial: Path) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"evaluation": self._digest}) + "\n"
        found = read_lines(partial, lambda raw: raw).values
        if found[:1] != [{"evaluation": self._digest}]:
            write_text(partial, head)
            return
        groups: dict[tuple[str, str, int], list[Sample]] = defaultdict(list)
        for raw in found[1:]:
            with contextlib.suppress(*UNREADABLE):
                row = _sample(raw)
                if isinstance(row["of"], int):
                    groups[row["set"], row["measure"], row["id"]].append(row)
        whole = [group for group in groups.values() if len(group) == group[0]["of"]]
        text = [head]
        for group in whole:
            kept = [{name: value for name, value in row.items() if name != "of"} for row in group]
            self._rows[kept[0]["set"], kept[0]["measure"]][kept[0]["id"]] = kept
            text += [_line(row, len(kept)) + "\n" for row in kept]
        write_text(partial, "".join(text))
        self.resumed = len(whole)


def read_samples(path: Path) -> list[Sample]:
    """Reads the rows of a NAME.jsonl. A warning counts lines that are no samples, which are left out. Raises
    FileNotFoundError, and ValueError where no line is a sample."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    found = read_lines(path, _sample)
    if not found.values:
        raise ValueError(f"{path} holds no sample of an evaluation")
    if found.damage is not None:
        _log.warning("%s", found.damage)
    return found.values


def _line(row: Sample, count: int) -> str:
    return json.dumps(row | {"of": count})


def _sample(raw: Any) -> Sample:
    """Returns the sample of a parsed line. Raises KeyError or TypeError for a value that is no sample."""
    texts, numbers = (raw["set"], raw["measure"]), (raw["id"], raw["sample"])
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError("a sample has the names of its set and measure, and the numbers of its problem and its own")
    return raw
