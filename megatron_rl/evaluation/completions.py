"""Grades a file of given completions, row by row. A bad row fails alone, and a run that was killed can be continued."""

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
from megatron_rl.evaluation.set_metrics import CORRECT
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.run.atomic_files import write_text

CHUNK = 256  # rows graded between two writes
# outcome of a row that is no completion; the other outcomes are those of rewards.grading_pool.Outcome
BAD_ROW = "bad_row"
GRADED = "graded.jsonl"
MAX_DETAIL = 300  # characters of a failure's description
Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One line of the file of completions. `why` says why it cannot be graded; it is empty for a good row."""

    id: Any
    payload: Mapping[str, Any]
    completion: str
    why: str = ""


def grade_file(
    source: Path, directory: Path, grade: Grade, *, say: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Grades rows {"id", "answer", "completion"} and returns the summary: rows, accuracy (the share that is correct),
    reward (the mean score) and counts by outcome.

    Writes DIR/graded.jsonl, rows {"id", "score", "outcome"} in the same order, and DIR/summary.json. Other fields of a
    row reach the grader too. `outcome` is score, timeout, error or bad_row; the last three have score 0.0 and a
    `detail`. What an earlier start left in DIR is kept; a last line that was cut is graded again. `say` gets the number
    of rows done after every chunk. Raises ConfigError when DIR holds the grades of other rows, or there is no file.
    """
    if not source.is_file():
        raise ConfigError(f"--completions {source}: there is no such file")
    directory.mkdir(parents=True, exist_ok=True)
    out = directory / GRADED
    done = _done(out)
    counts, total = Counter(row["outcome"] for row in done), sum(row["score"] for row in done)
    correct = sum(row["score"] > CORRECT for row in done)
    rows = (_row(*line) for line in json_rows(source))
    for number, old in enumerate(done, start=1):
        row = next(rows, None)
        if row is None or row.id != old["id"]:
            there = "no such row" if row is None else repr(row.id)
            raise ConfigError(
                f"{out}:{number} is the grade of {old['id']!r}, {source} has {there}: give --out another directory"
            )
    with out.open("a", encoding="utf-8") as file:
        while chunk := list(itertools.islice(rows, CHUNK)):
            answers = _graded(chunk, grade)
            file.writelines(json.dumps(answer) + "\n" for answer in answers)
            file.flush()
            os.fsync(file.fileno())
            counts.update(answer["outcome"] for answer in answers)
            total += sum(answer["score"] for answer in answers)
            correct += sum(answer["score"] > CORRECT for answer in answers)
            say(sum(counts.values()))
    count = sum(counts.values())
    if not count:
        raise ConfigError(
            f"--completions {source}: it has no rows; a row is {{'id': ..., 'answer': ..., 'completion': ...}}"
        )
    summary = {"rows": count, "accuracy": correct / count, "reward": total / count, "outcomes": dict(counts)}
    write_text(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def _graded(rows: Sequence[CompletionRow], grade: Grade) -> list[dict[str, Any]]:
    good = [row for row in rows if not row.why]
    found = iter(grade([row.completion for row in good], [row.payload for row in good]))
    out = []
    for row in rows:
        graded = None if row.why else next(found)
        score, outcome = (0.0, BAD_ROW) if graded is None else (graded.score, graded.outcome.value)
        detail = row.why if graded is None else graded.detail
        detail = {"detail": detail[:MAX_DETAIL]} if detail else {}
        out.append({"id": row.id, "score": score, "outcome": outcome} | detail)
    return out


def _row(where: str, row: dict[str, Any] | BadRow) -> CompletionRow:
    """Returns the CompletionRow of a line. `where` names the line's file and number."""
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


def _done(out: Path) -> list[dict[str, Any]]:
    """Reads the whole lines that an earlier start wrote, and cuts the file behind the last of them."""
    if not out.exists():
        return []
    kept: list[bytes] = []
    rows: list[dict[str, Any]] = []
    for line in out.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(row, dict) or not {"id", "score", "outcome"} <= row.keys():
            break
        kept.append(line)
        rows.append(row)
    os.truncate(out, sum(map(len, kept)))
    return rows
