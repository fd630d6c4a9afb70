"""Normalizes the answer in a response, so that a majority vote recognizes equal answers in different notations.

The rules are cheap text replacements; no expression is evaluated.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_rl.rewards.short_answer import stated_answer
from megatron_rl.texts.tags import joined_boxes

MAX_CHARACTERS = 400  # maximum number of characters of an answer; longer answers are truncated
_LAST_NUMBER = re.compile(r"-?\d[\d,]{0,60}(?:\.\d{1,60})?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac(?:\{(-?\d{1,40})\}\{(-?\d{1,40})\}|(\d)(\d))")
_RATIO = re.compile(r"(-?\d{1,40}(?:\.\d{1,40})?|-?\.\d{1,40})(?:/(\d{1,40}))?")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|[,;!: ])|[\s$~]|\^\{?\\circ\}?|\\(?:text|mathrm|mathbf|mbox)\{[^{}]*\}"
)


def answer_key(response: str) -> str | None:
    """Returns the normal form of the answer in a response as a key, so that equal answers have equal keys.

    Returns None if the answer is empty, or if the response has no `\\boxed{}`, no `<answer>` block and no number.
    """
    box = joined_boxes(response)
    if box is None and "<answer>" not in response:
        numbers = _LAST_NUMBER.findall(response[-4 * MAX_CHARACTERS :])
        return normal_form(numbers[-1]) if numbers else None
    return normal_form(stated_answer(response) if box is None else box) or None


def normal_form(answer: str) -> str:
    """Returns the normal form of a mathematical answer: `\\frac12`, `1/2` and `0.5` become `1/2`; `x = 5` becomes `5`.

    Spaces, LaTeX spacing commands and units in `\\text{}` are removed.
    """
    text = _DROPPED.sub("", answer[:MAX_CHARACTERS]) or re.sub(r"\s", "", answer[:MAX_CHARACTERS])
    text = re.sub(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", "", text).rstrip(".")
    text = re.sub(r"^[A-Za-z]=", "", text)
    number = text.removesuffix("\\%").removesuffix("%")
    fraction = _FRACTION.fullmatch(number)
    if fraction:
        above, below = (fraction[2], fraction[3]) if fraction[2] else (fraction[4], fraction[5])
        number = f"{fraction[1] if not above.startswith('-') else ''}{above}/{below}"
    ratio = _RATIO.fullmatch(number)
    if ratio and (ratio[2] is None or int(ratio[2])):
        return str(Fraction(ratio[1]) / int(ratio[2] or 1))
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").lower()
