r"""Rewrites mathematical text of models and data sets into LaTeX that math-verify parses correctly.

math-verify 0.9 parses `1\,234` as a product, drops the base of `52_9` and the prime of `x'`, parses `A` and `a` as the
same symbol, and cannot parse `½`, `0.\overline{3}`, `2 1/4` or `\sin 30^\circ`.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

_SYMBOLS = {
    **dict.fromkeys("·⋅∙", r"\cdot "), **dict.fromkeys("−–—‐‑‒", "-"), **dict.fromkeys("’′", "'"),
    **dict.fromkeys("≤⩽≦", r"\le "), **dict.fromkeys("≥⩾≧", r"\ge "), **dict.fromkeys("º°˚", r"^\circ "),
    "×": r"\times ", "÷": r"\div ", "∗": "*", "∞": r"\infty ", "√": "√", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "≈": r"\approx ", "…": r"\ldots ", "⋯": r"\cdots ",
    "∠": r"\angle ", "△": r"\triangle ", "→": r"\to ", "∶": ":", "⁄": "/", "∖": r"\setminus ", "≡": r"\equiv ",
    **{symbol: rf"\mathbb{{{letter}}}" for symbol, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
}  # fmt: skip
# characters that temporarily mark the start of a superscript, the start of a subscript, and the end of both
_UP, _DOWN, _END = "\ue000", "\ue001", "\ue002"
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|\\[A-Za-z]+|[A-Za-z]))")
_DECORATION = re.compile(
    r"`|\*\*|(?<!\\)\$|(?<!\\)\\[()]|^\s*\\\[|\\\]\s*$|\\(?:displaystyle|boldsymbol|bm|limits)(?![a-z])|\\(?:text)?color\{[a-z]+\}"
)
_SPACE = r"(?:\\[,;:! ]|~|\s)"
_GROUPS = re.compile(rf"(?<![\w.,}}])\d{{1,3}}(?:(?:{_SPACE}|\{{,\}}|,\\!){_SPACE}*\d{{3}})+(?!\d)")
_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,}])(\d+)\{,\}(\d{1,2}|\d{4,})(?![\d.,{])")
_OVERLINE = re.compile(r"(\d+)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_DOTTED = re.compile(r"(\d+)\.(\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?")
_PERIOD = re.compile(r"(\d+)\.()\((\d+)\)$")
_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*\{?\s*)?(?:\\(?:text|mathrm)\s*\{\s*)?(?:st|nd|rd|th)\b[\s}]*$")
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12, "hundred": 100}
_COUNTED = re.compile(rf"(?<=\d){_SPACE}*(?:\\text\s*\{{\s*({'|'.join(_LARGE)})s?\b\s*\}}?|({'|'.join(_LARGE)})s?\b)")
_MIXED = re.compile(rf"(?<![\w.^_}})/*])(\d+){_SPACE}+(\d+)\s*/\s*(\d+)(?![\w.^(/])")
_FLOAT = re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.^])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_SCIENTIFIC = re.compile(r"(?<![\d.,])(\d+)\.(\d+)(\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?)(\d+)(?=\}|(?!\d))")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_BASED = re.compile(
    r"(?<![\w^.\\}_])(?:\\(?:text|mathrm)\{\s*([0-9A-F]+)\s*\}|\(\s*(\d[0-9A-F]*)\s*\)|(\d[0-9A-F]*))\s*_\s*"
    r"(?:(\d)(?!\d)|\{\s*\(?(\d{1,2}|[a-z]{3,7})\)?\s*\}|\{\s*\\(?:text|mathrm)\{\s*([a-z]{3,7})\s*\}\s*\})"
)
# matches the symbol that `canonical` writes instead of a number that has a base, such as 52_9
BASED = re.compile(r"\\Psi_\{(\w+)b(\d+)\}")
_TO = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_CIRCLE = r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degree(?![a-z]))"
_DEGREES = re.compile(rf"(\d+(?:\.\d+)?|(?<![a-zA-Z])[a-zA-Z]|\\[a-zA-Z]+|\([^()]*\)){_CIRCLE}")
_SCALE = re.compile(rf"{_CIRCLE}\s*(?:\\(?:text|mathrm)\s*\{{\s*([CF])\s*\}}|([CF]))$")
_ODD_ROOT = re.compile(r"\\sqrt\s*\[\s*(\d*[13579])\s*\]\s*\{\s*-\s*(\d+|\\frac\{\d+\}\{\d+\})\s*\}")
_PRIME = re.compile(r"(?<=[A-Za-z)])('+)(?![A-Za-z])")
_SHORT = re.compile(r"\\([dtc]?frac|[dt]?binom)\s*(?!\\sqrt)(\\[A-Za-z]+|\w)\s*(\{|\\[A-Za-z]+|\w)")
_GREATER = re.compile(r"(>|\\geq?(?:slant)?(?![a-z]))")
_COMMAND = re.compile(r"\\(?:mathbb|text|textbf|mathrm|operatorname|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Z])")


def canonical(text: str) -> str:
    """Rewrites a text as LaTeX that has the same meaning and that math-verify parses correctly."""
    if not text.isascii():
        text = re.sub("((?:\\d\u0305)+)", lambda match: rf"\overline{{{match[1]}}}".replace("\u0305", ""), text)
        text = re.sub("(\\d)\u0307", r"\\dot{\1}", text)
        text = "".join(character if character.isascii() else _ascii(character) for character in text)
        text = text.replace(_END + _UP, "").replace(_END + _DOWN, "")
        text = text.replace(_UP, "^{").replace(_DOWN, "_{").replace(_END, "}")
        text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _DECORATION.sub("", text).strip().rstrip(".,;").rstrip()
    text = re.sub(r"^\\approx(?![a-z])\s*", "", text)
    text = re.sub(r"^\\text\s*\{\s*([-+]?[\d.,]+)\s*\}$", r"\1", text)
    if text.startswith('"') and text.endswith('"'):
        text = text[1:-1]
    return _notation(_numbers(text))


def told_apart(gold: str, answer: str) -> tuple[str, str]:
    """Renames letters in two texts so that no letter occurs in both upper and lower case. Returns the two texts.

    math-verify treats `R` and `r` as the same symbol, so that `R - r` would be 0. An upper-case letter that also occurs
    in lower case is replaced by a letter that occurs in neither text, if there is one.
    """
    upper = {match[1] for text in (gold, answer) for match in _COMMAND.finditer(text) if match[1]}
    lower = {character for text in (gold, answer) for character in text if character.islower()}
    free = iter(sorted(set("abchjklmnopqrstuvwxyz") - lower - {letter.lower() for letter in upper}))
    replacements = {letter: next(free, letter) for letter in sorted(upper) if letter.lower() in lower}
    if not replacements:
        return gold, answer
    renamed = [_COMMAND.sub(lambda match: replacements.get(match[1], match[0]), text) for text in (gold, answer)]
    return renamed[0], renamed[1]


@lru_cache(maxsize=4096)
def _ascii(character: str) -> str:
    """Returns LaTeX for one character: `\\frac{1}{2}` for `\u00bd`, and an ASCII digit for a digit of any script. Other
    characters are unchanged."""
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    name, plain = unicodedata.name(character, ""), unicodedata.normalize("NFKC", character)
    plain = "".join(_SYMBOLS.get(part, part) for part in plain)
    if name.startswith(("SUPERSCRIPT", "SUBSCRIPT")):
        return f"{_UP if name.startswith('SUPER') else _DOWN}{plain}{_END}"
    if name.startswith("VULGAR FRACTION") and "/" in plain:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("/"))
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    kind, _, letter = name.partition(" LETTER ")
    if kind in ("GREEK SMALL", "GREEK CAPITAL") and letter.isalpha():
        letter = letter.replace("LAMDA", "LAMBDA")
        return f"\\{letter.lower() if kind.endswith('SMALL') else letter.capitalize()} "
    return plain


def _numbers(text: str) -> str:
    """Rewrites notations of numbers that math-verify parses wrongly: groups of digits, decimal commas, recurring
    decimals, mixed numbers, powers of ten and bases."""
    if text.isdigit():
        return text
    text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if not re.search(r"[(\[]|\\\{", text):
        # thousands separators are removed only if the text has no brackets; in brackets, 1,234 may be two elements
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _TO.sub(":", _DECIMAL_COMMA.sub(r"\1.\2", text))
    if "\\" in text:
        text = _OVERLINE.sub(lambda match: _recurring(match[1], match[2], match[3] or match[4]), text)
        text = _DOTTED.sub(
            lambda match: _recurring(match[1], match[2], match[3] + (match[4] or "") + (match[5] or "")), text
        )
    text = _MIXED.sub(
        lambda match: rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}" if int(match[2]) < int(match[3]) else match[0],
        text,
    )
    text = _PERIOD.sub(lambda match: _recurring(*match.groups()), text)
    text = _COUNTED.sub(lambda match: rf" \times {_LARGE[match[1] or match[2]]}", _ORDINAL.sub("", text))
    text = _FLOAT.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text)
    text = _SCIENTIFIC.sub(_whole, _TIMES_TEN.sub(r" \\times ", text))
    return _BASED.sub(_based, text)


def _whole(match: re.Match[str]) -> str:
    r"""Rewrites `5.1 \times 10^{22}` as `51 \times 10^{21}`, which sympy evaluates exactly."""
    shift = int(match[4]) - len(match[2])
    return match[0] if shift < 0 else f"{match[1]}{match[2]}{match[3]}{shift}"


def _recurring(integer_part: str, fixed: str, repeated: str) -> str:
    r"""Returns a recurring decimal as a fraction in LaTeX: \frac{1}{6} for 0.1\overline{6}."""
    shift = 10 ** len(fixed)
    value = Fraction(int(integer_part + fixed), shift) + Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _based(match: re.Match[str]) -> str:
    r"""Returns a LaTeX symbol that encodes the digits and the base of a number: \Psi_{52b9} for `52_9`, because
    math-verify ignores bases."""
    digits, base = match[1] or match[2] or match[3], match[4] or match[5] or match[6]
    number = _BASES.get(base) if base.isalpha() else int(base)
    if number is None:
        return match[0]
    return rf"\Psi_{{{digits}b{number}}}"


def _notation(text: str) -> str:
    """Rewrites notations that math-verify parses wrongly: degrees, odd roots of negative numbers, primes, fractions
    without braces, empty sets and chains of `>`."""
    if "\\" in text:
        text = re.sub(r"\\[lr]angle(?![a-z])", lambda match: "(" if match[0] == "\\langle" else ")", text)
        text = re.sub(r"\\varnothing(?![a-z])|\\\{\s*\\\}", r"\\emptyset", text)
        text = _SCALE.sub(r"\\text{ deg\1\2}", text)
        if "circ" in text or "degree" in text:
            trigonometric = _TRIGONOMETRY.search(text)
            text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})" if trigonometric else r"\1", text)
        text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
        text = _SHORT.sub(_braced, text)
        if text.startswith("\\begin{cases}") and text.endswith("\\end{cases}") and "&" not in text:
            text = text[len("\\begin{cases}") : -len("\\end{cases}")].replace("\\\\", ",").strip().rstrip(",")
    text = re.sub(r"\^\s*-\s*(\d+)", r"^{-\1}", text)
    text = _PRIME.sub(lambda match: "^{" + "\\prime" * len(match[1]) + "}", text)
    parts = _GREATER.split(text)
    if len(parts) > 3 and not re.search(r"[,<=]|\\l(?:e|eq|eqslant|t)(?![a-z])|\\text", text):
        text = "".join(parts[::-1]).replace(">", "<")
        text = re.sub(r"\\ge(?=q|slant|[^a-z])", r"\\le", text)
    return text


def _braced(match: re.Match[str]) -> str:
    r"""Adds braces to a fraction without braces: `\frac{\pi}{2}` for `\frac\pi2`.

    A fraction of two digits is unchanged, because math-verify parses `\frac123` as 1/23.
    """
    name, above, below = match.groups()
    if name.endswith("frac") and above.isalnum() and below.isalnum():
        return match[0]
    return rf"\{name}{{{above}}}" + (below if below == "{" else rf"{{{below}}}")
