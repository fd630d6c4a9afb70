r"""Tells from the text of a mathematical answer whether it would cost a computer algebra system too much to read.

A model may write `10^{10000000}`, `100!!` or ten thousand letters in a box: sympy computes what it reads, for minutes
or until the memory is full. Such an answer is refused before anything reads it.
"""

from __future__ import annotations

import math
import re

LONGEST = 1_000  # characters of an answer
DIGITS = 400  # of one number
DEPTH = 24  # of brackets within brackets
POWERS = 4  # of powers within powers
EXPONENT = 10_000  # largest number in an exponent
FACTORIAL = 9_999  # largest number before an exclamation mark, and largest of a binomial
SUM_POWER = 60  # largest power of a sum with letters or roots: it would be written out
TERMS = 2_500  # largest number in a text with a sum, as it may be its bound
FACTORS = 100  # largest number in a text with a product, and largest below a binomial of something else than a number
CELLS = 20  # of a determinant
BARS = 20  # of absolute values, which the grammar tries to pair in every way
SETS = 6  # of sets within sets, whose brackets the grammar tries to read in every way
LETTERS = 60  # subscripts, and letters next to each other without a word of LaTeX: each would be a factor

_RUN = re.compile(r"\d[\d,_]*")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(\[]*\s*[-+]?\s*(\d+)")
_FLOAT = re.compile(r"\d[eE][-+]?(\d{3,})")
_FACTORIAL = re.compile(r"(\d+)\s*[})\]]*\s*!")
_FACTORIALS = re.compile(r"[\d})\]]\s*!\s*(?:\\right\s*)?(?:[})\]]\s*)*!")
_BINOMIAL = re.compile(r"\\(?:[dt]?binom|Gamma)\s*(?:\\left)?\s*(?:[{(]\s*)?(\d+)")
_BELOW = re.compile(r"\\[dt]?binom\s*(?:\{[^{}]*[^{}\d][^{}]*\}|[a-z])\s*\{?\s*(\d+)")
_DIGITS = re.compile(r"\d+")
_SETS = re.compile(rf"(?:\\\{{\s*){{{SETS + 1},}}")
_POWER_IN_POWER = re.compile(
    r"(?<![\d.])(?=(\d+(?:\.\d+)?)\s*[})\]]*\s*(?:\^|\*\*)\s*[{(\[]*\s*[-+]?\s*(\d+))"
)  # overlapping
_SUM_POWER = re.compile(r"\(([^()]*)\)\s*(?:\^|\*\*)\s*[{(\[]*\s*(\d+)")
_SUM = re.compile(r"(?=.*[a-zA-Z]).*[+-]", re.DOTALL)  # a sum that has letters or roots
_COMMAND = re.compile(r"\\[a-zA-Z]+(?:\{[a-zA-Z ]*\})?")
_LETTERS = re.compile(rf"(?:[a-zA-Z]\s*){{{LETTERS},}}")


def too_costly(answer: str, known: str = "") -> bool:
    """Returns whether the text of an answer would cost sympy too much.

    `known`: the right answer. An answer may be twice as long, and has many letters where the known one has.
    """
    many_letters = _many_letters(answer) and not _many_letters(known)
    return len(answer) > max(LONGEST, 2 * len(known)) or many_letters or too_costly_anywhere(answer)


def _many_letters(text: str) -> bool:
    return text.count("_") > LETTERS or _LETTERS.search(_COMMAND.sub(" . ", text)) is not None


def too_costly_anywhere(text: str) -> bool:
    """Returns whether some part of a text would cost sympy too much."""
    depth, powers = _depths(text)
    limits = ((_EXPONENT, EXPONENT), (_FACTORIAL, FACTORIAL), (_BINOMIAL, FACTORIAL), (_FLOAT, EXPONENT))
    return (
        any(sum(map(str.isdigit, run)) > DIGITS for run in _RUN.findall(text))
        or depth > DEPTH
        or powers > POWERS
        or _FACTORIALS.search(text) is not None
        or any(map(_costly_formula, re.split(r"[\n$]", text)))
        or any(int(number) > limit for pattern, limit in limits for number in pattern.findall(text))
        or (powers > 1 and _tower(text))
        or any(int(power) > SUM_POWER and _SUM.search(base) for base, power in _SUM_POWER.findall(text))
    )


def _costly_formula(text: str) -> bool:
    """Returns whether one formula has too many bars, braces or cells for the grammar, or a bound that explodes."""
    if text.count("|") > BARS or _SETS.search(text):
        return True
    if text.count("&") > CELLS and ("vmatrix" in text or "\\det" in text):
        return True
    bounds = {"\\sum": TERMS, "\\prod": FACTORS, "binom": FACTORIAL}
    largest = min((bound for name, bound in bounds.items() if name in text), default=0)
    if largest and any(int(number) > largest for number in _DIGITS.findall(text)):
        return True
    return any(int(number) > FACTORS for number in _BELOW.findall(text))


def _depths(answer: str) -> tuple[int, int]:
    """Returns how deep brackets lie in brackets, and powers in the exponents of powers."""
    deepest = powers = above = 0  # above: open brackets that are exponents
    opened: list[bool] = []  # by open bracket: whether it is an exponent
    exponent = False  # whether the next thing is one
    chain = 0  # powers without brackets: 2^3^4
    for character in answer.replace("**", "^"):
        if character in "{[(":
            opened.append(exponent)
            above += exponent
            exponent = False
        elif character in "}])" and opened:
            above -= opened.pop()
        elif character == "^":
            exponent, chain = True, chain + 1
        elif not character.isspace():
            exponent = False
            chain = chain if character.isalnum() else 0
        deepest = max(deepest, len(opened))
        powers = max(powers, above + max(exponent, chain))
    return deepest, powers


def _tower(answer: str) -> bool:
    """Returns whether some power of numbers that stands in an exponent is above EXPONENT."""
    for match in _POWER_IN_POWER.finditer(answer):
        before = answer[: match.start()].rstrip("{([ +-")
        base, exponent = float(match[1]), int(match[2])
        above = before.endswith("^") or before.endswith("**")
        if above and base > 1 and exponent * math.log10(base) > math.log10(EXPONENT):
            return True
    return False
