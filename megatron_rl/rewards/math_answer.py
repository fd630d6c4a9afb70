"""Grades a mathematical answer with math-verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify


def grade(response: str, payload: Mapping[str, Any]) -> float:
    r"""1.0 when the answer in `response` equals payload["answer"], else 0.0.

    math-verify's own time-outs are off: they need the main thread's alarm; the worker that runs this is killed instead.
    """
    gold = parse(f"\\boxed{{{payload['answer']}}}", parsing_timeout=None)
    answer = parse(response, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
