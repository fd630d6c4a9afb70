"""Grades a mathematical answer with math-verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify


def grade(response: str, payload: Mapping[str, Any]) -> float:
    r"""1.0 when the answer in `response` equals payload["answer"], else 0.0. Raises ValueError when the known answer cannot be read.

    The answer is what math-verify finds in the whole response: the last \boxed{}, together with those close before it (`\boxed{1} and
    \boxed{2}` is the set of both). Its own time-outs are off: they need the main thread's alarm; the worker that runs this is killed
    instead. What it cannot read or compare is wrong, not an error: a model may write anything.
    """
    gold = parse(f"\\boxed{{{payload['answer']}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the known answer {payload['answer']!r} cannot be read by math-verify: mend or drop this problem")
    answer = parse(response, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
