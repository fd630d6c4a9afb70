"""Grades a file of completions, row by row. A bad row does not affect other rows, and a killed run can be resumed."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.data.rows import BadRow, json_rows
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.json_lines import append

CHUNK = 256  # number of rows that are graded before their grades are written to disk
# Outcome of a malformed row. The outcome of a valid row is rewards.grading_pool.Graded.label.
BAD_ROW = "bad_row"
GRADED = "graded.jsonl"
KEYS = {"id", "score", "correct", "outcome"}  # keys of every row of GRADED
MAX_DETAIL = 300  # maximum number of characters of an error message
Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One line of the file of completions. `why` is the reason why the line cannot be graded, or empty for a valid
    line."""

    id: Any
    payload: Mapping[str, Any]
    completion: str
    why: str = ""


def grade_file(
    source: Path, directory: Path, grade: Grade, *, say: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Grades the completions in a file of JSON lines {"id", "answer", "completion"}, and returns a summary.

    The summary has `rows` (number of rows), `accuracy` (share of correct rows), `reward` (mean score) and `outcomes`
    (count of each outcome). There is no `accuracy` if the scale of the scores is unknown (see types.is_correct). The
    summary is written to summary.json in `directory`. The file graded.jsonl in `directory` has a row {"id", "score",
    "correct", "outcome"} for each row of the source, in the same order. `outcome` is "score", "timeout",
    "error", "cut_off" (the lowest score, see reward.cut_off) or "bad_row"; all but the first have an error message
    `detail`, and rows without a score have the score 0.0. Additional fields of a row are passed to the grader.

    Rows in graded.jsonl from an interrupted run are kept; an incomplete last line is graded again. `say` is called
    with the number of graded rows after every chunk. Raises ConfigError if graded.jsonl has the grades of other rows,
    and if the source file does not exist or has no rows.
    """
    if not source.is_file():
        raise ConfigError(f"--completions {source}: there is no such file")
    directory.mkdir(parents=True, exist_ok=True)
    grades = directory / GRADED
    done = _done(grades)
    tally, total = Counter(row["outcome"] for row in done), sum(row["score"] for row in done)
    right = Counter[bool | None](row["correct"] for row in done)
    rows = (_row(*line) for line in json_rows(source))
    for number, old in enumerate(done, start=1):
        row = next(rows, None)
        if row is None or row.id != old["id"]:
            source_row = "no such row" if row is None else repr(row.id)
            raise ConfigError(
                f"{grades}:{number} is the grade of {old['id']!r}, {source} has {source_row}: give --out another "
                "directory"
            )
    while chunk := list(itertools.islice(rows, CHUNK)):
        answers = _graded(chunk, grade)
        append(grades, "\n".join(map(json.dumps, answers)).encode())
        tally.update(answer["outcome"] for answer in answers)
        total += sum(answer["score"] for answer in answers)
        right.update(answer["correct"] for answer in answers)
        say(tally.total())
    if not (count := tally.total()):
        raise ConfigError(
            f"--completions {source}: it has no rows; a row is {{'id': ..., 'answer': ..., 'completion': ...}}"
        )
    if tally[BAD_ROW] == count:
        raise ConfigError(f"--completions {source}: no row can be graded. {grades} says why; delete that file first")
    accuracy = {} if right[None] else {"accuracy": right[True] / count}
    summary = {"rows": count, **accuracy, "reward": total / count, "outcomes": dict(tally)}
    write_text(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def gradings(directory: Path) -> list[Graded]:
    """Returns the results of the gradings that `grade_file` wrote to `directory`, without malformed rows."""
    rows = [row for row in _done(directory / GRADED) if row["outcome"] != BAD_ROW]
    return [Graded.of_label(row["outcome"], row["score"], row.get("detail", "")) for row in rows]


def _graded(rows: Sequence[CompletionRow], grade: Grade) -> list[dict[str, Any]]:
    good = [row for row in rows if not row.why]
    gradings = iter(grade([row.completion for row in good], [row.payload for row in good]))
    graded_rows = []
    for row in rows:
        graded = None if row.why else next(gradings)
        found_values = (graded.score, graded.correct, graded.label, graded.detail) if graded else None
        score, correct, outcome, detail = found_values or (0.0, False, BAD_ROW, row.why)
        extra = {"detail": detail[:MAX_DETAIL]} if detail else {}
        graded_rows.append({"id": row.id, "score": score, "correct": correct, "outcome": outcome} | extra)
    return graded_rows


def _row(where: str, row: dict[str, Any] | BadRow) -> CompletionRow:
    """Converts a parsed line of the file of completions to a CompletionRow. `where`: file and line number, for the
    error message."""
    if isinstance(row, BadRow):
        return CompletionRow(None, {}, "", f"{where}: {row.why}")
    answer, completion, why = row.get("answer"), row.get("completion"), ""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if missing := [name for name in ("id", "answer", "completion") if name not in row]:
        why = f"without {' and '.join(missing)}; it has {', '.join(map(str, list(row)[:10]))}"
    elif not isinstance(answer, str) or not answer.strip():
        why = f"its answer is {str(answer)[:60]!r}: give text or a number"
    elif not isinstance(completion, str):
        why = f"its completion is {str(completion)[:60]!r}: give text"
    if why:
        return CompletionRow(row.get("id"), {}, "", f"{where}: {why}")
    payload = {name: value for name, value in row.items() if name != "completion"} | {"answer": answer}
    return CompletionRow(row["id"], payload, str(completion))


def _done(file: Path) -> list[dict[str, Any]]:
    """Returns the complete rows of the file `file` from an earlier, interrupted run. Truncates the file after the last
    complete row."""
    if not file.exists():
        return []
    kept: list[bytes] = []
    rows: list[dict[str, Any]] = []
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(row, dict) or not row.keys() >= KEYS:
            break
        kept.append(line)
        rows.append(row)
    os.truncate(file, sum(map(len, kept)))
    return rows
