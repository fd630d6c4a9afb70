"""The verifier's grammar: step verdicts, the final verdict, the format score and the reward of equation 8.

tests/unit/recipes/test_methods_fidelity.py holds what the released code makes of broken texts.
"""

from __future__ import annotations

import random
import time

import pytest

from megatron_rl.rewards.verdicts import final_verdict, review, step_verdicts, verifier_format

WORD = {True: "CORRECT", False: "INCORRECT"}
TINY = (
    "<step_verification> <step> #1 a a \\boxed{CORRECT} </step> <step> #2 b c \\boxed{INCORRECT} </step> "
    "</step_verification> "
    "<final_verification> \\boxed{INCORRECT} </final_verification>"
)
PIECES = [
    "<step_verification>",
    "</step_verification>",
    "<final_verification>",
    "</final_verification>",
    "<step>",
    "</step>",
    "\\boxed{CORRECT}",
    "\\boxed{INCORRECT}",
    "\\box{ correct }",
    "\\boxed{",
    "}",
    ".",
    " ",
    "\n",
    "so",
    "\\boxed{MAYBE}",
    "日",
]


def verification(steps: list[bool], final: str = "\\boxed{CORRECT}", between: str = "\n") -> str:
    blocks = between.join(
        f"<step>Step {k} Analysis: it holds. \\boxed{{{WORD[v]}}}</step>" for k, v in enumerate(steps, start=1)
    )
    return f"<step_verification>\n{blocks}\n</step_verification>\n<final_verification>{final}</final_verification>\n"


def test_the_word_level_form():
    assert step_verdicts(TINY) == (True, False) and final_verdict(TINY) is False
    got = review(TINY, num_steps=2, correct=False, generator_format=1.0)
    assert (got.verdicts, got.final, got.agrees, got.format, got.reward) == ((True, False), False, True, 1.0, 1.8)


@pytest.mark.parametrize(
    ("block", "verdict"),
    [
        ("so \\boxed{CORRECT}", (True,)),
        ("so \\boxed{INCORRECT}", (False,)),
        ("\\box{CORRECT}", (True,)),
        ("\\BOXED{Incorrect}", (False,)),
        ("\\boxed{ CORRECT } . \n", (True,)),
        ("\\boxed{CORRECT}.", (True,)),
        ("\\boxed{CORRECT} no, \\boxed{INCORRECT}", (False,)),
        ("\\boxed{CORRECT} I think", ()),
        ("\\boxed{CORRECT}..", ()),
        ("\\boxed{RIGHT}", ()),
        ("\\boxed{NOT CORRECT}", ()),
        ("CORRECT", ()),
        ("", ()),
    ],
)
def test_a_verdict_ends_its_block(block, verdict):
    assert step_verdicts(f"<step_verification><step>{block}</step></step_verification>") == verdict


def test_a_block_without_verdict_gives_none_and_swallows_no_neighbour():
    text = "<step>a \\boxed{CORRECT}</step><step>b</step><step>c \\boxed{INCORRECT}</step>"
    assert step_verdicts(f"<step_verification>{text}</step_verification>") == (True, False)


def test_blocks_behind_the_step_section_are_no_step_verdicts():
    text = verification([True], final="<step>\\boxed{INCORRECT}</step>\\boxed{CORRECT}")
    assert step_verdicts(text) == (True,)


@pytest.mark.parametrize(
    "text",
    [
        verification([True, False]).replace("<step_verification>", ""),
        verification([True, False]).replace("</step_verification>", ""),
        verification([True, False]).partition("</step_verification>")[0],
        "</step_verification>" + verification([True, False]).partition("</step_verification>")[0],
    ],
)
def test_without_a_whole_step_section_there_are_no_step_verdicts(text):
    assert step_verdicts(text) == ()


def test_of_two_step_sections_the_first_one_counts():
    assert step_verdicts(verification([True, False]) + verification([False, False, True])) == (True, False)


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (verification([True]), True),
        (verification([True], final="\n\\boxed{incorrect}. \n"), False),
        (verification([True], final=" \\boxed{ correct } . "), True),
        (verification([True]) + " and more", True),
        (verification([True]) + verification([True], final="\\boxed{INCORRECT}"), True),
        (verification([True], final="unsure") + verification([True], final="\\boxed{INCORRECT}"), False),
        (verification([True], final="All steps hold: \\box{CORRECT}"), None),
        ("<final_verification>\\boxed{CORRECT}</final_verification>", True),
        (verification([True], final="CORRECT"), None),
        (verification([True], final="\\boxed{CORRECT} surely"), None),
        (verification([True]).replace("</final_verification>", ""), None),
        (verification([True]).replace("<final_verification>", ""), None),
        (verification([True], final="\\boxed{CORRECT}</final_verification>\\boxed{INCORRECT}"), True),
        ("\\boxed{CORRECT}", None),
        ("", None),
    ],
)
def test_a_final_section_holds_a_verdict_and_nothing_else(text, final):
    assert final_verdict(text) is final


@pytest.mark.parametrize(
    ("text", "num_steps", "generator_format", "score"),
    [
        (verification([True, False]), 2, 1.0, 1.0),
        ("  " + verification([True, False]) + "  \n", 2, 1.0, 1.0),
        (verification([True, False]), 3, 1.0, 0.2),
        (verification([True, False]), 3, 0.6, 0.2),
        (
            verification([True, False]),
            3,
            0.2,
            1.0,
        ),  # the solution itself is malformed: its count is not held against the verifier
        (verification([]), 0, 1.0, 0.2),
        (verification([]), 0, 0.0, 0.2),
        (verification([True, True], between=" meanwhile "), 2, 1.0, 0.6),
        (verification([True, True], between=" meanwhile "), 3, 1.0, 0.0),
        (verification([True], final="CORRECT"), 1, 1.0, 0.2),
        (verification([True], final="CORRECT"), 2, 1.0, 0.0),
        (verification([True]).replace("</step_verification>\n", "</step_verification> hm "), 1, 1.0, 0.0),
        ("Sure! " + verification([True]), 1, 1.0, 0.0),
        (verification([True]) + verification([True]), 1, 1.0, 1.0),
        (verification([True]) + "and more", 1, 1.0, 0.0),
        (verification([True]).replace("<step_verification>", ""), 1, 1.0, 0.0),
        (
            "<final_verification>\\boxed{CORRECT}</final_verification><step_verification></step_verification>",
            1,
            1.0,
            0.0,
        ),
        ("", 0, 0.0, 0.0),
    ],
)
def test_the_format_score_by_the_released_rules(text, num_steps, generator_format, score):
    assert verifier_format(text, num_steps, generator_format) == score


@pytest.mark.parametrize(("correct", "final"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_reward_is_agreement_plus_gamma_times_format(correct, final):
    text = verification([True, False, True], final=f"\\boxed{{{WORD[final]}}}")
    got = review(text, num_steps=3, correct=correct, generator_format=1.0)
    assert got.agrees == (correct == final) and got.reward == pytest.approx(float(correct == final) + 0.8)
    half = review(text, num_steps=2, correct=correct, generator_format=1.0, gamma=0.5)
    assert half.reward == pytest.approx(float(correct == final) + 0.5 * 0.2)


def test_without_a_final_verdict_both_parts_are_zero():
    got = review(verification([True], final="no idea"), num_steps=1, correct=False, generator_format=1.0)
    assert (got.final, got.agrees, got.format, got.reward, got.verdicts) == (None, False, 0.0, 0.0, (True,))


def test_a_verifier_that_runs_on_keeps_the_reward_of_its_verdict():
    """A base model without SFT writes on behind its verdict; its warm-up would have no signal at reward 0."""
    text = verification([True, False]) + "\n\nHuman: thank you"
    got = review(text, num_steps=2, correct=True, generator_format=1.0)
    assert (got.agrees, got.format, got.reward) == (True, 0.0, 1.0)


def test_what_was_written_is_read_back():
    rng = random.Random(0)
    for _ in range(300):
        steps = [rng.random() < 0.5 for _ in range(rng.randint(1, 12))]
        final, correct = rng.random() < 0.5, rng.random() < 0.5
        got = review(
            verification(steps, final=f"\\boxed{{{WORD[final]}}}"),
            num_steps=len(steps),
            correct=correct,
            generator_format=rng.random(),
        )
        assert got.verdicts == tuple(steps) and got.final is final and got.format == 1.0


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        text = rng.choice(
            [
                text[:at] + text[to:],
                text[:at] + rng.choice(PIECES) + text[at:],
                text[to:] + text[:to],
                text + text[at:to],
            ]
        )
    return text


def test_any_text_is_read_and_rewarded_within_bounds():
    rng = random.Random(1)
    soup = ["".join(rng.choices(PIECES, k=rng.randrange(25))) for _ in range(2000)]
    for text in soup + [mutated(rng, verification([True, False, True])) for _ in range(2000)]:
        num_steps, fmt, correct = rng.randrange(4), rng.random(), rng.random() < 0.5
        got = review(text, num_steps=num_steps, correct=correct, generator_format=fmt)
        assert 0.0 <= got.reward <= 1.8 and got.format in (0.0, 0.2, 0.6, 1.0)
        assert len(got.verdicts) <= text.count("</step>")
        assert got.final is not None or got.reward == 0.0 and not got.agrees
        assert got.reward == pytest.approx(float(got.agrees) + 0.8 * got.format)
        assert verifier_format(text, num_steps, fmt) in (0.0, 0.2, 0.6, 1.0)


@pytest.mark.parametrize(
    "piece",
    [
        *PIECES,
        "\\boxed{CORRECT}" + " " * 40,
        "</step_verification><final_verification>",
        "</step_verification>" + " " * 40,
        "<final_verification>" + " " * 40,
        "<step>\\boxed{",
    ],
)
def test_degenerate_repetition_is_read_in_linear_time(piece):
    start = time.process_time()
    many = piece * 20_000
    begun = "<step_verification><step>\\boxed{CORRECT}"
    for text in (many, f"<step_verification>{many}</final_verification>", f"{begun}{many}</step_verification>"):
        review(text, num_steps=3, correct=True, generator_format=1.0)
        verifier_format(text, 3, 1.0)
    assert time.process_time() - start < 2.0
