"""Graders of benchmarks beyond mathematics: labels, short texts, literals; answer keys; hostile texts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.answer_key import answer_key, normal_form
from megatron_rl.rewards.code_answer import grade_input, grade_output
from megatron_rl.rewards.sandbox import SandboxFailure
from megatron_rl.rewards.short_answer import grade_label, grade_text, stated_answer

HOSTILE = [
    "",
    "\\boxed{",
    "\\boxed{" * 5000,
    "{" * 20000,
    "\\boxed{" + "9" * 5000 + "}",
    "\\boxed{" + "[" * 3000 + "]" * 3000 + "}",
    "\\boxed{__import__('os').system('touch pwned')}",
    "\\boxed{9**9**9**9}",
    "\x00\ud800",
    "<answer>" * 2000,
    "\\boxed{\\text{" * 300,
    "a" * 200_000,
]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("<answer>\\boxed{yes}</answer>", "yes", 1.0),
        ("\\boxed{\\text{No.}}", "no", 1.0),
        ("\\boxed{True}", "yes", 1.0),
        ("\\boxed{The answer is no}", "no", 1.0),
        ("\\boxed{yes or no}", "yes", 0.0),
        ("Yes at first.\nSo the answer is no", "no", 1.0),
        ("\\boxed{}", "no", 0.0),
        ("nothing", "no", 0.0),
    ],
)
def test_labels(response, answer, score):
    assert grade_label(response, {"answer": answer, "choices": ["yes", "no"]}) == score


def test_proved_is_not_disproved():
    payload = {"answer": "proved", "choices": ["proved", "disproved", "unknown"]}
    assert grade_label("\\boxed{proved}", payload) == 1.0 and grade_label("\\boxed{disproved}", payload) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("\\boxed{1,234}", "1234", 1.0),
        ("\\boxed{12.345}", "12.35", 1.0),
        ("\\boxed{12.3}", "12.35", 0.0),
        ("\\boxed{12\\%}", "12%", 1.0),
        ("\\boxed{13}", "12", 0.0),
        ("\\boxed{12.4}", "12", 0.0),
        ('\\boxed{The "Red Sox", 2004}', "red sox, 2004", 1.0),
        ("\\boxed{2004, red sox}", "red sox, 2004", 0.0),
        ("<answer>blue</answer>", "Blue.", 1.0),
    ],
)
def test_short_texts(response, answer, score):
    assert grade_text(response, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("\\boxed{[1, 2]}", "[1,2]", 1.0),
        ("\\boxed{{'a': 1, 'b': 2}}", "{'b': 2, 'a': 1}", 1.0),
        ("\\boxed{\\{'a': 1\\}}", "{'a': 1}", 1.0),
        ("\\boxed{'x'}", '"x"', 1.0),
        ("\\boxed{x}", "'x'", 0.0),
        ("\\boxed{'x\\_y'}", "'x_y'", 1.0),
        ("\\boxed{2 + 2}", "4", 0.0),
        ("\\boxed{int('4')}", "4", 0.0),
        ("\\boxed{Counter( [1] )}", "Counter([1])", 1.0),
        ("<answer>(1,)</answer>", "(1,)", 1.0),
        ("no answer", "4", 0.0),
    ],
)
def test_outputs_are_compared_as_literals(response, answer, score):
    assert grade_output(response, {"answer": answer}) == score


CODE = "def f(text, n=1):\n    return text.upper() * n\n"


@pytest.mark.parametrize(
    ("said_arguments", "score"),
    [
        ("'ab', 2", 1.0),
        ("f('abab')", 1.0),
        ("'ab', n=2", 1.0),
        ("'ab'", 0.0),
        ("'a' + 'bab'", 0.0),
        ("open('x', 'w')", 0.0),
        ("*['a']", 0.0),
    ],
)
def test_inputs_are_tried_in_the_sandbox(said_arguments, score):
    payload = {"code": CODE, "input": "'ab', 2", "answer": "'ABAB'"}
    assert grade_input(f"\\boxed{{{said_arguments}}}", payload) == score


def test_a_problem_that_its_own_input_does_not_solve_is_an_error():
    with pytest.raises(SandboxFailure, match="the problem, or this machine, is broken"):
        grade_input("\\boxed{1}", {"code": CODE, "input": "'a'", "answer": "'B'"})


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_wrong_and_quick(response, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    assert grade_label(response, {"answer": "yes", "choices": ["yes", "no"]}) == 0.0
    assert grade_text(response, {"answer": "7"}) == 0.0
    assert grade_output(response, {"answer": "7"}) == 0.0
    assert isinstance(answer_key(response), str | None)
    assert time.monotonic() - start < 5 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "texts",
    [
        ("\\frac{1}{2}", "\\dfrac12", "1/2", "0.5", ".50", "x = 0.5"),
        ("1,000", "1{,}000", "1000", "1000.0"),
        ("-3", "-3.", "$-3$"),
        ("5", "5\\text{ cm}", "5 \\mathrm{~kg}"),
        ("50\\%", "50%", "50"),
    ],
)
def test_equal_answers_have_one_key(texts):
    assert len({answer_key(f"so \\boxed{{{text}}}") for text in texts}) == 1


def test_different_answers_have_different_keys():
    texts = ["1", "2", "-1", "\\frac{1}{2}", "\\frac{2}{1}0", "x^2", "x^3", "(1,2)", "(2,1)", "\\sqrt{2}"]
    assert len({answer_key(f"\\boxed{{{text}}}") for text in texts}) == len(texts)
    assert answer_key("I do not know") is None and answer_key("it is 3, no, 4") == "4"


@settings(deadline=None)
@given(st.text())
def test_any_text_has_a_form_and_an_answer(text):
    assert isinstance(normal_form(text), str) and isinstance(stated_answer(text), str)
