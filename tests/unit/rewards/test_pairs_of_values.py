"""No text of a model makes a grader fail, whatever the known answer: every pair of kinds of values."""

from __future__ import annotations

import random
import sys
import time

import math_verify
import pytest
from value_kinds import GRADERS, KINDS, grade_pair, respond

from megatron_rl.rewards import instructions, math_answer, short_answer
from megatron_rl.rewards.algebra_limits import AGAIN_S, TooLong, cpu_limit

MATRIX = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"
SQUARE = r"\begin{pmatrix}7&10\\15&22\end{pmatrix}"
SLOW = ("huge", "nested")  # known answers of these kinds are left to `make fuzz`


@pytest.mark.parametrize("known_kind", [kind for kind in KINDS if kind not in SLOW])
def test_pairs_of_values_never_fail_a_grader(known_kind):
    others = [grader for grader in GRADERS if grader != "math"]
    for number, kind in enumerate(KINDS):
        rng = random.Random(f"{known_kind}/{kind}")
        known, response = KINDS[known_kind](rng), respond(rng, kind)
        assert grade_pair("math", response, known)
        assert grade_pair(others[number % len(others)], response, known)


@pytest.mark.parametrize("known", ["5", "x", "(1,2)", MATRIX, r"\{1,2\}", "x=1", "50%", r"\infty", "yes"])
def test_pairs_with_a_product_of_matrices_are_graded(known):
    """The product raised RecursionError in the default grader: the sample was replaced and never punished."""
    for answer in (MATRIX * 2, rf"{MATRIX}\cdot x", rf"{MATRIX}^{{-1}}", rf"{MATRIX}+1", f"2{MATRIX}{MATRIX}"):
        assert math_answer.grade(rf"\boxed{{{answer}}}", {"answer": known}) == 0.0


@pytest.mark.parametrize(
    ("answer", "known"),
    [(MATRIX * 2, SQUARE), (SQUARE, MATRIX * 2), (rf"2\cdot{MATRIX}", rf"{MATRIX}+{MATRIX}")],
)
def test_pairs_of_equal_products_of_matrices_are_right(answer, known):
    assert math_answer.grade(rf"\boxed{{{answer}}}", {"answer": known}) == 1.0


def test_pairs_with_an_answer_that_hides_its_cost_are_refused():
    """The raised digits were read as an exponent only after the cost had been estimated."""
    assert math_answer.grade(r"\boxed{10⁹⁹⁹⁹⁹⁹⁹⁹⁹}", {"answer": "5"}) == 0.0


def test_pairs_with_a_slow_known_answer_end_at_the_limit(monkeypatch):
    """math-verify caught the end of the first calculation, and the grader began a second one."""
    ends = []

    def verify(*arguments, **options):
        try:
            return math_verify.verify(*arguments, **options)
        except BaseException as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(math_answer, "verify", verify)
    known = r"\sum_{k=1}^{2000} \frac{1}{k^{x}}"
    assert math_answer.grade(r"\boxed{5 m/s}", {"answer": known}) == 0.0
    assert ends == [TooLong]


def test_pairs_whose_end_is_swallowed_end_a_moment_later(monkeypatch):
    """The limit fell into a callback of the garbage collector, from which Python raises nothing: the calculation went
    on for as long again, several times."""

    class Swallowing:
        def __del__(self):
            while True:
                pass

    # pytest's hook formats a traceback, in which the next TooLong can fall
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    with pytest.raises(TooLong), cpu_limit(1.0):
        Swallowing()
        swallowed = time.process_time()
        while True:
            pass
    assert time.process_time() - swallowed < 10 * AGAIN_S


def test_pairs_of_long_decimals_do_not_fail_the_grader_of_texts():
    """A number of more than 28 digits raised decimal.InvalidOperation."""
    assert short_answer.grade_text(r"\boxed{" + "1" * 40 + ".55}", {"answer": "0.5"}) == 0.0
    assert short_answer.grade_text(r"\boxed{" + "1" * 40 + ".55}", {"answer": "1" * 40 + ".6"}) == 1.0


def test_pairs_with_nested_json_do_not_fail_the_grader_of_instructions():
    """Thousands of nested brackets raised RecursionError."""
    payload = {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}
    assert instructions.grade("[" * 100_000, payload)["reward"] == 0.0
