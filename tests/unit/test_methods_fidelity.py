r"""Inputs and results of RL Tango's released code (github.com/kaiwenzha/RL-Tango, 411ed83), and ours beside them.

Every result in this file was obtained by executing the release's own functions on the input that stands beside it;
each table names the file and the function. Where this project differs on purpose, the table holds both results
(docs/reference/fidelity.md says why).
"""

from __future__ import annotations

import pytest

from megatron_rl.algorithms.advantages import step_rewards
from megatron_rl.rewards.tags import generator_format, step_texts
from megatron_rl.rewards.verdicts import review

SOLUTION = "<think>\n<step>a</step>\n<step>b</step>\n<step>c</step>\n</think>\n<answer>\\boxed{7}</answer>"
BLOCKS = (
    "<step>Step 1 Analysis: x \\boxed{CORRECT}</step>\n<step>y \\boxed{CORRECT}</step>\n"
    "<step>z \\boxed{INCORRECT}</step>\n"
)
STEPS = f"<step_verification>\n{BLOCKS}</step_verification>\n"
WRONG = "<final_verification>\\boxed{INCORRECT}</final_verification>"
CORRECT = "<final_verification>\\boxed{CORRECT}</final_verification>"
THREE = (1 / 3, 1 / 3, -1 / 3)

# verl/workers/verifier_worker.py: VerifierActorRolloutWorker.extract_verification_result, one solution (SOLUTION, whose
# answer is wrong) and one verification of it. -> final verdict, correctness reward, format reward, step rewards.
VERIFICATIONS = {
    "as asked": (STEPS + WRONG, False, 1.0, 1.0, THREE),
    "text behind the end": (STEPS + WRONG + "\n\nHuman: and now", False, 1.0, 0.0, THREE),
    "text before the start": ("Sure!\n" + STEPS + WRONG, False, 1.0, 0.0, THREE),
    "the whole twice": (STEPS + WRONG + "\n" + STEPS + WRONG, False, 1.0, 1.0, THREE),
    "two final sections, the first agrees": (STEPS + WRONG + CORRECT, False, 1.0, 1.0, THREE),
    "two final sections, the second agrees": (STEPS + CORRECT + WRONG, True, 0.0, 1.0, THREE),
    "the first final section is no verdict": (
        STEPS + "<final_verification>no</final_verification>" + WRONG, False, 1.0, 0.2, THREE,
    ),
    "no opening tag of the steps": (BLOCKS + "</step_verification>\n" + WRONG, False, 1.0, 0.0, ()),
    "no closing tag of the steps": ("<step_verification>\n" + BLOCKS + WRONG, False, 1.0, 0.0, ()),
    "cut behind the last step": ("<step_verification>\n" + BLOCKS, None, 0.0, 0.0, ()),
    "cut behind the steps": (STEPS, None, 0.0, 0.0, THREE),
    "no final closing tag": (STEPS + WRONG[:-22], None, 0.0, 0.0, THREE),
    "a reason in the final section": (
        STEPS + "<final_verification>So \\boxed{INCORRECT}</final_verification>", None, 0.0, 0.0, THREE,
    ),
    "a full stop": (STEPS.replace("}</", "}. </") + WRONG.replace("}</", "}.\n</"), False, 1.0, 1.0, THREE),
    "box, lower case": (STEPS + "<FINAL_verification>\\box{incorrect}</final_verification>", False, 1.0, 0.0, THREE),
    "a step without verdict": (STEPS.replace("y \\boxed{CORRECT}", "y") + WRONG, False, 1.0, 0.2, ()),
    "text between steps": (STEPS.replace("</step>\n<", "</step> and <") + WRONG, False, 1.0, 0.6, THREE),
    "a verdict behind an unopened step": (
        STEPS.replace("<step>y", "y") + WRONG, False, 1.0, 0.0, (),
    ),
    "a step reopened": (STEPS.replace("y \\boxed", "y <step> \\boxed") + WRONG, False, 1.0, 1.0, THREE),
}  # fmt: skip

# verl/utils/reward_score/format.py: generator_format_reward. -> the release's score, ours.
SOLUTIONS = {
    SOLUTION: (1.0, 1.0),
    SOLUTION.replace("<step>b</step>\n", ""): (0.6, 0.6),
    SOLUTION.replace("\\boxed{7}", "7"): (0.2, 0.2),
    SOLUTION.replace("\\boxed{7}", "\\boxed{7}."): (0.2, 0.2),
    SOLUTION.replace("\\boxed{7}", "\\boxed{}"): (0.2, 0.2),
    SOLUTION.replace("\\boxed{7}", "\\boxed{7} \\boxed{8}"): (1.0, 0.2),
    SOLUTION.replace("step>", "Step>"): (0.2, 0.2),
    SOLUTION[: SOLUTION.index("</answer>")]: (0.0, 0.0),
}


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_a_verification_is_read_and_rewarded_as_the_release_does(name):
    text, final, agrees, form, steps = VERIFICATIONS[name]
    num_steps = len(step_texts(SOLUTION))
    got = review(text, num_steps=num_steps, correct=False, generator_format=generator_format(SOLUTION))
    assert (got.final, float(got.agrees), got.format) == (final, agrees, form)
    assert got.reward == pytest.approx(agrees + 0.8 * form)
    # A verification with another number of verdicts than steps gives no step rewards.
    rewards = step_rewards(list(got.verdicts), num_steps)
    assert ([] if rewards is None else list(rewards)) == pytest.approx(list(steps))


@pytest.mark.parametrize("text", SOLUTIONS)
def test_the_format_of_a_solution(text):
    assert generator_format(text) == SOLUTIONS[text][1]
