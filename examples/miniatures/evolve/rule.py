"""The rule of the miniature: a question is a row of letters with their numbers, and its answer the letters after them.

The question `c #1 a #2` has the answer `#1 d #2 b`; after the last letter comes the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.rewards.role_tags import last_inside

LETTERS = "abcdefghij"
MOST = 6  # letters of a question


def row(letters: Sequence[str]) -> str:
    """Writes letters as a question."""
    return " ".join(f"{letter} #{i}" for i, letter in enumerate(letters, start=1))


def listed(letters: Sequence[str]) -> str:
    """Writes letters as an answer."""
    return " ".join(f"#{i} {letter}" for i, letter in enumerate(letters, start=1))


def solved(letters: Sequence[str]) -> list[str]:
    """Returns the letters after these."""
    return [LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in letters]


def letters_of(question: str) -> list[str] | None:
    """Returns the letters of a question; None for a text that is none."""
    letters = question.split()[::2]
    known = 0 < len(letters) <= MOST and all(letter in LETTERS for letter in letters)
    return letters if known and question.split() == row(letters).split() else None


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 when the answer block holds payload["answer"], else 0.0."""
    return float((last_inside(response, "answer") or "").split() == str(payload["answer"]).split())


def correct(answer: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 for the answer to a question that is one, payload["question"], else 0.0."""
    letters = letters_of(payload["question"])
    return float(letters is not None and answer.split() == listed(solved(letters)).split())
