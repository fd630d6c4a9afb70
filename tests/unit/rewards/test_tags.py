"""Tests the generator's grammar: step blocks, boxed answers and the format score, on well-formed and random text."""

from __future__ import annotations

import random
import re
import time

import pytest

from megatron_rl.evaluation.statistics import majority
from megatron_rl.recipes.votes import elect
from megatron_rl.rewards.answer_key import answer_key, normal_form
from megatron_rl.rewards.math_answer import grade
from megatron_rl.rewards.math_extraction import boxed_answer
from megatron_rl.texts.tags import after_thinking, boxed, generator_format, joined_boxes, step_spans, step_texts

PIECES = [
    "<step>",
    "</step>",
    "<answer>",
    "</answer>",
    "<think>",
    "\\boxed{",
    "}",
    "{",
    "\\{",
    "\\}",
    "\\",
    "a",
    " ",
    "\n",
    "日",
    "<ste",
    "p>",
]


def random_texts(count: int, longest: int = 30):
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randrange(longest))) for _ in range(count)]


def solution(steps: int, answer: str = "<answer>\\boxed{7}</answer>") -> str:
    return "<think>" + "".join(f"<step>s{i}</step>\n" for i in range(steps)) + "</think>" + answer


def test_steps_with_their_tags_in_order():
    text = "<think> <step> one\ntwo </step>\n<step></step> </think>"
    assert [text[a:b] for a, b in step_spans(text)] == ["<step> one\ntwo </step>", "<step></step>"]
    assert step_texts(text) == ["one\ntwo", ""]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<step> never closed", []),
        ("</step> reversed <step>", []),
        ("</step><step>a</step></step>", ["a"]),
        ("<step>a<step>b</step>c</step>", ["a<step>b"]),
        ("<step>a</step><step>b", ["a"]),
        ("<Step>a</Step> <step >b</step>", []),
        ("<step></step", []),
        ("", []),
    ],
)
def test_broken_tags(text, inside):
    assert step_texts(text) == inside


def test_step_blocks_are_the_released_codes_lazy_match():
    for text in random_texts(3000):
        assert step_spans(text) == [match.span() for match in re.finditer("<step>(.*?)</step>", text, re.DOTALL)]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{3} then \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ b d }", "b d"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{4} \boxed{never closed", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{a \boxed{b}", "b"),
        (r"} \boxed{6}}", "6"),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_boxed_answer(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (solution(3), 1.0),
        (solution(9), 1.0),
        (solution(2), 0.6),
        (solution(1), 0.6),
        (solution(0), 0.2),
        (solution(3, ""), 0.0),
        (solution(3, "<answer>\\boxed{7}"), 0.0),
        (solution(3, "<answer>7</answer>"), 0.2),
        (solution(3, "<answer>It is \\boxed{7}</answer>"), 0.2),
        (solution(3, "<answer>\\boxed{7}.</answer>"), 0.2),
        (solution(3, "<answer>\\boxed{7} \\boxed{8}</answer>"), 0.2),
        (solution(3, "<answer>\\boxed{7</answer>"), 0.2),
        (solution(3, "<answer>\\boxed{}</answer>"), 0.2),
        (solution(3, "<answer>\\boxed{ }</answer>"), 0.2),
        (solution(3, "<answer></answer>"), 0.2),
        (solution(3, "<answer>\n\\boxed{\\frac{1}{2}}\n</answer>"), 1.0),
        (solution(3, "<answer>\\boxed{\\{1, 2\\}}</answer>"), 1.0),
        (solution(3, "<answer>\\boxed{\\left\\{ x \\right.}</answer>"), 1.0),
        (solution(2, "<answer>7</answer>"), 0.0),
        (solution(0, "<answer>7</answer>"), 0.0),
        ("<step> #1 a </step> <step> #2 b </step> <step> #3 c </step> <answer> \\boxed{ a b c } </answer>", 1.0),
        ("", 0.0),
    ],
)
def test_the_format_score_by_the_released_rules(text, score):
    assert generator_format(text) == score


def test_two_steps_pass_the_count_gate_exactly():
    """1.0 - 0.4 must not fall below 0.6 by rounding."""
    assert generator_format(solution(2)) >= 0.6


def test_any_text_is_read():
    for text in random_texts(3000):
        assert generator_format(text) in (0.0, 0.2, 0.6, 1.0)
        content = boxed(text)
        assert content is None or content in text
        assert len(step_texts(text)) == len(step_spans(text))


@pytest.mark.parametrize(
    "piece", ["<step>", "</step>", "\\boxed{", "\\boxed{{}", "<answer>", "{", "<answer></answer>", "</step><step>"]
)
def test_degenerate_repetition_is_read_in_linear_time(piece):
    text = piece * 50_000
    start = time.process_time()
    step_spans(text), boxed(text), generator_format(text)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42", " 42"),
        ("<think>\nhm</think>\n\n42", "42"),
        ("hm</think>42 </think> 43", "43"),
        ("<think>hm \\boxed{1}", ""),
        ("<think>a</think>42<think>b", ""),
        ("<think></think>", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_follows_the_last_thought_and_an_open_thought_has_none(text, answer):
    assert after_thinking(text) == answer


BOXES = (
    *(r"\boxed{1}", r"\fbox{2}", r"\boxed {x y}", r"\boxed{\frac{1}{2}}", r"\boxed{}", r"\boxed{\boxed{3} x}", "{q}"),
    *(" and ", ",", " " + "a" * 12, " or bbbbbbbbbbbbbb ", "c" * 75),
)


def test_twins_votes_and_grading_read_the_same_boxes():
    """Without a closing brace, math-verify grades the rest of the text, as its own parser reads it; a vote has no
    answer then, because the rest is no answer that others could give too. That is why there are two readers."""
    draw, read = random.Random(1), 0
    for _ in range(5000):
        text = "".join(draw.choices(BOXES, k=draw.randrange(1, 7)))
        box = boxed_answer(text)
        read += box is not None
        assert joined_boxes(text) == box
    assert read > 3000 and boxed_answer(r"\boxed{1") == "{1" and joined_boxes(r"\boxed{1") is None
    for text, gold in ((r"\boxed{1} and \boxed{2}", "1,2"), (r"so \fbox{7}", "7"), (r"\boxed {4}", "4")):
        label = elect([text, r"\boxed{9}"])
        assert label.answer == gold and answer_key(text) == normal_form(gold)
        assert grade(text, {"answer": label.answer}) == 1.0  # an answer agrees with the label that it elects
    assert boxed(r"so \fbox{7}") == "7" and boxed(r"\boxed {4}") == "4"


def test_twins_a_tie_of_votes_has_one_label_and_the_mean_score():
    """Training needs one label; an evaluation reports the expected score of a tie that is broken at random."""
    texts = [r"\boxed{1}", r"\boxed{2}"]
    assert elect(texts).answer == "1" and majority([answer_key(text) for text in texts], [1.0, 0.0]) == 0.5
    most = [*texts, r"\fbox{2}"]
    assert elect(most).answer == "2" and majority([answer_key(text) for text in most], [1.0, 0.0, 0.0]) == 0.0
