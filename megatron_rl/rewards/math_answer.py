"""Grades mathematical answers with math-verify, and corrects cases in which math-verify's verdict is wrong."""

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

TAIL = 20_000  # characters at the end of a response that are searched for the answer
NO_LIMIT: Any = None  # math-verify takes None for no time limit, but declares an int
DECIMALS = 6  # to which math-verify compares decimals
SMALL = 1e-3  # numbers below this are compared to DIGITS significant digits, as six decimals may be too few
DIGITS = 4
INFINITIES = (sympy.oo, -sympy.oo, sympy.Mul(-1, sympy.oo, evaluate=False))

# math-verify's own handling of units takes any trailing letter for one.
_LATEX = LatexExtractionConfig(
    try_extract_without_anchor=False,
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all"),
)
_NO_VALUE = (ArithmeticError, TypeError, ValueError)  # what sympy raises for an expression that is not a real number
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
    r"""Returns 1.0 when the answer in `response` equals payload["answer"], else 0.0.

    The answer is the last \boxed{}, together with those close before it (`\boxed{1} and \boxed{2}` is the list of
    both); without a box, what math-verify finds in the text. math-verify's own time-outs are off, because they need the
    main thread's alarm; the worker that runs this is killed instead. An answer that would cost too much is wrong
    (`cheap.too_costly`), and so is one that cannot be read or compared, as a model may write anything. Raises
    ValueError when the known answer cannot be read.
    """
    known = str(payload["answer"])
    if not known.strip():
        raise ValueError(f"the known answer {payload['answer']!r} cannot be read: mend or drop this problem")
    found = _answer(response[-TAIL:])
    if found is None:
        return 0.0
    if too_costly_anywhere(known):  # then only texts are compared
        return float(plain(known) == plain(found))
    return float(not too_costly(found, known) and _same(canonical(known), canonical(found)))


def grade_released(response: str, payload: Mapping[str, Any]) -> float:
    """Returns the score that the grader of RL Tango's release gives: math-verify's, on the whole response.

    Its source is compute_score of kaiwenzha/RL-Tango 411ed83, verl/utils/reward_score/math_verify.py. What would run
    into the release's time limits is wrong here too, where its text says so (`cheap.too_costly`). Raises ValueError
    when the known answer cannot be read.
    """
    known = str(payload["answer"])
    gold: list[Any] = [known]  # compared as text where it would cost too much
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
    """Returns the text of the answer at the end of a response, or None."""
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
    """Returns whether two canonical texts are the same answer. Units count if both units are known."""
    if plain(gold) == plain(answer):
        return True
    said = [text.strip() for text in _TEXTS.findall(answer)]
    if any(_HEDGE.search(text) and text not in ("or", "and") and text not in gold for text in said):
        return False  # "5 (or maybe 6)"
    (known, unit), (value, own_unit) = split_unit(gold), split_unit(answer, letters=True)
    if clash(unit, own_unit):
        return False
    return _equal(gold, answer) or (bool(unit or own_unit) and (plain(known) == plain(value) or _equal(known, value)))


def _equal(gold: str, answer: str) -> bool:
    """Returns whether two canonical texts are the same answer, part by part where they have parts."""
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
    if max(counts) > 1 and "\\cup" in gold + answer:  # `x < 1 \\text{ or } x > 2` for a union of intervals
        unions = [text.split("\\cup") if "\\cup" in text else split(text).elements for text in (gold, answer)]
        return _paired(unions[0], unions[1])
    if max(counts) > 1 and (two.kind if counts[0] == 1 else one.kind) == "":
        return False  # a list is no single answer
    return _same_single(gold, answer)


def _same_parts(gold: Parts, answer: Parts) -> bool:
    """Returns whether two lists, sets, tuples or intervals have the same elements.

    A set is no tuple, and an interval's brackets count. A bare list is a set with repetitions, but its order counts
    against a tuple, and where one of two lists has names (`x = 1, y = 2` and `1, 2`).
    """
    kinds = {gold.kind, answer.kind}
    if kinds == {"{}"}:  # repetitions say nothing
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
    """Returns whether the known elements and the answers can be paired one to one."""
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
    """Returns whether two answers that are not lists are the same."""
    words = WORDS.fullmatch(plain(gold)) and WORDS.fullmatch(plain(answer))
    time = _TIME.fullmatch(gold)
    if words or _DATE.fullmatch(gold) or (time and math.gcd(int(time[1]), int(time[2])) > 1):
        return False  # equal as texts or not at all: `stop` is no product of letters, and 10:30 is not 1/3
    based, own = BASED.fullmatch(gold), BASED.fullmatch(answer)
    if based or own:  # 52 is right for 52_9, where the problem names the base; 52_9 is not for 52
        return bool(based and not own and based[1] == answer) or bool(own and own[2] == "10" and own[1] == gold)
    ratio, other = gold.split(":"), answer.split(":")
    if max(len(ratio), len(other)) > 2:
        return len(ratio) == len(other) and all(
            _verified(rf"({one}) \cdot ({other[0]})", rf"({two}) \cdot ({ratio[0]})")
            for one, two in zip(ratio, other, strict=True)
        )
    return _verified(gold, answer)


def _verified(gold: str, answer: str) -> bool:
    """Returns whether math-verify finds two expressions equal."""
    functions = _FUNCTION.match(gold), _FUNCTION.match(answer)
    gold, answer = told_apart(gold, answer)
    known, found = _read(gold), _read(answer)
    if known is None or found is None:
        return False
    symbols = {symbol.name: symbol for symbol in known.free_symbols | found.free_symbols}
    if functions[0] and functions[1] and functions[0][1] == functions[1][1]:  # f(x) = 2x is f(t) = 2t
        one, other = symbols.get(functions[0][2]), symbols.get(functions[1][2])
        found = found.xreplace({one: other, other: one})
    if _digits_verified(known, found, interval=bool(_SURELY_INTERVAL.search(gold))):
        return True
    positive = _positive(known)
    return bool(positive) and _digits_verified(known.xreplace(positive), found.xreplace(positive), interval=False)


def _digits_verified(known: Any, found: Any, *, interval: bool) -> bool:
    """Returns math-verify's verdict, with as many decimals as the smaller numbers need. `interval`: an inequality may
    stand for the interval that is known."""
    smallest = min((value for part in (known, found) for value in _sizes(part) if value), default=1.0)
    decimals = DECIMALS if smallest >= SMALL else DIGITS + math.ceil(-math.log10(smallest))
    return verify(
        known, found, decimals, decimals + 9, timeout_seconds=None, allow_set_relation_comp=interval
    )  # 15 digits for six decimals, as by default


@lru_cache(maxsize=256)
def _read(text: str) -> Any:
    """Returns math-verify's reading of a canonical text; None where it cannot read it.

    None also stands for what latex2sympy reads as infinite or undefined (`\\gamma^2 - 1`), or reckons with infinity
    (`\\infty!! / 3`): such readings would equal each other, the last ones any number.
    """
    found = parse(f"\\boxed{{{text}}}", [_LATEX], "no_fallback", parsing_timeout=NO_LIMIT)
    part = found[0] if found else None
    reckoned = isinstance(part, sympy.Expr) and part.has(sympy.oo, -sympy.oo) and part not in INFINITIES
    undefined = isinstance(part, sympy.Basic) and part.has(sympy.zoo, sympy.nan)
    return None if reckoned or undefined else part


def _positive(known: Any) -> dict[Any, Any]:
    r"""Returns positive symbols for those of which a known answer takes the root or the logarithm: n in \sqrt{1/n}.

    A root of n^2 or of n + 1 implies nothing about n.
    """
    found: dict[Any, Any] = {}
    for part in known.atoms(sympy.Pow, sympy.log):
        if isinstance(part, sympy.log) or (part.exp.is_Rational and part.exp.q % 2 == 0):
            for symbol, power in part.args[0].as_powers_dict().items():
                if symbol.is_Symbol and power % 2 == 1:
                    found[symbol] = sympy.Symbol(symbol.name, positive=True)
    return found


def _sizes(part: Any) -> Iterator[float]:
    """Yields the absolute values of the numbers that an expression, a relation, a set or a matrix has as its parts."""
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
    """Returns whether two decimals are equal to as many digits as math-verify, or the known one, has."""
    exponent = known.as_tuple().exponent
    if known == found or not isinstance(exponent, int) or exponent >= 0 or known == 0:
        return known == found
    size = known.adjusted()
    digits = max(DECIMALS, -exponent, DIGITS - size)
    return abs(known - found) < Decimal(5).scaleb(-digits - 1)
