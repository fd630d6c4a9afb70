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
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from megatron_rl.rewards.algebra_limits import CPU_S, NO_RESULT, TooLong, cpu_limit
from megatron_rl.rewards.math_cost_limit import too_costly, too_costly_anywhere
from megatron_rl.rewards.math_extraction import boxed_answer, stated_answers
from megatron_rl.rewards.math_parts import WORDS, Parts, plain, rows, split
from megatron_rl.rewards.math_text import BASED, canonical, told_apart
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
    is the list 1,2). Without a box, the answer is the content of the last <answer> tag; without a tag, it is read from
    the text (`math_extraction.stated_answers`). An answer is wrong if it is too costly to parse
    (`math_cost_limit.too_costly`), cannot be parsed or compared, or takes more than `algebra_limits.CPU_S` to compare.
    No response raises an error.

    math-verify's time-outs are off, because they need the alarm signal of the main thread. Instead,
    rewards.grading_pool kills a worker process in which this function takes too long. Raises ValueError if the known
    answer is empty.
    """
    gold_answer = str(payload["answer"])
    if not gold_answer.strip():
        raise ValueError(f"the known answer {payload['answer']!r} cannot be read: mend or drop this problem")
    with contextlib.suppress(TooLong), cpu_limit():
        return float(any(_right(gold_answer, answer) for answer in stated_answers(response[-TAIL:])))
    return 0.0


def grade_released(response: str, payload: Mapping[str, Any]) -> float:
    """Returns the score of RL Tango's released grader: 1.0 if math-verify accepts the response, else 0.0.

    The source is compute_score of kaiwenzha/RL-Tango 411ed83, verl/utils/reward_score/math_verify.py. It parses the
    response with math-verify's defaults; this function parses only the last TAIL characters. An answer that is too
    costly to parse (`math_cost_limit.too_costly`) would exceed the time limits of the released grader and is graded as
    wrong. Raises ValueError if the known answer cannot be parsed.
    """
    gold_answer = str(payload["answer"])
    gold: list[Any] = [gold_answer]  # the known answer is compared as text if it is too costly to parse
    if not too_costly_anywhere(gold_answer):
        with contextlib.suppress(TooLong), cpu_limit(CPU_S / 2):
            gold = parse(f"\\boxed{{{gold_answer}}}", [LatexExtractionConfig()], parsing_timeout=NO_LIMIT)
    if not gold:
        raise ValueError(f"the known answer {payload['answer']!r} cannot be read: mend or drop this problem")
    end = response[-TAIL:]
    box = boxed_answer(end)
    if too_costly_anywhere(end):
        end = "" if box is None else f"\\boxed{{{box}}}"
    if (box is not None and too_costly(box, gold_answer)) or too_costly_anywhere(end):
        return 0.0
    with contextlib.suppress(TooLong), cpu_limit():
        return float(verify(gold, parse(end, parsing_timeout=NO_LIMIT), timeout_seconds=None))
    return 0.0


def _right(gold_answer: str, answer: str) -> bool:
    """Returns whether the text of an answer equals the known answer. A text that is too costly to parse is only
    compared as text."""
    if too_costly_anywhere(gold_answer) or too_costly_anywhere(gold := canonical(gold_answer)):
        return plain(gold_answer) == plain(answer)
    if too_costly(answer, gold_answer) or too_costly_anywhere(
        text := canonical(answer)
    ):  # `10⁹⁹⁹⁹⁹` only shows its cost then
        return False
    return _same(gold, text)


def _same(gold: str, answer: str) -> bool:
    """Returns whether two texts in canonical LaTeX are the same answer. Units of measurement are compared if both units
    are known."""
    if plain(gold) == plain(answer):
        return True
    texts = [text.strip() for text in _TEXTS.findall(answer)]
    if any(_HEDGE.search(text) and text not in ("or", "and") and text not in gold for text in texts):
        return False  # rejects an answer that names an alternative, such as "5 (or maybe 6)"
    (gold_value, unit), (value, own_unit) = split_unit(gold), split_unit(answer, letters=True)
    if clash(unit, own_unit):
        return False
    return _equal(gold, answer) or (
        bool(unit or own_unit) and (plain(gold_value) == plain(value) or _equal(gold_value, value))
    )


def _equal(gold: str, answer: str) -> bool:
    """Returns whether two texts in canonical LaTeX are the same answer. The caller has compared their units of
    measurement. Lists, sets and tables are compared part by part."""
    gold_number, number = _decimal(gold), _decimal(answer)
    if gold_number is not None:
        if number is None and _DECIMAL_COMMA.fullmatch(answer):
            number = _decimal(answer.replace(",", "."))
        if number is not None:
            return _near(gold_number, number)
    if (table := rows(gold)) is not None:
        return _paired(table, rows(answer) or [], _all_same)
    golds, answers = split(gold), split(answer)
    if golds.dots or answers.dots:
        return golds.kind == answers.kind and len(golds.elements) > 1 and _all_same(golds.elements, answers.elements)
    counts = len(golds.elements), len(answers.elements)
    if min(counts) > 1:
        return _same_parts(golds, answers)
    if max(counts) > 1 and "\\cup" in gold + answer:  # `x < 1 \\text{ or } x > 2` may equal a union of intervals
        unions = [text.split("\\cup") if "\\cup" in text else split(text).elements for text in (gold, answer)]
        return _paired(unions[0], unions[1])
    if max(counts) > 1 and (answers.kind if counts[0] == 1 else golds.kind) == "":
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
    unpaired = list(answers)
    if len(golds) != len(answers):
        return False
    for gold in golds:
        index = next((i for i, answer in enumerate(unpaired) if same(gold, answer)), None)
        if index is None:
            return False
        del unpaired[index]
    return not unpaired


def _same_single(gold: str, answer: str) -> bool:
    """Returns whether two texts in canonical LaTeX that are not lists are the same answer."""
    words = WORDS.fullmatch(plain(gold)) and WORDS.fullmatch(plain(answer))
    time = _TIME.fullmatch(gold)
    if words or _DATE.fullmatch(gold) or (time and math.gcd(int(time[1]), int(time[2])) > 1):
        return False  # words, dates and times are only compared as texts: `stop` is not a product, and 10:30 is not 1/3
    based, reply = BASED.fullmatch(gold), BASED.fullmatch(answer)
    # For the known answer 52_9, the answer 52 is correct, because the problem may name the base.
    # For the known answer 52, an answer with a base is only correct if the base is 10.
    if based or reply:
        return bool(based and not reply and based[1] == answer) or bool(reply and reply[2] == "10" and reply[1] == gold)
    ratio, answer_ratio = gold.split(":"), answer.split(":")
    if max(len(ratio), len(answer_ratio)) > 2:
        return len(ratio) == len(answer_ratio) and all(
            _verified(rf"({gold_part}) \cdot ({answer_ratio[0]})", rf"({answer_part}) \cdot ({ratio[0]})")
            for gold_part, answer_part in zip(ratio, answer_ratio, strict=True)
        )
    return _verified(gold, answer)


def _verified(gold: str, answer: str) -> bool:
    """Returns whether math-verify judges two expressions equal. Returns False if sympy raises an error."""
    functions = _FUNCTION.match(gold), _FUNCTION.match(answer)
    gold, answer = told_apart(gold, answer)
    with contextlib.suppress(*NO_RESULT):
        gold_expr, answer_expr = _read(gold), _read(answer)
        if gold_expr is None or answer_expr is None:
            return False
        symbols = {symbol.name: symbol for symbol in gold_expr.free_symbols | answer_expr.free_symbols}
        # If both texts define the same function, the names of the variables do not matter: f(x) = 2x equals f(t) = 2t.
        if functions[0] and functions[1] and functions[0][1] == functions[1][1]:
            gold_symbol, answer_symbol = symbols.get(functions[0][2]), symbols.get(functions[1][2])
            answer_expr = answer_expr.xreplace({gold_symbol: answer_symbol, answer_symbol: gold_symbol})
        if _digits_verified(gold_expr, answer_expr, interval=bool(_SURELY_INTERVAL.search(gold))):
            return True
        positive = _positive(gold_expr)
        expressions = gold_expr.xreplace(positive), answer_expr.xreplace(positive)
        return bool(positive) and _digits_verified(*expressions, interval=False)
    return False


def _digits_verified(gold_expr: Any, answer_expr: Any, *, interval: bool) -> bool:
    """Returns whether math-verify accepts the answer `answer_expr` for the known answer `gold_expr`. The number of
    decimal places that are compared depends on the smallest number in both answers.

    `interval`: whether an inequality is accepted if the known answer is an interval.
    """
    smallest = min((value for part in (gold_expr, answer_expr) for value in _sizes(part) if value), default=1.0)
    decimals = DECIMALS if smallest >= SMALL else DIGITS + math.ceil(-math.log10(smallest))
    return verify(
        gold_expr, answer_expr, decimals, decimals + 9, timeout_seconds=None, allow_set_relation_comp=interval
    )  # instead of math-verify's defaults, which are 6 decimal places and 15 significant digits


@lru_cache(maxsize=256)
def _read(text: str) -> Any:
    """Parses a canonical text with math-verify. Returns a sympy object; None if the text cannot be parsed.

    Also returns None if latex2sympy parses the text as infinite or undefined (`\\gamma^2 - 1`), or as a calculation
    with infinity (`\\infty!! / 3`), because such values compare as equal to each other or to any number.
    """
    parsed = parse(f"\\boxed{{{text}}}", [_LATEX], "no_fallback", parsing_timeout=NO_LIMIT)
    part = parsed[0] if parsed else None
    if isinstance(part, sympy.MatrixExpr):
        part = part.doit()  # a product of matrices, whose elements can then be compared
    reckoned = isinstance(part, sympy.Expr) and part.has(sympy.oo, -sympy.oo) and part not in INFINITIES
    undefined = isinstance(part, sympy.Basic) and part.has(sympy.zoo, sympy.nan)
    return None if reckoned or undefined else part


def _positive(gold_expr: Any) -> dict[Any, Any]:
    r"""Returns {symbol: positive symbol} for the symbols that must be positive in a known answer, such as n in
    \sqrt{1/n}.

    A symbol must be positive if it is a factor with an odd power in an even root or a logarithm. A root of n^2 or of n
    + 1 does not imply that n is positive.
    """
    positive_symbols: dict[Any, Any] = {}
    for part in gold_expr.atoms(sympy.Pow, sympy.log):
        if isinstance(part, sympy.log) or (part.exp.is_Rational and part.exp.q % 2 == 0):
            for symbol, power in part.args[0].as_powers_dict().items():
                if symbol.is_Symbol and power % 2 == 1:
                    positive_symbols[symbol] = sympy.Symbol(symbol.name, positive=True)
    return positive_symbols


def _sizes(part: Any) -> Iterator[float]:
    """Yields the absolute values of the numeric terms and factors in an expression, a relation, a set or a matrix."""
    if isinstance(part, sympy.MatrixBase):
        parts = part.flat()
    elif part.is_Add or isinstance(part, (sympy.Set, Relational, Boolean, sympy.Tuple)):
        parts = part.args
    else:
        if isinstance(part, sympy.Expr):
            number = part if part.is_number else part.as_independent(*part.free_symbols, as_Add=False)[0]
            with contextlib.suppress(*NO_RESULT):
                yield abs(float(number))
        return
    for element in parts:
        yield from _sizes(element)


def _decimal(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _near(gold_number: Decimal, number: Decimal) -> bool:
    """Returns whether `number` equals `gold_number` up to rounding.

    Compares DECIMALS decimal places, or more places if `gold_number` has more places or is small. If `gold_number` has
    no decimal places or is 0, the numbers must be equal exactly.
    """
    exponent = gold_number.as_tuple().exponent
    if gold_number == number or not isinstance(exponent, int) or exponent >= 0 or gold_number == 0:
        return gold_number == number
    size = gold_number.adjusted()
    digits = max(DECIMALS, -exponent, DIGITS - size)
    return abs(gold_number - number) < Decimal(5).scaleb(-digits - 1)
