"""Grades answers to questions about the input or the output of a Python function (CRUXEval).

Model output is parsed as Python literals and never run. To grade an input that a model states, the problem's function
is run on this input in the sandbox.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import SandboxFailure, SandboxSettings
from megatron_rl.texts.tags import answer_text

MAX_CHARACTERS = 10_000  # maximum number of characters of an answer; longer answers are ignored
_NO_LITERAL = object()  # sentinel that `_literal` returns for a text that is not a Python literal


def grade_output(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 if the Python literal in the response equals the known answer payload["answer"] by Python's ==, else
    0.0.

    If the known answer is not a literal, its syntax tree is compared with the syntax tree of the response's answer.
    """
    return float(any(_same(answer, str(payload["answer"])) for answer in _stated_answers(response)))


def grade_input(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 1.0 if the function `f` in the code payload["code"] returns payload["answer"] for the arguments that the
    response states, else 0.0.

    If `f` does not even return payload["answer"] for the known arguments payload["input"], raises SandboxFailure,
    because the response is then not the cause of the failure.
    """
    settings = SandboxSettings(timeout_s=3.0)
    gold_answer = str(payload["answer"])
    for answer in _stated_answers(response):
        arguments = _arguments(answer)
        if arguments is not None and _returns(payload["code"], arguments, gold_answer, settings):
            return 1.0
    gold_arguments = _arguments(str(payload["input"]))
    if gold_arguments is not None and not _returns(payload["code"], gold_arguments, gold_answer, settings):
        raise SandboxFailure(
            f"f({str(payload['input'])[:60]}) is not {gold_answer[:60]} in the sandbox: the problem, or this machine, "
            "is broken"
        )
    return 0.0


def _returns(code: str, arguments: tuple[list[Any], dict[str, Any]], gold: str, settings: SandboxSettings) -> bool:
    ran = sandbox.call(code, *arguments, settings=settings)
    return not ran.why and _same(ran.output, gold)


def _stated_answers(response: str) -> list[str]:
    r"""Returns up to two texts that may be the answer in a response: the content of the last \boxed{}, and the same
    content without LaTeX escapes.

    Without a box, the content of the last <answer> block is used. Texts longer than MAX_CHARACTERS are left out.
    """
    answer = (answer_text(response) or "").strip().strip("`").strip()
    for wrapper in (r"\text{", r"\texttt{", r"\mathrm{"):
        if answer.startswith(wrapper) and answer.endswith("}"):
            answer = answer[len(wrapper) : -1]
    plain = re.sub(r"\\([{}_#%$])", r"\1", answer)
    return [text for text in dict.fromkeys((answer, plain)) if text and len(text) <= MAX_CHARACTERS]


def _literal(text: str) -> Any:
    """Returns the value of a text that is a Python literal, and _NO_LITERAL for any other text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # hides warnings about invalid escape sequences in the text
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NO_LITERAL


def _same(text: str, gold: str) -> bool:
    """Returns whether two Python literals have equal values. If `gold` is not a literal, returns whether the syntax
    trees are equal."""
    gold_value, value = _literal(gold), _literal(text)
    if gold_value is _NO_LITERAL:
        return _syntax_tree(text) == _syntax_tree(gold) is not None
    try:
        return value is not _NO_LITERAL and bool(value == gold_value)
    except RecursionError:
        return False


def _syntax_tree(text: str) -> str | None:
    """Returns the syntax tree of an expression as text, independent of spacing and quotes; None for any other text."""
    try:
        return ast.dump(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _arguments(text: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Parses the arguments of a call, such as `1, 'a', n=2` or `f(1, 'a', n=2)`. Returns (positional arguments, keyword
    arguments), or None if any argument is not a literal."""
    arguments = text[2:-1] if text.startswith("f(") and text.endswith(")") else text
    try:
        node = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(node, ast.Call) or any(word.arg is None for word in node.keywords):
            return None
        positional = [ast.literal_eval(argument) for argument in node.args]
        return positional, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
