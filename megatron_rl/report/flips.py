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
    names, read, flips = names_of(files), [read_answers(path) for path in files], []
    for place in range(1, len(files)):
        first, second = ({(*key, p): rows for key, problems in answers.items() for p, rows in problems.items()}
                         for answers in read[place - 1 : place + 1])  # fmt: skip
        both = [key for key in first if key in second]
        rows = [
            {"question": _of(first[key], "question") or f"problem {key[2]}", "set": key[1],
             "answer": _of(first[key], "answer"), **_change(a, b), "iterations": None,
             "texts": [_of(first[key], "response"), _of(second[key], "response")]}
            for key in both
            if _solved(a := _share(first[key])) != _solved(b := _share(second[key]))
        ]  # fmt: skip
        flips.append(_flips(names[place - 1], names[place], len(both), rows))
    return flips


def of_rollouts(picked: Picked, runs: Sequence[str]) -> list[Flips]:
    """Finds problems that flipped between the first and the last iteration in which a run answered them. Only the
    rollouts in `picked`, which the page shows, are used. `runs`: names of the runs."""
    flips = []
    for place, name in enumerate(runs):
        again = {key: attempts for key, attempts in picked.solved.items() if key[0] == place and len(attempts) > 1}
        rows = [
            {"question": question, "set": role, "answer": None, "texts": [None, None],
             "iterations": [attempts[0][0] + 1, attempts[-1][0] + 1], **_change(attempts[0][1:], attempts[-1][1:])}
            for (_, role, question), attempts in again.items()
            if _solved(attempts[0][1:]) != _solved(attempts[-1][1:])
        ]  # fmt: skip
        if again:
            flips.append(_flips(f"{name}, first time", "last time", len(again), rows))
    return flips


def _flips(first: str, second: str, common: int, rows: list[dict[str, Any]]) -> Flips:
    gained = sum(row["gained"] for row in rows)
    ordered = sorted(rows, key=lambda row: (row["gained"], row["question"] or ""))  # lost problems come first
    return Flips(
        first=first, second=second, common=common, gained=gained, lost=len(rows) - gained, rows=ordered[:MAX_FLIPS]
    )


def _change(first: Solved, last: Solved) -> dict[str, Any]:
    return {"before": list(first), "after": list(last), "gained": _solved(last)}


def _solved(counts: Solved) -> bool:
    return counts[0] > FLIP * counts[1]


def _share(rows: Sequence[Sample]) -> Solved:
    return sum(bool(row["correct"] if "score" in row else score_of(row)) for row in rows), len(rows)


def _of(rows: Sequence[Sample], name: str) -> str | None:
    """Returns the value of the column `name` in the first row that has this column, as truncated text. Returns None if
    no row has the column."""
    value = next((str(row[name]) for row in rows if row.get(name) is not None), None)
    return None if value is None else shortened(value, MAX_CHARACTERS)
