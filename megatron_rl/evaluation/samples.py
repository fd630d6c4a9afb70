"""Stores the samples of an evaluation as JSON lines as soon as they are graded, so that a killed evaluation can be
resumed."""

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

# A row of an evaluation, with `set`, `measure`, `id` (index of the problem), `sample` (index 0..n-1), and the results.
Sample = dict[str, Any]
PARTIAL = ".partial"
_log = logging.getLogger(__name__)


class Samples:
    """The samples (rows) of one evaluation. They are stored in NAME.jsonl.partial until the evaluation is complete,
    then in NAME.jsonl.

    The first line of the partial file has `digest`, a hash of everything that the samples depend on. All samples of a
    problem are written together. If there is a partial file with the same digest, its complete problems are loaded; a
    truncated line and the rows of an incomplete problem are dropped. If `path` is None, no file is written.
    """

    def __init__(self, path: Path | None, digest: str) -> None:
        self._path, self._partial, self._digest = path, None if path is None else Path(f"{path}{PARTIAL}"), digest
        self._rows: dict[tuple[str, str], dict[int, list[Sample]]] = defaultdict(dict)
        self.resumed = 0  # number of problems whose samples were loaded from the partial file
        if self._partial is not None:
            self._resume(self._partial)

    def rows(self, name: str, measure: str) -> list[list[Sample]]:
        """Returns the samples of one measure on the problem set `name`: n samples of each of P problems, ordered by
        problem id."""
        groups = self._rows[name, measure]
        return [groups[key] for key in sorted(groups)]

    def missing(self, name: str, measure: str, ids: Iterable[int]) -> list[int]:
        """Returns the problem ids in `ids` without samples of this measure on the problem set `name`."""
        return [key for key in ids if key not in self._rows[name, measure]]

    def add(self, groups: Iterable[Sequence[Sample]]) -> None:
        """Adds samples and appends them to the partial file. Each group has all samples of one problem.

        The rows are on disk when this function returns. Raises DiskError if they cannot be written.
        """
        kept = [list(group) for group in groups if group]
        for group in kept:
            self._rows[group[0]["set"], group[0]["measure"]][group[0]["id"]] = group
        if self._partial is not None:
            text = "\n".join(_line(row, len(group)) for group in kept for row in group)
            append(self._partial, text.encode())

    def write(self, path: Path | None = None) -> None:
        """Writes all samples to a JSONL file, with the problem sets in the order in which they were first added.
        `path`: the file; None: the constructor's file. A no-op if neither is given.
        """
        if (target := path or self._path) is not None:
            write_text(
                target,
                "".join(json.dumps(row) + "\n" for key in self._rows for group in self.rows(*key) for row in group),
            )

    def forget(self) -> None:
        """Removes the partial file. Call this method after the evaluation is complete and `write` was called."""
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    def _resume(self, partial: Path) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"evaluation": self._digest}) + "\n"
        stored = read_lines(partial, lambda raw: raw).values
        if stored[:1] != [{"evaluation": self._digest}]:
            write_text(partial, head)
            return
        groups: dict[tuple[str, str, int], list[Sample]] = defaultdict(list)
        for raw in stored[1:]:
            with contextlib.suppress(*UNREADABLE):
                row = _sample(raw)
                if isinstance(row["of"], int):
                    groups[row["set"], row["measure"], row["id"]].append(row)
        complete = [group for group in groups.values() if len(group) == group[0]["of"]]
        text = [head]
        for group in complete:
            kept = [{name: value for name, value in row.items() if name != "of"} for row in group]
            self._rows[kept[0]["set"], kept[0]["measure"]][kept[0]["id"]] = kept
            text += [_line(row, len(kept)) + "\n" for row in kept]
        write_text(partial, "".join(text))
        self.resumed = len(complete)


def read_samples(path: Path) -> list[Sample]:
    """Returns the samples in the file NAME.jsonl of an evaluation. Malformed lines are left out, and the number of
    malformed lines is logged as a warning.

    Raises FileNotFoundError if the file does not exist, and ValueError if no line is a sample.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    lines = read_lines(path.resolve(), _sample)  # the user may name a link
    if not lines.values:
        raise ValueError(f"{path} holds no sample of an evaluation")
    if lines.damage is not None:
        _log.warning("%s", lines.damage)
    return lines.values


def chosen_answers(rows: Sequence[Sample], count: int) -> list[Sample]:
    """Returns up to `count` answers: correct and wrong ones in equal numbers where there are enough of both."""
    right, wrong = [row for row in rows if row.get("correct")], [row for row in rows if not row.get("correct")]
    first = max(count // 2, count - len(wrong))
    chosen = right[:first]
    return [*chosen, *wrong[: count - len(chosen)]]


def _line(row: Sample, count: int) -> str:
    return json.dumps(row | {"of": count})


def _sample(raw: Any) -> Sample:
    """Converts a parsed line to a sample. Raises KeyError or TypeError for a value that is not a sample."""
    texts, numbers = (raw["set"], raw["measure"]), (raw["id"], raw["sample"])
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError("a sample has the names of its set and measure, and the numbers of its problem and its own")
    return raw
