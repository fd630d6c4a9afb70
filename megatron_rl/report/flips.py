"""Finds problems that flipped: solved in only one of two evaluations, or only early or only late in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.evaluation.samples import Sample
from megatron_rl.report.evaluation_comparison import names_of, read_answers, score_of
from megatron_rl.report.html_page import shortened
from megatron_rl.report.shown_rollouts import Picked

FLIP = 0.5  # a problem is solved if more than this fraction of its answers is correct
MAX_FLIPS = 500  # maximum number of flipped problems that are shown for each comparison (see Flips)
MAX_CHARACTERS = 4000  # maximum length of a text; longer texts are truncated
Solved = tuple[int, int]  # (number of correct answers, number of answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """The problems that flipped between `first` and `second`, two evaluations or two times in a run."""

    first: str
    second: str
    common: int  # number of problems that both have
    gained: int  # number of problems that were wrong in `first` and correct in `second`
    lost: int  # number of problems that were correct in `first` and wrong in `second`
    rows: Sequence[Mapping[str, Any]]  # the flipped problems, at most MAX_FLIPS


def of_evaluations(files: Sequence[Path]) -> list[Flips]:
    """Compares each result of `megatron-rl eval` with the previous one.

    `files`: the file NAME.json of each evaluation, with NAME.jsonl in the same directory. Raises ConfigError if a file
    is not a finished evaluation.
    """
    names, read, out = names_of(files), [read_answers(path) for path in files], []
    for place in range(1, len(files)):
        before, after = ({(*key, p): rows for key, own in one.items() for p, rows in own.items()}
                         for one in read[place - 1 : place + 1])  # fmt: skip
        both = [key for key in before if key in after]
        rows = [
            {"question": _of(before[key], "question") or f"problem {key[2]}", "set": key[1],
             "answer": _of(before[key], "answer"), **_change(a, b), "iterations": None,
             "texts": [_of(before[key], "response"), _of(after[key], "response")]}
            for key in both
            if _solved(a := _share(before[key])) != _solved(b := _share(after[key]))
        ]  # fmt: skip
        out.append(_flips(names[place - 1], names[place], len(both), rows))
    return out


def of_rollouts(picked: Picked, runs: Sequence[str]) -> list[Flips]:
    """Finds problems that flipped between the first and the last iteration in which a run answered them. Only the
    rollouts in `picked`, which the page shows, are used. `runs`: names of the runs."""
    out = []
    for place, name in enumerate(runs):
        again = {key: found for key, found in picked.solved.items() if key[0] == place and len(found) > 1}
        rows = [
            {"question": question, "set": role, "answer": None, "texts": [None, None],
             "iterations": [found[0][0] + 1, found[-1][0] + 1], **_change(found[0][1:], found[-1][1:])}
            for (_, role, question), found in again.items()
            if _solved(found[0][1:]) != _solved(found[-1][1:])
        ]  # fmt: skip
        if again:
            out.append(_flips(f"{name}, first time", "last time", len(again), rows))
    return out


def _flips(first: str, second: str, common: int, rows: list[dict[str, Any]]) -> Flips:
    gained = sum(row["gained"] for row in rows)
    ordered = sorted(rows, key=lambda row: (row["gained"], row["question"] or ""))  # lost problems come first
    return Flips(
        first=first, second=second, common=common, gained=gained, lost=len(rows) - gained, rows=ordered[:MAX_FLIPS]
    )


def _change(before: Solved, after: Solved) -> dict[str, Any]:
    return {"before": list(before), "after": list(after), "gained": _solved(after)}


def _solved(counts: Solved) -> bool:
    return counts[0] > FLIP * counts[1]


def _share(rows: Sequence[Sample]) -> Solved:
    return sum((score_of(row) or 0.0) > FLIP for row in rows), len(rows)


def _of(rows: Sequence[Sample], name: str) -> str | None:
    """Returns the value of the column `name` in the first row that has this column, as truncated text. Returns None if
    no row has the column."""
    value = next((str(row[name]) for row in rows if row.get(name) is not None), None)
    return None if value is None else shortened(value, MAX_CHARACTERS)
