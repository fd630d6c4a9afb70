"""Grades mathematical answers with math-verify, and corrects known errors of math-verify."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import get_pct_val
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from megatron_rl.rewards.math_cost_limit import too_costly, too_costly_anywhere
from megatron_rl.rewards.math_parts import WORDS, Parts, plain, rows, split
from megatron_rl.rewards.math_text import BASED, canonical, stated, told_apart
from megatron_rl.rewards.math_units import clash, split_unit

TAIL = 20_000  # the answer is searched for in this many characters at the end of a response
NO_LIMIT: Any = None  # math-verify accepts None as no time limit, but declares the parameter as int
DECIMALS = 6  # number of decimal places to which two numbers are compared
# numbers below this value are compared to DIGITS significant digits, because six decimal places are too few
SMALL = 1e-3
DIGITS = 4
INFINITIES = (sympy.oo, -sympy.oo, sympy.Mul(-1, sympy.oo, evaluate=False))

# math-verify's handling of units is off, because math-verify treats any trailing letter as a unit.
_LATEX = LatexExtractionConfig(
    try_extract_without_anchor=False,
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all"),
)
_NO_VALUE = (ArithmeticError, TypeError, ValueError)  # errors of sympy for an expression that is not a real number
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_TEXTS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_HEDGE = re.compile(r"\b(?:or|not|maybe|perhaps|possibly|either|neither|but|except|unless|wrong|incorrect)\b|\d")
_SURELY_INTERVAL = re.compile(r"\[|\]|\\infty|\\cup|\\in(?![a-z])")
_ASSIGNED = re.compile(r"(\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*=")
_FUNCTION = re.compile(r"([A-Za-z])\s*\(\s*([a-z])\s*\)\s*=")
_TIME = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)")
_DATE = re.compile(r"\d{1,4}([-/])\d{1,2}\1\d{1,4}")


def grade(response: str, payload: Mapping[str, Any]) -> float:
    r"""Returns 1.0 if the answer in `response` equals payload["answer"], else 0.0.

    The answer is the content of the last \boxed{}, joined with the boxes shortly before it (`\boxed{1} and \boxed{2}`
    is the list 1,2). Without a box, math-verify extracts the answer from the text. An answer that is too costly to
    parse (`math_cost_limit.too_costly`), or that cannot be parsed or compared, is wrong.

    math-verify's time-outs are off, because they need the alarm signal of the main thread. Instead,
    rewards.grading_pool kills a worker process in which this function takes too long. Raises ValueError if the known
    answer is empty.
    """
    known = str(payload["answer"])
    if not known.strip():
        raise ValueError(f"the known answer {payload['answer']!r} cannot be read: mend or drop this problem")
    found = _answer(response[-TAIL:])
    if found is None:
        return 0.0
    if too_costly_anywhere(known):  # a known answer that is too costly to parse is only compared as text
        return float(plain(known) == plain(found))
    return float(not too_costly(found, known) and _same(canonical(known), canonical(found)))


def grade_released(response: str, payload: Mapping[str, Any]) -> float:
    """Returns the score of RL Tango's released grader: 1.0 if math-verify accepts the response, else 0.0.

    The source is compute_score of kaiwenzha/RL-Tango 411ed83, verl/utils/reward_score/math_verify.py. It parses the
    response with math-verify's defaults; this function parses only the last TAIL characters. An answer that is too
    costly to parse (`math_cost_limit.too_costly`) would exceed the time limits of the released grader and is graded as
    wrong. Raises ValueError if the known answer cannot be parsed.
    """
    known = str(payload["answer"])
    gold: list[Any] = [known]  # the known answer is compared as text if it is too costly to parse
    if not too_costly_anywhere(known):
        gold = parse(f"\\boxed{{{known}}}", [LatexExtractionConfig()], parsing_timeout=NO_LIMIT)
    if not gold:
        raise ValueError(f"the known answer {payload['answer']!r} cannot be read: mend or drop this problem")
    end = response[-TAIL:]
    box = stated(end)
    if too_costly_anywhere(end):
        end = "" if box is None else f"\\boxed{{{box}}}"
    if (box is not None and too_costly(box, known)) or too_costly_anywhere(end):
        return 0.0
    return float(verify(gold, parse(end, parsing_timeout=NO_LIMIT), timeout_seconds=None))


def _answer(end: str) -> str | None:
    """Returns the text of the answer in `end`, the last characters of a response; None if there is no answer."""
    box = stated(end)
    if box is not None:
        return box
    if too_costly_anywhere(end):
        return None
    found = parse(end, parsing_timeout=NO_LIMIT)
    if not found or not isinstance(found[-1], str):
        return None
    percent = isinstance(found[0], sympy.Basic) and get_pct_val(found[0]) is not None
    return found[-1] + "\\%" * (percent and "%" not in found[-1])


def _same(gold: str, answer: str) -> bool:
    """Returns whether two texts in canonical LaTeX are the same answer. Units of measurement are compared if both units
    are known."""
    if plain(gold) == plain(answer):
        return True
    said = [text.strip() for text in _TEXTS.findall(answer)]
    if any(_HEDGE.search(text) and text not in ("or", "and") and text not in gold for text in said):
        return False  # rejects an answer that names an alternative, such as "5 (or maybe 6)"
    (known, unit), (value, own_unit) = split_unit(gold), split_unit(answer, letters=True)
    if clash(unit, own_unit):
        return False
    return _equal(gold, answer) or (bool(unit or own_unit) and (plain(known) == plain(value) or _equal(known, value)))


def _equal(gold: str, answer: str) -> bool:
    """Returns whether two texts in canonical LaTeX are the same answer. The caller has compared their units of
    measurement. Lists, sets and tables are compared part by part."""
    known, found = _decimal(gold), _decimal(answer)
    if known is not None:
        if found is None and _DECIMAL_COMMA.fullmatch(answer):
            found = _decimal(answer.replace(",", "."))
        if found is not None:
            return _near(known, found)
    if (table := rows(gold)) is not None:
        return _paired(table, rows(answer) or [], _all_same)
    one, two = split(gold), split(answer)
    if one.dots or two.dots:
        return one.kind == two.kind and len(one.elements) > 1 and _all_same(one.elements, two.elements)
    counts = len(one.elements), len(two.elements)
    if min(counts) > 1:
        return _same_parts(one, two)
    if max(counts) > 1 and "\\cup" in gold + answer:  # `x < 1 \\text{ or } x > 2` may equal a union of intervals
        unions = [text.split("\\cup") if "\\cup" in text else split(text).elements for text in (gold, answer)]
        return _paired(unions[0], unions[1])
    if max(counts) > 1 and (two.kind if counts[0] == 1 else one.kind) == "":
        return False  # a list is not equal to a single answer
    return _same_single(gold, answer)


def _same_parts(gold: Parts, answer: Parts) -> bool:
    """Returns whether two lists, sets, tuples or intervals have the same elements.

    A set is not equal to a tuple, and the brackets of intervals are compared. The order of a list without brackets does
    not matter, except in two cases: if it is compared with a tuple, and if only one of two lists has names for its
    elements (`x = 1, y = 2` and `1, 2`).
    """
    kinds = {gold.kind, answer.kind}
    if kinds == {"{}"}:  # repetitions in a set are ignored
        return _covers(gold.elements, answer.elements) and _covers(answer.elements, gold.elements)
    if kinds <= {"", "{}"}:
        named = [
            len({name[1] for part in parts if (name := _ASSIGNED.match(part))})
            for parts in (gold.elements, answer.elements)
        ]
        ordered = sorted(named) == [0, len(gold.elements)]
        return (_all_same if ordered else _paired)(gold.elements, answer.elements)
    vectors = kinds == {"()", "[]"} and len(gold.elements) > 2
    return (len(kinds) == 1 or kinds == {"", "()"} or vectors) and _all_same(gold.elements, answer.elements)


def _all_same(golds: list[str], answers: list[str]) -> bool:
    return len(golds) == len(answers) and all(map(_same, golds, answers))


def _covers(golds: list[str], answers: list[str]) -> bool:
    return all(any(_same(gold, answer) for answer in answers) for gold in golds)


def _paired(golds: list[Any], answers: list[Any], same: Callable[[Any, Any], bool] = _same) -> bool:
    """Returns whether the elements of the known answer and of the response's answer can be paired one to one such that
    `same` is True for each pair."""
    left = list(answers)
    if len(golds) != len(answers):
        return False
    for gold in golds:
        found = next((i for i, answer in enumerate(left) if same(gold, answer)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _same_single(gold: str, answer: str) -> bool:
    """Returns whether two texts in canonical LaTeX that are not lists are the same answer."""
    words = WORDS.fullmatch(plain(gold)) and WORDS.fullmatch(plain(answer))
    time = _TIME.fullmatch(gold)
    if words or _DATE.fullmatch(gold) or (time and math.gcd(int(time[1]), int(time[2])) > 1):
        return False  # words, dates and times are only compared as texts: `stop` is not a product, and 10:30 is not 1/3
    based, own = BASED.fullmatch(gold), BASED.fullmatch(answer)
    # For the known answer 52_9, the answer 52 is correct, because the problem may name the base.
    # For the known answer 52, an answer with a base is only correct if the base is 10.
    if based or own:
        return bool(based and not own and based[1] == answer) or bool(own and own[2] == "10" and own[1] == gold)
    ratio, other = gold.split(":"), answer.split(":")
    if max(len(ratio), len(other)) > 2:
        return len(ratio) == len(other) and all(
            _verified(rf"({one}) \cdot ({other[0]})", rf"({two}) \cdot ({ratio[0]})")
            for one, two in zip(ratio, other, strict=True)
        )
    return _verified(gold, answer)


def _verified(gold: str, answer: str) -> bool:
    """Returns whether math-verify judges two expressions equal."""
    functions = _FUNCTION.match(gold), _FUNCTION.match(answer)
    gold, answer = told_apart(gold, answer)
    known, found = _read(gold), _read(answer)
    if known is None or found is None:
        return False
    symbols = {symbol.name: symbol for symbol in known.free_symbols | found.free_symbols}
    # If both texts define the same function, the names of the variables do not matter: f(x) = 2x equals f(t) = 2t.
    if functions[0] and functions[1] and functions[0][1] == functions[1][1]:
        one, other = symbols.get(functions[0][2]), symbols.get(functions[1][2])
        found = found.xreplace({one: other, other: one})
    if _digits_verified(known, found, interval=bool(_SURELY_INTERVAL.search(gold))):
        return True
    positive = _positive(known)
    return bool(positive) and _digits_verified(known.xreplace(positive), found.xreplace(positive), interval=False)


def _digits_verified(known: Any, found: Any, *, interval: bool) -> bool:
    """Returns whether math-verify accepts the answer `found` for the known answer `known`. The number of decimal places
    that are compared depends on the smallest number in both answers.

    `interval`: whether an inequality is accepted if the known answer is an interval.
    """
    smallest = min((value for part in (known, found) for value in _sizes(part) if value), default=1.0)
    decimals = DECIMALS if smallest >= SMALL else DIGITS + math.ceil(-math.log10(smallest))
    return verify(
        known, found, decimals, decimals + 9, timeout_seconds=None, allow_set_relation_comp=interval
    )  # instead of math-verify's defaults, which are 6 decimal places and 15 significant digits


@lru_cache(maxsize=256)
def _read(text: str) -> Any:
    """Parses a canonical text with math-verify. Returns a sympy object; None if the text cannot be parsed.

    Also returns None if latex2sympy parses the text as infinite or undefined (`\\gamma^2 - 1`), or as a calculation
    with infinity (`\\infty!! / 3`), because such values compare as equal to each other or to any number.
    """
    found = parse(f"\\boxed{{{text}}}", [_LATEX], "no_fallback", parsing_timeout=NO_LIMIT)
    part = found[0] if found else None
    reckoned = isinstance(part, sympy.Expr) and part.has(sympy.oo, -sympy.oo) and part not in INFINITIES
    undefined = isinstance(part, sympy.Basic) and part.has(sympy.zoo, sympy.nan)
    return None if reckoned or undefined else part


def _positive(known: Any) -> dict[Any, Any]:
    r"""Returns {symbol: positive symbol} for the symbols that must be positive in a known answer, such as n in
    \sqrt{1/n}.

    A symbol must be positive if it is a factor with an odd power in an even root or a logarithm. A root of n^2 or of n
    + 1 does not imply that n is positive.
    """
    found: dict[Any, Any] = {}
    for part in known.atoms(sympy.Pow, sympy.log):
        if isinstance(part, sympy.log) or (part.exp.is_Rational and part.exp.q % 2 == 0):
            for symbol, power in part.args[0].as_powers_dict().items():
                if symbol.is_Symbol and power % 2 == 1:
                    found[symbol] = sympy.Symbol(symbol.name, positive=True)
    return found


def _sizes(part: Any) -> Iterator[float]:
    """Yields the absolute values of the numeric terms and factors in an expression, a relation, a set or a matrix."""
    if isinstance(part, sympy.MatrixBase):
        parts = part.flat()
    elif part.is_Add or isinstance(part, (sympy.Set, Relational, Boolean, sympy.Tuple)):
        parts = part.args
    else:
        if isinstance(part, sympy.Expr):
            number = part if part.is_number else part.as_independent(*part.free_symbols, as_Add=False)[0]
            with contextlib.suppress(*_NO_VALUE):
                yield abs(float(number))
        return
    for each in parts:
        yield from _sizes(each)


def _decimal(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _near(known: Decimal, found: Decimal) -> bool:
    """Returns whether the decimal number `found` equals `known` up to rounding.

    Compares DECIMALS decimal places, or more places if `known` has more places or is small. If `known` has no decimal
    places or is 0, the numbers must be equal exactly.
    """
    exponent = known.as_tuple().exponent
    if known == found or not isinstance(exponent, int) or exponent >= 0 or known == 0:
        return known == found
    size = known.adjusted()
    digits = max(DECIMALS, -exponent, DIGITS - size)
    return abs(known - found) < Decimal(5).scaleb(-digits - 1)
