"""What a run does before its first iteration: weights to the engines, checks of the reward and of the log-probs."""

from __future__ import annotations

import pytest
from loops import Log, Questions, graded, make, train

from megatron_rl.config.schema import Preflight, Reward
from megatron_rl.training.loop import Plan
from megatron_rl.training.preflight import PreflightFailure, PreflightPlan, check_reward, check_rewards
from megatron_rl.training.progress import NothingTrained
from megatron_rl.types import SOURCE, Prompt

ALIKE = graded(lambda response, payload: 1.0)


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("?{question}\n")
    return str(path)


def plan(iterations):
    own = Preflight(num_prompts=4)
    checks = PreflightPlan(settings=own, prompts=Questions().take(4), reward=Reward(wrong_answer="z"))
    return Plan(iterations=iterations, save_every=1, preflight=checks)


def parts(made, plan):
    setup, progress = made
    return setup, plan, progress


def test_a_resumed_run_checks_again_but_reports_the_checks_of_its_start_alone(template, tmp_path):
    first, later = Log(), Log()
    train(*parts(make(template, first, tmp_path / "iterations"), plan(1)))
    state = first.saved[1]["state"]
    train(*parts(make(template, later, tmp_path / "iterations", state=state), plan(2)))
    assert first.series("preflight/reward_correct", "preflight") == [1.0]
    assert later.series("entropy") and not any(scope == "preflight" for _, _, scope, _ in later.lines)
    resumed = make(template, later, tmp_path / "iterations", state=state, grade=ALIKE)
    with pytest.raises(PreflightFailure, match="known wrong answers"):
        train(*parts(resumed, plan(2)))


def test_a_run_without_iterations_says_which_settings_to_raise(template, tmp_path):
    with pytest.raises(NothingTrained, match=r"0 iterations: set run\.iterations or the recipe's updates above 0"):
        train(*parts(make(template, Log(), tmp_path / "iterations"), plan(0)))


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (1.0, 3.0), (-2.0, -1.0)])
@pytest.mark.parametrize(
    ("correct", "wrong", "refused"),
    [(0.75, 0.25, ""), (1.0, 0.0, ""), (0.74, 0.0, "correct"), (1.0, 0.26, "wrong"), (0.0, 1.0, "correct")],
)
def test_known_answers_get_scores_in_the_upper_and_the_lower_quarter_of_the_range(bounds, correct, wrong, refused):
    def scaled(share):
        return bounds[0] + share * (bounds[1] - bounds[0])

    grade = graded(lambda response, payload: scaled(correct if response == payload["answer"] else wrong))
    prompts = [Prompt(id="0", tokens=[1], payload={"question": "2 + 2", "answer": "4"})]
    if refused:
        with pytest.raises(PreflightFailure, match=f"1 known {refused} answers"):
            check_reward(grade, prompts, "5", "{answer}", bounds=bounds)
    else:
        found = check_reward(grade, prompts, "5", "{answer}", bounds=bounds)
        assert found == {"preflight/reward_correct": scaled(correct), "preflight/reward_wrong": scaled(wrong)}


def test_each_source_reports_the_scores_of_its_known_answers_under_its_name():
    rows = {"sums": ("4", "5"), "words": ("four", "z")}
    prompts = [
        Prompt(id=source, tokens=[1], payload={"question": "2 + 2", "answer": answer, SOURCE: source})
        for source, (answer, _) in rows.items()
    ]
    rewards = {source: Reward(wrong_answer=wrong) for source, (_, wrong) in rows.items()}
    checks = PreflightPlan(settings=Preflight(), prompts=prompts, rewards=rewards)
    metrics = check_rewards(graded(lambda response, payload: 1.0 if payload["answer"] in response else 0.25), checks)
    assert metrics == {f"preflight/reward_correct/{source}": 1.0 for source in rows} | {
        f"preflight/reward_wrong/{source}": 0.25 for source in rows
    }
