"""Grades programs by running them on test cases, as APPS, TACO, LiveCodeBench and PRIME (verl's `prime_code`) do.

The program is the last code block of a response. It runs in the sandbox (sandbox.py), once for each case. A case has
either a standard input and the expected printed output, or the arguments of a function and its expected value. The
payload (a problem's data) has the cases in one of these formats, as JSON texts or as parsed JSON values:

- `input_output` (APPS, TACO), or `answer` (PRIME's data in verl, where it is `reward_model.ground_truth`):
  `{"inputs": [...], "outputs": [...], "fn_name": "name"}`. Without `fn_name`, inputs and outputs are texts, or lists of
  lines. With `fn_name`, an input is a list of arguments, and an output is the value or a list of one value. In PRIME's
  data both are texts instead: each line of an input is one argument as JSON, and an output is one JSON value.
- `public_test_cases` and `private_test_cases` (LiveCodeBench), or only one of them:
  `[{"input": ..., "output": ..., "testtype": "stdin"}, ...]`. With the testtype "functional", input and output are
  texts as in PRIME's data, and the function's name is `func_name` in `metadata`. Private test cases may be packed as
  in the data set on the Hugging Face hub: a JSON text that is pickled, compressed by zlib and encoded in base64.

Printed text is compared as in LiveCodeBench (lcb_runner/evaluation/testing_util.py, grade_stdio): whitespace at the
ends of the text and of its lines is ignored, and two different lines are equal if all their words are equal decimal
numbers. Values are compared by ==, and tuples are equal to lists. PRIME's grader
(verl/utils/reward_score/prime_code/testing_util.py) also accepts numbers with a relative error of 1e-5 (numpy's
allclose); set `tolerance` for this. PRIME's grader also ignores empty lines; this module does not.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from megatron_rl.lib.safe_pickle import refuse_bombs
from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import Ran, SandboxFailure, SandboxSettings

MEMORY_MIB = 1024  # memory limit in MiB of one process of a graded program; a lower reward.memory_mib takes precedence
OUTPUT_BYTES = 16 << 20
MOST_BYTES = 256 << 20  # maximum size in bytes of unpacked test cases
_BLOCK = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
            "itertools", "functools", "operator", "io", "sys", "json")  # fmt: skip
# Imports that LiveCodeBench puts before every program, because LeetCode programs have no imports.
# This module puts LiveCodeBench's imports only before programs that fail without them.
IMPORTS = "".join(
    [
        *(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing")),
        f"import {', '.join(_MODULES)}\nsys.setrecursionlimit(50000)\n",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test case: the output that a program must print for an input, or the value of a function for its arguments."""

    inputs: Any  # the program's standard input, or the list of the function's arguments
    accepted: Sequence[Any]  # all accepted outputs or values
    function: str | None = None


def grade(
    response: str,
    payload: Mapping[str, Any],
    *,
    share: bool = False,
    timeout_s: float = 2.0,
    total_s: float = 4.0,
    tolerance: float = 0.0,
) -> float:
    """Returns 1.0 if the code in `response` passes all test cases, else 0.0. Stops at the first failed case. With
    `share`, runs all cases and returns the share of the cases that the code passes.

    `timeout_s`: time limit in seconds for one case. `total_s`: time limit in seconds for all cases together;
    `reward.timeout_s` must be at least one second longer. `tolerance`: maximum absolute difference between a number and
    the expected number; if the expected number has an absolute value above 1, the maximum relative difference.

    If the time `total_s` is over and the code itself used at least half of it, the remaining cases fail. If the code
    used less, raises SandboxFailure, because the machine was too slow to grade the code. Raises ValueError for a
    payload whose cases cannot be parsed.
    """
    cases, code = read_cases(payload), last_code(response)
    if code is None:
        return 0.0
    ends_at, spent, passed = time.monotonic() + total_s, 0.0, 0
    for case in cases:
        remaining_s = ends_at - time.monotonic()
        ran = _run(code, case, min(timeout_s, remaining_s))
        if ran is not None and ran.why.startswith(("NameError", "RecursionError")) and not code.startswith(IMPORTS):
            code = IMPORTS + code
            remaining_s = ends_at - time.monotonic()
            ran = _run(code, case, min(timeout_s, remaining_s))
        spent += ran.seconds if ran is not None else 0.0
        if ran is None or (ran.late and remaining_s < timeout_s):  # the time total_s is over
            if spent < total_s / 2:
                raise SandboxFailure(
                    f"{len(cases)} cases did not get done in {total_s:g} s, and the code is not to blame: it took "
                    f"{spent:.2f} s of them; raise reward.timeout_s and reward.args.total_s, or give fewer cases"
                )
            break
        if _is_correct(ran, case, tolerance):
            passed += 1
        elif not share:
            break
    return passed / len(cases) if share else float(passed == len(cases))


def last_code(response: str) -> str | None:
    """Returns the last code block of a response that is marked as Python; without one, the last code block without a
    language; None if the response has neither."""
    blocks = [(words.strip().lower(), code) for words, code in _BLOCK.findall(response)]
    for languages in (_PYTHON, ("",)):
        codes = [code for language, code in blocks if language in languages]
        if codes:
            return codes[-1]
    return None


def read_cases(payload: Mapping[str, Any]) -> list[Case]:
    """Returns the test cases of a payload, at least one. Raises ValueError if the payload has no or malformed cases."""
    try:
        if "public_test_cases" in payload or "private_test_cases" in payload:
            cases = _livecodebench_cases(payload)
        else:
            rows = _plain(next((payload[key] for key in ("input_output", "answer") if key in payload), None))
            inputs, outputs, name = rows["inputs"], rows["outputs"], rows.get("fn_name")
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
            cases = [
                _function_case(name, case_input, expected)
                if name
                else Case(inputs=_text(case_input), accepted=[_text(expected)])
                for case_input, expected in zip(inputs, outputs, strict=True)
            ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the cases cannot be read ({type(error).__name__}: {error}): mend or drop this problem"
        ) from None
    if not cases:
        raise ValueError("there are no cases: drop this problem")
    return cases


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Returns whether a program printed the expected text. Ignores whitespace at both ends of each line, and accepts
    equal numbers in different formats, such as 1 and 1.0."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Returns whether the value that a function returned equals the expected value. A tuple and a list of equal
    elements are equal."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(same_value(a, b, tolerance) for a, b in pairs)
    if tolerance and isinstance(value, int | float) and isinstance(expected, int | float):
        return abs(value - expected) <= tolerance * max(1.0, abs(expected))
    return bool(value == expected)


def _run(code: str, case: Case, timeout_s: float) -> Ran | None:
    """Runs the code on one test case in the sandbox. Returns None without running it if `timeout_s` is not positive."""
    if timeout_s <= 0:
        return None
    settings = SandboxSettings(timeout_s=timeout_s, memory_mib=MEMORY_MIB, output_bytes=OUTPUT_BYTES)
    if case.function is None:
        return sandbox.run_program(code, case.inputs, settings=settings)
    return sandbox.call(code, case.inputs, name=case.function, settings=settings)


def _is_correct(ran: Ran, case: Case, tolerance: float) -> bool:
    if ran.why:
        return False
    if case.function is None:
        return any(same_output(ran.output, expected, tolerance) for expected in case.accepted)
    try:
        value = ast.literal_eval(ran.output)
        return any(same_value(value, expected, tolerance) for expected in case.accepted)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
        return False  # the returned value is not a Python literal, or cannot be compared


def _same_numbers(printed: str, expected: str, tolerance: float) -> bool:
    """Returns whether two lines consist of decimal numbers that are pairwise equal up to `tolerance`."""
    try:
        ours, theirs = ([Decimal(word) for word in line.split()] for line in (printed, expected))
        if len(ours) != len(theirs):
            return False
        allowed = Decimal(repr(tolerance))
        return all(
            a == b or (tolerance and abs(a - b) <= allowed * max(Decimal(1), abs(b)))
            for a, b in zip(ours, theirs, strict=True)
        )
    except ArithmeticError:  # raised for a word that is not a number, and for numbers that are too large to subtract
        return False


def _function_case(name: str, case_input: Any, expected: Any) -> Case:
    if isinstance(case_input, str):
        values = [json.loads(line) for line in case_input.split("\n")]
        expected = json.loads(expected) if isinstance(expected, str) else expected
        return Case(function=name, inputs=values, accepted=[expected])
    # APPS stores most expected values in a list of length one, and some values directly.
    alone = [expected[0]] if isinstance(expected, list) and len(expected) == 1 else []
    return Case(function=name, inputs=list(case_input), accepted=[expected, *alone])


def _livecodebench_cases(payload: Mapping[str, Any]) -> list[Case]:
    """Returns the cases of a payload in LiveCodeBench's format: lists of {"input", "output", "testtype"}."""
    name = (_plain(payload.get("metadata")) or {}).get("func_name") or payload.get("fn_name")
    cases = []
    for key in ("public_test_cases", "private_test_cases"):
        for row in _plain(payload.get(key)) or ():
            if row["testtype"] == "stdin":
                cases.append(Case(inputs=row["input"], accepted=[row["output"]]))
            elif row["testtype"] == "functional" and name:
                cases.append(_function_case(name, row["input"], row["output"]))
            else:
                raise ValueError(f"testtype {row['testtype']!r} with the function {name!r}")
    return cases


def _plain(value: Any) -> Any:
    """Returns the parsed value of a JSON text, which may be packed as in LiveCodeBench (pickle, zlib and base64).

    A value that is not a text, and the empty text, are returned unchanged.
    """
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            unpacking = zlib.decompressobj()
            packed = unpacking.decompress(base64.b64decode(value, validate=True), MOST_BYTES)
        except (binascii.Error, zlib.error):
            raise ValueError(f"{value[:60]!r} is no JSON") from None
    if not unpacking.eof:
        raise ValueError(f"it is cut short, or has more than {MOST_BYTES} bytes when it is unpacked")
    try:
        refuse_bombs(packed)
        text = _TextUnpickler(io.BytesIO(packed)).load()
        if not isinstance(text, str):
            raise ValueError(f"it holds a {type(text).__name__} where a text must stand")
        return json.loads(text)
    except (pickle.UnpicklingError, EOFError, RecursionError) as error:
        raise ValueError(f"it is packed in another way: {error}") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(value)


class _TextUnpickler(pickle.Unpickler):
    """An unpickler that rejects all classes and functions, so that a pickle can contain plain data only and cannot run
    code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"packed cases are texts, not {module_name}.{global_name}")
