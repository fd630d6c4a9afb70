"""Exact match of short answers: the released code's rule by plain loops, its values, and whose answers are known."""

import random
import string

import pytest

from megatron_rl.rewards.exact_match import exact_match, grade, normal_form

WORDS = [
    "the",
    "The",
    "a",
    "AN",
    "theatre",
    "Paris",
    "U.S.",
    "it's",
    "a-b",
    "the-end",
    "3,5",
    "¿qué?",
    "ÉTÉ",
    "a.",
    "_an_",
]
GAPS = [" ", "  ", "\n", "\t", "", ", ", "\u00a0", " - "]


def normalised_by_loops(text):
    """normalize_answer of Search-R1's qa_em.py: lower case; then no character of string.punctuation; then a space for
    each article that stands as a word, whose characters are letters, digits and underscores; then single spaces."""
    kept = [character for character in text.lower() if character not in string.punctuation]
    words, word = [], ""
    for character in [*kept, None]:  # None: the end
        if character is not None and (character.isalnum() or character == "_"):
            word += character
            continue
        words += [" " if word in ("a", "an", "the") else word, character or ""]
        word = ""
    return " ".join("".join(words).split())


def test_the_normal_form_is_the_released_codes_by_loops():
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(rng.randint(0, 6)))
        assert normal_form(text) == normalised_by_loops(text), repr(text)


@pytest.mark.parametrize(
    ("text", "known", "right"),  # of the released compute_score_em
    [
        ("<answer>The Beatles!</answer>", ["beatles"], 1),
        ("<answer>x</answer><answer>A b,c</answer>", ["bc"], 1),
        ("none", ["none"], 0),
        ("<answer>\n U.S.A. </answer>", ["the USA"], 1),
        ("<answer>5</answer>", ["five", "5"], 1),
        ("<answer>Paris, France</answer>", ["Paris"], 0),
        ("<answer>Paris", ["Paris"], 0),
        ("<answer>the</answer>", [""], 1),
    ],
)
def test_an_exact_match_forgives_case_articles_and_punctuation(text, known, right):
    assert exact_match(text, known) == right


def test_known_answers_are_a_list_or_a_text_or_the_one_answer():
    text = "<answer>Paris</answer>"
    assert grade(text, {"answer": "paris"}) == 1.0 and grade(text, {"answer": "Rome"}) == 0.0
    assert grade(text, {"answer": "Rome", "answers": ["Rome", "Paris"]}) == 1.0
    assert grade(text, {"answer": "Rome", "answers": "Paris"}) == 1.0
    assert grade(text, {"answer": "Paris", "answers": []}) == 0.0
    assert grade("<answer>5</answer>", {"answer": 5}) == 1.0
