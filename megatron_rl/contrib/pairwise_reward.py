"""Reads a judge's comparison of two responses: principles, a critique, and a score for each."""

from __future__ import annotations

import re
from dataclasses import dataclass

BEST = 10.0  # highest score; the lowest is 0

_TAGS = ("<principles>", "</principles>", "<critique>", "</critique>", "<scores>", "</scores>")
_FORM = re.compile(
    r"<principles>(.*)</principles>\s*<critique>(.*)</critique>\s*<scores>.*</scores>", re.DOTALL
)  # unambiguous, as each tag is there once
_SCORES = re.compile(r"\s*(\d{1,2}(?:\.\d{1,6})?)\s*,\s*(\d{1,2}(?:\.\d{1,6})?)\s*")


@dataclass(frozen=True)
class Comparison:
    """The content of one comparison."""

    scores: tuple[float, float] | None  # of the response shown first and of the second, in [0, 10]; None: unreadable
    form: float  # 1.0 for principles, a critique and scores that can be read, in this order, and nothing else; else 0.0


def read_comparison(text: str) -> Comparison:
    """Reads a judge's answer. Any text is allowed. The scores are two numbers in the last <scores> block."""
    _, opened, rest = text.rpartition("<scores>")
    inside, closed, _ = rest.partition("</scores>")
    found = _SCORES.fullmatch(inside) if opened and closed else None
    scores = None if found is None else (float(found[1]), float(found[2]))
    if scores is None or max(scores) > BEST:
        return Comparison(None, 0.0)
    form = _FORM.fullmatch(text.strip()) if all(text.count(tag) == 1 for tag in _TAGS) else None
    return Comparison(scores, float(form is not None and bool(form[1].strip()) and bool(form[2].strip())))
