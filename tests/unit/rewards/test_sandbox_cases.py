"""Rewards for programs: rows of every format, how outputs are compared, and answers that are wrong, late or broken."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

from megatron_rl.config.schema import Reward
from megatron_rl.rewards import sandbox
from megatron_rl.rewards.code_cases import IMPORTS, grade, last_code, read_cases, same_output, same_value
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.rewards.sandbox import SandboxFailure
from megatron_rl.types import Outcome


@pytest.fixture(scope="module")
def isolated():
    """Skips where no sandbox can be built, and says why."""
    try:
        sandbox.require()
    except SandboxFailure as error:
        pytest.skip(str(error))


# APPS and TACO: texts, or lists of lines.
SUMS = {"inputs": ["3\n1 2 3\n", "2\n-5 5\n", "1\n7\n"], "outputs": ["6\n", "0\n", "7\n"]}
LINES = {"inputs": [["2", "a b"], ["1", "c"]], "outputs": [["b a"], ["c"]]}
# APPS with a function: arguments in a list, the value in a list of one.
CALLS = {
    "fn_name": "maxProfit",
    "inputs": [[[7, 1, 5, 3, 6, 4]], [[7, 6, 4, 3, 1]]],
    "outputs": [[5], [0]],
}
# PRIME's data in verl: a text with JSON in every line.
PRIME = {"fn_name": "pair_sums", "inputs": ["[1, 2]\n3", "[0]\n-1"], "outputs": ["[4, 5]", "[-1]"]}
# LiveCodeBench, with a few of its columns.
STDIN_TESTS = [
    {"input": "3 4\n", "output": "7\n", "testtype": "stdin"},
    {"input": "10 -3\n", "output": "7\n", "testtype": "stdin"},
]
FUNCTIONAL_TESTS = [
    {"input": "[1, 2, 3]\n2", "output": "true", "testtype": "functional"},
    {"input": "[]\n5", "output": "false", "testtype": "functional"},
]
METADATA = json.dumps({"func_name": "contains"})

SUM = "I add them.\n```python\nn = int(input())\nprint(sum(map(int, input().split())))\n```\nDone."
REVERSED = "```\ninput()\nprint(*reversed(input().split()))\n```"
PROFIT = """```python
class Solution:
    def maxProfit(self, prices: List[int]) -> int:
        best, low = 0, inf
        for price in prices:
            low = min(low, price)
            best = max(best, price - low)
        return best
```"""
PAIRS = "```python\ndef pair_sums(values, n):\n    return tuple(value + n for value in values)\n```"
PLUS = "```py\na, b = map(int, input().split())\nprint(float(a + b))\n```"
CONTAINS = "```python3\nclass Solution:\n    def contains(self, values, x):\n        return x in values\n```"


def packed(rows):
    """Packs rows as LiveCodeBench's private_test_cases are on the hub."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(rows)))).decode()


ROWS = [
    ({"input_output": json.dumps(SUMS)}, SUM),
    ({"input_output": SUMS}, SUM),
    ({"input_output": json.dumps(LINES)}, REVERSED),
    ({"input_output": json.dumps(CALLS)}, PROFIT),
    ({"answer": json.dumps(PRIME)}, PAIRS),
    ({"public_test_cases": json.dumps(STDIN_TESTS[:1]), "private_test_cases": packed(STDIN_TESTS[1:])}, PLUS),
    (
        {
            "public_test_cases": json.dumps(FUNCTIONAL_TESTS[:1]),
            "private_test_cases": json.dumps(FUNCTIONAL_TESTS[1:]),
            "metadata": METADATA,
        },
        CONTAINS,
    ),
    ({"public_test_cases": FUNCTIONAL_TESTS, "fn_name": "contains"}, CONTAINS),
]
FORMATS = ["apps", "apps, read", "taco", "apps calls", "prime", "lcb stdin", "lcb functional", "lcb read"]


@pytest.mark.parametrize(("payload", "right"), ROWS, ids=FORMATS)
def test_a_right_answer_passes_in_every_format(isolated, payload, right):
    assert grade(right, payload, timeout_s=20, total_s=60) == 1.0


@pytest.mark.parametrize(("payload", "right"), ROWS, ids=FORMATS)
def test_another_problems_answer_fails_in_every_format(isolated, payload, right):
    other = SUM if right is not SUM else REVERSED
    assert grade(other, payload, timeout_s=20, total_s=60) == 0.0


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("```python\ninput()\nprint(max(6, sum(map(int, input().split()))))\n```", 2 / 3),  # wrong once
        ("```python\nn = int(input())\nif n == 1: raise KeyError\nprint(sum(map(int, input().split())))\n```", 2 / 3),
        ("```python\nn = int(input())\nwhile n == 2: pass\nprint(sum(map(int, input().split())))\n```", 2 / 3),  # late
        ("```python\nprint(sum(map(int, input().split()))\n```", 0.0),  # no Python
        ("```python\nimport os\nos._exit(0)\n```", 0.0),
        ("n = int(input())\nprint(sum(map(int, input().split())))", 0.0),  # in no block
        ("```python\nn = int(input())", 0.0),  # cut before the block's end
        ("", 0.0),
    ],
)
def test_the_share_of_cases_that_pass(isolated, response, share):
    limits = {"timeout_s": 2.0, "total_s": 30.0} if "while" in response else {"timeout_s": 20.0, "total_s": 60.0}
    assert grade(response, {"input_output": SUMS}, share=True, **limits) == pytest.approx(share)
    assert grade(response, {"input_output": SUMS}, **limits) == 0.0


def test_a_code_that_takes_all_the_time_has_failed_the_cases_that_are_left(isolated):
    cases = {"inputs": ["1"] * 20, "outputs": ["1"] * 20}
    response = "```python\nimport time\ntime.sleep(0.5)\nprint(1)\n```"
    assert grade(response, {"input_output": cases}, share=True, timeout_s=5, total_s=1.2) < 0.5
    assert grade("```python\nwhile True: pass\n```", {"input_output": cases}, timeout_s=5, total_s=0.5) == 0.0


def test_more_cases_than_a_machine_can_run_in_time_are_no_zero(isolated):
    cases = {"inputs": ["1"] * 2000, "outputs": ["1"] * 2000}
    with pytest.raises(SandboxFailure, match="2000 cases did not get done in 0.6 s, and the code is not to blame"):
        grade("```python\nprint(1)\n```", {"input_output": cases}, timeout_s=0.6, total_s=0.6)


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("  1 2\n3\n", "1 2\n3", True),
        ("1  2", "1 2", True),  # equal as numbers
        ("a  b", "a b", False),  # a text is compared letter by letter
        ("1.0", "1", True),
        ("1e2", "100", True),
        ("0.3333333333", "0.333333333", False),
        ("50000000000000001", "50000000000000000", False),  # equal as floats
        ("1\n\n2", "1\n2", False),
        ("Yes", "YES", False),
        ("1 2 3", "1 2", False),
        ("nan", "nan", True),
        ("sNaN", "1", False),
        ("1e999999999999", "1", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_printed_text_is_compared_as_livecodebench_does(printed, wanted, same):
    assert same_output(printed, wanted) is same


def test_numbers_may_differ_when_that_is_asked_for():
    assert same_output("0.3333333333 2", "0.333333333 2.0", 1e-6) and not same_output("0.334", "0.333", 1e-6)
    assert same_output("1000000.5", "1000000", 1e-6) and not same_output("1e999999999999 1", "1 1", 1e-6)
    assert same_value([0.1 + 0.2, (1, 2)], [0.3, [1, 2]], 1e-9) and not same_value([0.1 + 0.2], [0.3])
    assert not same_value([1, 2, 3], [1, 2]) and not same_value("1", 1, 1e-6) and same_value((1, [(2,)]), [1, [[2]]])


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```\nthen\n```python\nb\n```\n```\noutput\n```", "b\n"),
        ("```\na\n```\n```bash\nls\n```", "a\n"),
        ("```Python\na\n```", "a\n"),
        ("1. so\n   ```python\n   a\n   ```", "   a\n"),
        ("```cpp\nint a;\n```", None),
        ("a `b` c", None),
    ],
)
def test_the_last_block_of_python_is_the_answer(response, code):
    assert last_code(response) == code


class _Runs:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"input_output": "{not JSON"}, "is no JSON"),
        ({"input_output": {"inputs": ["1", "2"], "outputs": ["1"]}}, "2 inputs for 1 outputs"),
        ({"input_output": {"inputs": [], "outputs": []}}, "there are no cases"),
        ({"input_output": {"outputs": ["1"]}}, "KeyError: 'inputs'"),
        ({"input_output": {"inputs": [1], "outputs": [2]}}, "TypeError"),
        ({"answer": "42"}, "TypeError"),
        ({"question": "a"}, "TypeError"),
        ({"public_test_cases": FUNCTIONAL_TESTS}, "testtype 'functional' with the function None"),
        ({"private_test_cases": "####"}, "is no JSON"),
        (
            {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(_Runs()))).decode()},
            "packed cases are texts, not",
        ),
    ],
)
def test_a_broken_row_is_an_error_and_no_zero(payload, why, capsys):
    with pytest.raises(ValueError, match="mend or drop|drop this problem") as raised:
        grade(SUM, payload)
    assert why in str(raised.value) and "code ran" not in capsys.readouterr().out


def test_cases_are_read_in_order():
    payload, _ = ROWS[5]
    assert [case.inputs for case in read_cases(payload)] == ["3 4\n", "10 -3\n"]
    assert [case.accepted for case in read_cases({"input_output": CALLS})] == [[[5], 5], [[0], 0]]


def test_an_answer_without_imports_gets_those_of_livecodebench(isolated):
    """LiveCodeBench's line of imports, which its answers rely on, and a recursion as deep as it allows."""
    for name in ("List", "Counter", "inf", "heappush", "bisect_left", "lru_cache", "accumulate", "gcd", "deque"):
        space = {}
        exec(IMPORTS, space)
        assert name in space
    deep = "```python\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))\n```"
    assert grade(deep, {"input_output": {"inputs": ["20000"], "outputs": ["20000"]}}, timeout_s=20, total_s=60) == 1.0


BROKEN = """
from megatron_rl.rewards import code_cases, sandbox, sandbox_walls

sandbox.require()

def grade(response, payload):
    if payload["broken"]:
        sandbox_walls.RUNNER = "raise OSError('the sandbox is broken')"
    return code_cases.grade(response, payload, timeout_s=20, total_s=60)
"""


def test_the_pool_tells_wrong_from_broken(isolated, tmp_path, monkeypatch):
    (tmp_path / "broken_sandbox.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    row = {"input_output": json.dumps(SUMS), "broken": False}
    responses = [SUM, REVERSED, SUM, SUM]
    payloads = [row, row, {"input_output": "{"} | {"broken": False}, row | {"broken": True}]
    with GradePool(Reward(target="broken_sandbox:grade", workers=1, timeout_s=60)) as pool:
        graded = pool.grade(responses, payloads)
    assert [(g.outcome, g.score) for g in graded] == [
        (Outcome.SCORE, 1.0),
        (Outcome.SCORE, 0.0),
        (Outcome.ERROR, 0.0),
        (Outcome.ERROR, 0.0),
    ]
    assert "ValueError" in graded[2].detail and "SandboxFailure" in graded[3].detail
    assert "the sandbox is broken" in graded[3].detail
