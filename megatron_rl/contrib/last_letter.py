"""Grades the last-letter task: the boxed letters, and every reasoning step against the word it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.rewards.tags import boxed


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 when the boxed letters equal payload["answer"], white space aside, else 0.0."""
    answer = boxed(response)
    return float(answer is not None and "".join(answer.split()) == "".join(str(payload["answer"]).split()))


def step_labels(step_texts: Sequence[str], payload: Mapping[str, Any]) -> list[bool]:
    """Returns the gold label of each reasoning step.

    Step j, `#j letters`, is correct when its letters are the last letter of `payload["words"][j - 1]`. The number in
    the mark is not read, as a vocabulary may end before the steps do. A step without a mark, or beyond the words, is
    wrong.
    """
    words = payload["words"]
    parts = [text.split() or [""] for text in step_texts]
    return [
        j < len(words) and mark.startswith("#") and "".join(letters) == words[j][-1]
        for j, (mark, *letters) in enumerate(parts)
    ]
