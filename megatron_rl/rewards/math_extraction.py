r"""Extracts the text of the mathematical answer from a response.

The answer stands in a box (`\boxed{42}`), in an answer tag (`<answer>42</answer>`), after a mark (`Answer: 42`, `the
answer is 42`, or `#### 42` in the last line), or is the last value of the text.
"""

from __future__ import annotations

import re

from latex2sympy2_extended.math_normalization import extract_boxed_content

from megatron_rl.rewards.math_units import is_unit

MARKS = 5  # number of marks, counted from the end of the text, after which an answer is searched for
SENTENCE = 300  # number of characters after a mark in which an answer is searched for

# Quantifiers with a second + do not backtrack, so that the search needs only linear time.
_SIGN = r"[-+−–]?+[$€£¥₹(√]{0,3}+"
_NUMBER = r"(?:\d++(?:,\d++)*+(?:\.\d++)*+|\.\d++|[½⅓⅔¼¾∞π])"
_SUFFIX = r"(?:[eE][-+]\d++|_\{?+\w++\}?+|[\w½⅓⅔¼¾°π'!²³⁰¹⁴⁵⁶⁷⁸⁹⁻]|\^\{?+[-+\w\\]++\}?+|\\?%)*+"
_OPERAND = rf"{_SIGN}{_NUMBER}{_SUFFIX}\){{0,3}}+"
# numbers joined by operators, such as `-1/2`, `3.2 × 10^5` or `2√3`, with a percent sign or a counting word after them
_EXPRESSION = (
    rf"{_OPERAND}(?:\s?[-+*/^×÷·:−–√]{{1,2}}\s?{_OPERAND})*+"
    r"(?:\s?(?:\\?%|[Pp]ercent(?:age)?\b|[Pp]ct\b)|\s(?:thousand|million|billion|trillion|dozen|hundred)s?\b)?+"
)
_BRACED = r"\{(?:[^{}\n]|\{(?:[^{}\n]|\{[^{}\n]{0,200}+\}){0,200}+\}){0,200}+\}"
_TOKEN = rf"(?:\\[a-zA-Z]++|{_BRACED}|[\d.()|!^_]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|\\[{{}},])"
# LaTeX without dollar signs, such as `2\sqrt{3}` or `1 - \frac1e`; an operator may have spaces around it
_LATEX = (
    rf"(?:{_OPERAND}\s?[-+*/]\s?)?+[-+−]?+(?:\d[\d.]*+)?+\\(?:[dt]?frac|sqrt|pi|infty|d?binom)(?![a-z])"
    rf"{_TOKEN}*+(?:\s?[-+*/=]\s?{_TOKEN}++)*+"
)
_LIST = rf"\\?[\[({{]\s?{_EXPRESSION}(?:\s?[,;]\s?{_EXPRESSION})++\s?\\?[\])}}]"
_FORMULA = (
    r"\$\$[^$]{1,400}+\$\$|(?<![\\\d])\$(?![\s$])[^$\n]{0,300}(?<!\s)\$(?!\d)"
    r"|\\\((?:(?!\\\)).){1,400}+\\\)|\\\[(?:(?!\\\]).){1,400}+\\\]"
)
# a value does not begin inside a word or inside another value
_START = r"(?:(?<![\w.,^/*+\\\-−–√])|(?<=[\s:>]\*\*)|(?<=^\*\*))"
_VALUE = rf"(?:{_FORMULA}|{_START}(?:{_LIST}|{_LATEX}|{_EXPRESSION}))"
_JOINT = (
    r"(?:\s{0,9}[,;]?\s{0,9}\(?(?:and|or)\s{1,9}(?:(?:maybe|perhaps|possibly)\s{1,9})?|\s{0,9}[,;]\s{1,9}|[^\S\n]{1,9})"
)
# one value, or several that are joined by commas or words: `3, 4 and 5` is one answer, which is a list
_VALUES = re.compile(rf"{_VALUE}(?:{_JOINT}{_VALUE})*+", re.DOTALL)
_MARK = re.compile(
    r"\banswer\b[^\n.:=]{0,60}?(?:\b(?:is|are|be|was|equals)\b[*_\s]{0,9}:?|[:=])|####(?=[ \t]*\S[^\n]*\s*\Z)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[.?](?=\s|$)|</?[a-z]+>")
_PROSE = re.compile(r"(?<![\\a-zA-Z{])(?:(?!and\b)[a-zA-Z]{3,}|as|so|is|it|we|of|by|to|if|be|at)(?![a-zA-Z(^_])")
_DENIED_BEFORE = re.compile(r"(?:\bnot|n't|\bnor|\bneither|\bthan|\bnever|\bwrong|≠|!=)(?: an?)?[\s*_`\"'$]*$", re.I)
_DENIED_AFTER = re.compile(r"[^\n.]{0,40}?\b(?:wrong|incorrect|false|not (?:right|correct|the answer))\b", re.I)
_DECORATION = "*_`\"'“”‘’: \t\r\n"


def boxed_answer(response: str) -> str | None:
    r"""Returns the content of the last \boxed{} or \fbox{} of a response; None if there is no box.

    As in math-verify, boxes shortly before the last box are included, separated by commas: `1,2` for
    `\boxed{1} and \boxed{2}`. A box without a closing brace extends to the end of the text (`tags.joined_boxes`, which
    votes read, leaves such a box out).
    """
    if "\\boxed" not in response and "\\fbox" not in response:
        return None
    return extract_boxed_content(response, mode="last")


def stated_answers(response: str) -> list[str]:
    r"""Returns the readings of the answer in a response, in order of preference: texts that are graded like the content
    of a box. Returns an empty list if there is no answer.

    A box is preferred to an answer tag, and an answer tag to plain text. There are two readings if the answer tag
    contains a sentence: the whole sentence, and the value in it.
    """
    box = boxed_answer(response)
    if box is not None:
        return [box]
    _, opened, rest = response.rpartition("<answer>")
    if not opened:
        value = _plain_answer(response)
        return [] if value is None else [value]
    content = rest.partition("</answer>")[0].strip(_DECORATION)
    value = _plain_answer(content) if _PROSE.search(content) else None
    return [text for text in (content, value) if text]


def _plain_answer(text: str) -> str | None:
    """Returns the answer in a text without a box and without an answer tag: the value after the last mark, otherwise
    the last value of the text. Values that the text denies (`not 41`) are skipped."""
    for mark in [*_MARK.finditer(text)][: -MARKS - 1 : -1]:
        following = text[mark.end() : mark.end() + SENTENCE].lstrip(_DECORATION)
        end = _SENTENCE_END.search(following)
        formula = re.compile(_FORMULA, re.DOTALL).match(following)
        if formula and (not end or formula.end() > end.start()):  # a formula may have several lines
            return formula[0]
        sentence = (following[: end.start()] if end else following).rstrip(_DECORATION)
        if not _PROSE.search(sentence) and re.search(r"[\w\\]", sentence):
            return sentence
        if mark[0].endswith(":") and len(sentence.split()) <= 2 and not re.search(r"\d", sentence):
            return sentence  # a word, such as `yes` or a name
        left_side, equals, right_side = sentence.rpartition("=")
        values = _values(right_side) if equals and not re.search(r"\\|\$", left_side) else _values(sentence)
        if values or _VALUES.search(sentence):
            return values[0] if values else None
    values = _values(text)
    return values[-1] if values else None


def _values(text: str) -> list[str]:
    """Returns the values in a text that the text does not deny, in order, each with its unit of measurement."""
    values = []
    for match in _VALUES.finditer(text):
        denied = _DENIED_BEFORE.search(text[max(0, match.start() - 30) : match.start()])
        if not denied and not _DENIED_AFTER.match(text[match.end() : match.end() + 60]):
            unit = re.match(r"\s([A-Za-z]{3,20})\b", text[match.end() : match.end() + 22])
            values.append(match[0] + (unit[0] if unit and is_unit(unit[1]) else ""))
    return values
