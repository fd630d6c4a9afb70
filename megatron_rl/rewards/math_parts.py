r"""Splits a mathematical answer into its parts: the elements of a list, a set or a tuple, and the rows of cases."""

from __future__ import annotations

import re
from typing import NamedTuple

DOTS = "\\ldots"
_OPEN, _CLOSE = {"(", "[", "{"}, {")", "]", "}"}
_TOKEN = re.compile(r"\\(?:begin|end)\s*\{[a-z*]+\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_JOINED = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*")
_ELLIPSIS = re.compile(r"\\(?:ldots|dots|cdots|dotsc|dotsb|hdots)(?![a-z])|\.\.\.+")
_SIZES = re.compile(r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?)(?![a-z])\s*")
_ROWS = re.compile(
    r"(?:[A-Za-z]+(?:\([^()=]*\))?\s*=\s*)?(?:\\\{)?\\begin\s*\{(cases|array)\}(?:\s*\{[lcr|]*\})?(.*)\\end\s*\{\1\}\.?",
    re.DOTALL,
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:! ]|\\q?quad(?![a-z])|~|\s+")
_CHOICE = re.compile(r"\(?([A-Z])[).]?")
WORDS = re.compile(r"(?:\\(?:angle|triangle))?[A-Za-z'(). -]*[A-Za-z]{3}[A-Za-z'(). -]*|no|on")


class Parts(NamedTuple):
    """The elements of an answer, and the brackets around them."""

    kind: str  # the brackets, such as "{}", "()" or "[)"; "" if there are no brackets
    elements: list[str]
    dots: bool  # whether one of the elements is an ellipsis, as in 1, 2, \ldots, 10


def plain(text: str) -> str:
    """Returns a text without LaTeX spacing and font commands. If the text consists of words only, returns it in lower
    case.

    Texts with the same plain form are the same answer.
    """
    text = _SPACE.sub(" ", _SIZES.sub("", _WRAPPER.sub(r"\1", text)))
    text = re.sub(r"(?<!\d) | (?!\d)", "", text.strip())
    text = _ELLIPSIS.sub(r"\\ldots", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    choice = _CHOICE.fullmatch(text)
    if choice:
        return choice[1]
    return text.lower() if WORDS.fullmatch(text) else text


def split(text: str) -> Parts:
    r"""Splits a mathematical answer, such as a list or a set, into its elements and brackets. An element with \pm or
    \mp becomes two elements."""
    text = _ELLIPSIS.sub(r"\\ldots ", _JOINED.sub(", ", _SIZES.sub("", text))).strip()
    elements, kind = _at_commas(text), ""
    if len(elements) == 1 and (inner := _within(text)):
        kind, elements = inner[0], _at_commas(inner[1])
        if len(elements) == 1 and kind != "{}":
            kind, elements = "", [text]  # brackets around a single element do not make it a list
    signs = []
    for element in elements:
        upper = re.sub(r"\\pm(?![a-z])", "+", re.sub(r"\\mp(?![a-z])", "-", element))
        lower = re.sub(r"\\pm(?![a-z])", "-", re.sub(r"\\mp(?![a-z])", "+", element))
        signs += [upper] if upper == lower else [upper, lower]
    return Parts(kind, signs, any(DOTS in element for element in elements))


def rows(text: str) -> list[list[str]] | None:
    r"""Returns the cells of each row of a `cases` or `array` environment; None for any other text."""
    environment = _ROWS.fullmatch(_SIZES.sub("", text).strip())
    if not environment:
        return None
    lines = [re.sub(r"\\text\s*\{\s*(?:if|for|when)?\s*\}", "", line) for line in environment[2].split("\\\\")]
    return [[cell.strip().rstrip(",.").strip() for cell in line.split("&")] for line in lines if line.strip()]


def _at_commas(text: str) -> list[str]:
    """Splits a text at the commas and semicolons that are not inside brackets."""
    if "," not in text and ";" not in text:
        return [text]
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += _step(token)
        if token in (",", ";") and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def _within(text: str) -> tuple[str, str] | None:
    """Returns (brackets, content) of a text that is enclosed in one pair of brackets; None for any other text."""
    tokens = _TOKEN.findall(text)
    if (
        len(tokens) < 2
        or tokens[0] not in ("\\{", "(", "[", "\\lbrace")
        or tokens[-1] not in ("\\}", ")", "]", "\\rbrace")
    ):
        return None
    depth = 0
    for place, token in enumerate(tokens):
        depth += _step(token)
        if depth == 0 and place < len(tokens) - 1:
            return None
    brackets = (tokens[0] + tokens[-1]).replace("\\lbrace", "{").replace("\\rbrace", "}").replace("\\", "")
    return brackets, "".join(tokens[1:-1])


def _step(token: str) -> int:
    if token in _OPEN or token in ("\\{", "\\lbrace") or token.startswith("\\begin"):
        return 1
    return -(token in _CLOSE or token in ("\\}", "\\rbrace") or token.startswith("\\end"))
