"""The packaged prompts: each shows an answer that its own grammar calls perfect."""

import re

import pytest

from megatron_rl.rewards.verdicts import review
from megatron_rl.texts.tags import boxed, generator_format, step_spans
from megatron_rl.texts.text import fill, read_template


@pytest.mark.parametrize("name", ["tango_generator", "grpo_generator"])
def test_the_packaged_generator_prompts_show_a_perfect_answer(name):
    text = fill(read_template(name), question="How many?")
    example = re.search(r"Assistant: (<think>.*?</answer>)", text, re.DOTALL).group(1)
    assert generator_format(example) == 1.0 and boxed(example) == "9" and len(step_spans(example)) == 3
    assert text.endswith("User: How many?\nAssistant:") and "{question}" not in text


def test_the_packaged_verifier_prompt_has_the_papers_order_and_a_perfect_example():
    text = fill(read_template("tango_verifier"), question="Why {solution}?", solution="SOLVED", num_steps="7")
    places = [
        text.index(part)
        for part in (
            "verification assistant",
            "Problem:\nWhy {solution}?",
            "Assistant's Solution:\nSOLVED",
            "7 <step>",
            "Remember",
        )
    ]
    assert places == sorted(places) and text.endswith("Your Verification:\n") and "exactly 7 step analyses" in text
    [example] = re.findall(
        r"good verification of it is:\n(<step_verification>.*?</final_verification>)", text, re.DOTALL
    )
    read = review(example, num_steps=2, correct=True, generator_format=1.0)
    assert (read.verdicts, read.final, read.format, read.reward) == ((True, True), True, 1.0, 1.8)
