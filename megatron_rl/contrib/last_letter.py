"""Grades the last-letter task, which asks for the last letters of words: the answer, and each reasoning step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.texts.tags import boxed


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 if the boxed letters equal payload["answer"] except for whitespace, otherwise 0.0."""
    answer = boxed(response)
    return float(answer is not None and "".join(answer.split()) == "".join(str(payload["answer"]).split()))


def step_labels(step_texts: Sequence[str], payload: Mapping[str, Any]) -> list[bool]:
    """Returns the gold label of each reasoning step.

    Step j, `#j letters`, is correct if its letters equal the last letter of `payload["words"][j - 1]`. The number after
    `#` is ignored, because the vocabulary may have fewer numbers than there are steps. A step without `#`, or without a
    corresponding word, is wrong.
    """
    words = payload["words"]
    parts = [text.split() or [""] for text in step_texts]
    return [
        j < len(words) and mark.startswith("#") and "".join(letters) == words[j][-1]
        for j, (mark, *letters) in enumerate(parts)
    ]
