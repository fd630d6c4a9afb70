"""Grades a mathematical answer with math-verify, but refuses two kinds of equality that math-verify finds wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from math_verify import parse, verify

from megatron_rl.rewards.cheap import boxed, too_costly, too_costly_anywhere

TAIL = 20_000  # characters at the end of a response that are searched for the answer
NO_LIMIT: Any = None  # math-verify takes None for no time limit, but declares an int
SMALL = 1e-3  # math-verify rounds to 6 decimals: numbers below this may differ and still become the same
INFINITIES = (sympy.oo, -sympy.oo, sympy.Mul(-1, sympy.oo, evaluate=False))
CLOSE = 1e-4  # relative difference of small numbers that count as equal


def grade(response: str, payload: Mapping[str, Any]) -> float:
    r"""Returns 1.0 when the answer in `response` equals payload["answer"], else 0.0.

    The answer is what math-verify finds in the whole response: the last \boxed{}, together with those close before it
    (`\boxed{1} and \boxed{2}` is the set of both). Its own time-outs are off, because they need the main thread's
    alarm; the worker that runs this is killed instead. An answer that would cost too much
    (`affordable`) is wrong, and so is one that cannot be read or compared, as a model may write anything. Raises
    ValueError when the known answer cannot be read.
    """
    known = str(payload["answer"])
    if too_costly(known) is not None:  # as texts, then
        found = boxed(response)
        return float(found is not None and _plain(found) == _plain(known))
    gold = _defined(parse(f"\\boxed{{{known}}}", parsing_timeout=NO_LIMIT))
    if not gold:
        raise ValueError(
            f"the known answer {payload['answer']!r} cannot be read by math-verify: mend or drop this problem"
        )
    text = affordable(response)
    answer = [] if text is None else _defined(parse(text, parsing_timeout=NO_LIMIT))
    return float(verify(gold, answer, timeout_seconds=None) and not _differ_in_size(gold, answer))


def affordable(response: str) -> str | None:
    """Returns the part of a response that math-verify may read: all of it, or the last box where something else in it
    would cost too much; None where the answer itself would."""
    end = response[-TAIL:]
    box = boxed(end)
    if box is None:
        return end if too_costly_anywhere(end) is None else None
    if too_costly(box) is not None:
        return None
    return end if too_costly_anywhere(end) is None else f"\\boxed{{{box}}}"


def _plain(text: str) -> str:
    return "".join(text.split())


def _defined(parsed: list[Any]) -> list[Any]:
    """Drops expressions that latex2sympy could only read as infinite or undefined (`\\gamma^2 - 1`), and those that
    reckon with infinity (`\\infty!! / 3`).

    They would equal each other, the last ones any number. Their texts stay among the readings, as do infinity itself
    and sets that reach it.
    """
    return [part for part in parsed if not _undefined(part)]


def _undefined(part: Any) -> bool:
    if not isinstance(part, sympy.Basic):
        return False
    reckoned = isinstance(part, sympy.Expr) and part.has(sympy.oo, -sympy.oo) and part not in INFINITIES
    return reckoned or part.has(sympy.zoo, sympy.nan)


def _differ_in_size(gold: list[Any], answer: list[Any]) -> bool:
    """Returns whether both are numbers, the known one is small, and they differ by much in relation to its size."""
    known, found = _number(gold), _number(answer)
    return (
        known is not None and found is not None and 0 < abs(known) < SMALL and abs(found - known) > CLOSE * abs(known)
    )


def _number(parsed: list[Any]) -> float | None:
    """Returns the value of the first reading when it is one real number, else None."""
    first = parsed[0] if parsed else None
    if not isinstance(first, sympy.Expr) or not first.is_number:
        return None
    try:
        return float(first)
    except (TypeError, ValueError, OverflowError):
        return None
