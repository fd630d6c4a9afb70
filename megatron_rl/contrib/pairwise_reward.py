"""Parses a judge's comparison of two responses: principles, a critique, and a score for each response."""

from __future__ import annotations

import re
from dataclasses import dataclass

BEST = 10.0  # maximum score that a judge may give; the minimum is 0

_TAGS = ("<principles>", "</principles>", "<critique>", "</critique>", "<scores>", "</scores>")
_FORM = re.compile(
    r"<principles>(.*)</principles>\s*<critique>(.*)</critique>\s*<scores>.*</scores>", re.DOTALL
)  # the pattern matches in only one way, because each tag must occur exactly once
_SCORES = re.compile(r"\s*(\d{1,2}(?:\.\d{1,6})?)\s*,\s*(\d{1,2}(?:\.\d{1,6})?)\s*")


@dataclass(frozen=True)
class Comparison:
    """The parsed content of one comparison."""

    # scores of the first and the second response shown, in [0, 10]; None if unreadable
    scores: tuple[float, float] | None
    form: float  # 1.0 if the text consists of principles, a critique and readable scores in this order; otherwise 0.0


def read_comparison(text: str) -> Comparison:
    """Parses a judge's answer, which may be any text. The scores are the two numbers in the last <scores> block."""
    _, opened, rest = text.rpartition("<scores>")
    inside, closed, _ = rest.partition("</scores>")
    found = _SCORES.fullmatch(inside) if opened and closed else None
    scores = None if found is None else (float(found[1]), float(found[2]))
    if scores is None or max(scores) > BEST:
        return Comparison(None, 0.0)
    form = _FORM.fullmatch(text.strip()) if all(text.count(tag) == 1 for tag in _TAGS) else None
    return Comparison(scores, float(form is not None and bool(form[1].strip()) and bool(form[2].strip())))
