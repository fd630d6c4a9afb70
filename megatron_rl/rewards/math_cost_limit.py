r"""Checks the text of a mathematical answer for expressions that are too costly for a computer algebra system to parse.

A model may generate `10^{10000000}`, `100!!` or ten thousand letters in a box. sympy evaluates expressions while it
parses them, which can take minutes or all memory. Such an answer is rejected before it is parsed.
"""

from __future__ import annotations

import math
import re

LONGEST = 1_000  # maximum number of characters of an answer; if more, twice the length of the known answer
DIGITS = 400  # maximum number of digits of one number
DEPTH = 24  # maximum depth of nested brackets
POWERS = 4  # maximum depth of nested powers
EXPONENT = 10_000  # largest number that may be in an exponent
FACTORIAL = 9_999  # largest number that may be before an exclamation mark or in a binomial coefficient
SUM_POWER = 60  # largest exponent of a sum that has letters or roots, because sympy would expand the power
TERMS = 2_500  # largest number in a text with a summation sign, because the number may be a bound of the sum
# Largest number in a text with a product sign.
# Also the largest lower index of a binomial coefficient whose upper index is not a number.
FACTORS = 100
CELLS = 20  # maximum number of cell separators in a determinant
BARS = 20  # maximum number of bars of absolute values, because the parser tries all ways to pair the bars
SETS = 6  # maximum depth of nested sets, because the parser tries all ways to pair the brackets
# maximum number of subscripts, and of consecutive letters outside LaTeX commands; each letter is parsed as a factor
LETTERS = 60

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
)  # matches may overlap
_SUM_POWER = re.compile(r"\(([^()]*)\)\s*(?:\^|\*\*)\s*[{(\[]*\s*(\d+)")
_SUM = re.compile(r"(?=.*[a-zA-Z]).*[+-]", re.DOTALL)  # a sum that has letters or roots
_COMMAND = re.compile(r"\\[a-zA-Z]+(?:\{[a-zA-Z ]*\})?")
_LETTERS = re.compile(rf"(?:[a-zA-Z]\s*){{{LETTERS},}}")


def too_costly(answer: str, gold_answer: str = "") -> bool:
    """Returns whether the text of an answer is too costly for sympy to parse.

    `gold_answer`: the known answer. The maximum length of the answer is LONGEST characters, or twice the length of the
    known answer if that is more. An answer with many letters is only too costly if the known answer has few letters.
    """
    many_letters = _many_letters(answer) and not _many_letters(gold_answer)
    return len(answer) > max(LONGEST, 2 * len(gold_answer)) or many_letters or too_costly_anywhere(answer)


def _many_letters(text: str) -> bool:
    return text.count("_") > LETTERS or _LETTERS.search(_COMMAND.sub(" . ", text)) is not None


def too_costly_anywhere(text: str) -> bool:
    """Returns whether any part of a text is too costly for sympy to parse."""
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
    """Returns whether a formula has too many bars, braces or cells for the parser, or too large a number for the bound
    of a sum or a product or for a binomial coefficient."""
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
    """Returns (depth of nested brackets, depth of nested powers) of a text."""
    deepest = powers = above = 0  # `above`: number of open brackets that are inside an exponent
    opened: list[bool] = []  # for each open bracket: whether it contains an exponent
    exponent = False  # whether the next character is an exponent
    chain = 0  # number of powers in a chain without brackets, such as 2^3^4
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
    """Returns whether an exponent in the text is itself a power with a value above EXPONENT, such as in 2^{9^9}."""
    for match in _POWER_IN_POWER.finditer(answer):
        prefix = answer[: match.start()].rstrip("{([ +-")
        base, exponent = float(match[1]), int(match[2])
        above = prefix.endswith("^") or prefix.endswith("**")
        if above and base > 1 and exponent * math.log10(base) > math.log10(EXPONENT):
            return True
    return False
