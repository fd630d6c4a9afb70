"""Grades what a model says about a Python function (CRUXEval). Model output is read as literals and never run; the data set's own function
is, in the sandbox, where the answer is an input."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_rl.rewards import sandbox
from megatron_rl.rewards.tags import boxed

MAX_CHARACTERS = 10_000  # of an answer
_NOT_ONE = object()


class SandboxFailure(RuntimeError):
    """The sandbox did not give the value of the data set's own function; nothing can be said about the answer."""


def grade_output(response: str, payload: Mapping[str, Any]) -> float:
    """1.0 when the literal that the response gives equals payload["answer"] (as Python compares); 0.0 for what is no literal, unless it is
    the known answer's own source text."""
    answers = _said(response)
    known = _literal(str(payload["answer"]))
    if known is _NOT_ONE:
        return float(any(_source(answer) == _source(str(payload["answer"])) is not None for answer in answers))
    return float(any(_equal(_literal(answer), known) for answer in answers))


def grade_input(response: str, payload: Mapping[str, Any]) -> float:
    """1.0 when payload["code"]'s function f returns payload["answer"] for the arguments that the response gives. Raises SandboxFailure
    when the known input does not give the known answer either: the fault is not the model's."""
    known = str(payload["answer"])
    for answer in _said(response):
        found = _arguments(answer)
        if found is not None and _returns(payload["code"], found, known):
            return 1.0
    own = _arguments(str(payload["input"]))
    if own is not None and not _returns(payload["code"], own, known):
        raise SandboxFailure(
            f"f({str(payload['input'])[:60]}) is not {known[:60]} in the sandbox: the problem, or this machine, is broken"
        )
    return 0.0


def _returns(code: str, arguments: tuple[list[str], dict[str, str]], known: str) -> bool:
    ran = sandbox.call(code, *arguments)
    if ran.value is None:
        return False
    value, wanted = _literal(ran.value), _literal(known)
    return _equal(value, wanted) if wanted is not _NOT_ONE else _source(ran.value) == _source(known) is not None


def _said(response: str) -> list[str]:
    r"""What a response may give as its answer: the last \boxed{}, plain and without LaTeX's escapes; else the last <answer> block."""
    found = boxed(response)
    if found is None:
        _, opened, rest = response.rpartition("<answer>")
        found = rest.partition("</answer>")[0].strip() if opened else ""
    found = found.strip("`").strip()
    for wrapper in (r"\text{", r"\texttt{", r"\mathrm{"):
        if found.startswith(wrapper) and found.endswith("}"):
            found = found[len(wrapper) : -1]
    plain = (
        found.replace("\\{", "{")
        .replace("\\}", "}")
        .replace("\\_", "_")
        .replace("\\#", "#")
        .replace("\\%", "%")
        .replace("\\$", "$")
    )
    return [text for text in dict.fromkeys((found, plain)) if text and len(text) <= MAX_CHARACTERS]


def _literal(text: str) -> Any:
    """Its value; _NOT_ONE for anything else."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOT_ONE


def _equal(value: Any, known: Any) -> bool:
    try:
        return value is not _NOT_ONE and bool(value == known)
    except RecursionError:
        return False


def _source(text: str) -> str | None:
    """A form of an expression's text that spacing and quotes do not change."""
    try:
        return ast.dump(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _arguments(text: str) -> tuple[list[str], dict[str, str]] | None:
    """`1, 'a', n=2` or `f(1, 'a', n=2)` -> the arguments' reprs; None unless all are literals."""
    own = text[2:-1] if text.startswith("f(") and text.endswith(")") else text
    try:
        node = ast.parse(f"f({own})", mode="eval").body
        if not isinstance(node, ast.Call) or any(word.arg is None for word in node.keywords):
            return None
        given = [repr(ast.literal_eval(argument)) for argument in node.args]
        return given, {str(word.arg): repr(ast.literal_eval(word.value)) for word in node.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
