"""Tango's settings beside the paper's: which solutions are verified, and which tokens a verdict counts for."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from test_recipes import (
    PAPER,
    TOKENIZER,
    context_of,
    iteration,
    paper_generator,
    paper_verifier,
    per_token,
    problems,
    roll_out,
    segments,
    solution,
    steps_of,
    texts,
    verification,
)
from toys import graded

from megatron_rl.algorithms.advantages import StepCredit, assign_advantages, step_rewards
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.recipes.tango import Tango
from megatron_rl.texts.tags import boxed
from megatron_rl.types import STEP, Outcome

__all__ = ["texts"]  # a fixture

OWN = StepCredit(span="own", baseline="step")
# Answers of three solutions of each of three problems: some right, none right, all right.
ANSWERS = (("yes", "no", "no"), ("no", "no", "no"), ("yes", "yes", "yes"))


def generator(prompt, i, j, sampling):
    return solution(2, ANSWERS[i][j])


def verifier(prompt, i, j, sampling):
    """Every second solution that is asked about has a wrong step."""
    return verification("+-" if i % 2 else "++", "-")


@pytest.mark.parametrize(
    ("reviewed", "asked"), [("all", ["0", "1", "2"]), ("undecided", ["1", "2"]), ("failed", ["1"])]
)
def test_groups_with_a_signal_of_their_own_are_not_verified(texts, reviewed, asked):
    context = context_of(generator, verifier)
    recipe = Tango(group_size=3, reviewed=reviewed, alpha_start=1.0, alpha_min=1.0, **texts)
    rollouts, metrics = roll_out(recipe, "generator", 3, context)
    questions = [TOKENIZER.decode(tokens).split()[1] for tokens, _ in context.engines["verifier"].asked]
    assert sorted(questions) == sorted(asked * 3)
    assert (metrics["reviews_skipped"], metrics["reviews_dropped"]) == (9 - 3 * len(asked), 0)
    outcome = assign_advantages(rollouts, reward="outcome")
    for rollout, bare in zip(rollouts, outcome, strict=True):
        verified = rollout.payload["question"] in asked
        assert ("verdicts" in rollout.payload) == verified
        if not verified:  # its own outcome is all that it learns from, and alpha does not weaken it
            assert per_token(rollout) == pytest.approx(per_token(bare), abs=1e-6)
    assert any(per_token(rollouts[3]))  # problem 1 has no outcome signal, and learns from its verdicts


def test_twins_outcomes_that_differ_by_a_rounding_error_are_verified_as_those_without_signal(texts):
    """0.1 + 0.2 and 0.3 train nothing, and were not reviewed either."""
    rewards = {"yes": 0.1 + 0.2, "no": 0.3}
    grade = graded(lambda response, payload: rewards[boxed(response)])
    context = context_of(generator, verifier, grade=grade)
    recipe = Tango(group_size=3, reviewed="undecided", alpha_start=1.0, alpha_min=1.0, **texts)
    rollouts, metrics = roll_out(recipe, "generator", 1, context)
    assert metrics["reviews_skipped"] == 0 and all("verdicts" in rollout.payload for rollout in rollouts)


def test_nothing_is_verified_while_outcomes_say_enough(texts):
    """Two of three groups have no outcome signal: the moving share is 0, 0.2 / 3, and so on towards 1 / 3."""
    recipe = Tango(group_size=3, reviewed="failed", review_below=0.11, alpha_start=1.0, alpha_min=1.0, **texts)
    shares, asked = [], []
    for _ in range(4):
        context = context_of(generator, verifier)
        rollouts, metrics = roll_out(recipe, "generator", 3, context)
        shares.append(metrics["signal"])
        asked.append(len(context.engines["verifier"].asked))
    assert shares == pytest.approx([0.0, 1 / 15, 0.12, 0.8 * 0.12 + 0.2 / 3], abs=1e-9)
    assert asked == [3, 3, 0, 0] and metrics["reviews_skipped"] == 9
    for rollout, bare in zip(rollouts, assign_advantages(rollouts, reward="outcome"), strict=True):
        assert per_token(rollout) == pytest.approx(per_token(bare), abs=1e-6), "the last iteration is GRPO's"
    again = Tango(group_size=3, review_below=0.11, **texts)
    again.load_state_dict(json.loads(json.dumps(recipe.state_dict())))
    assert again.state_dict() == recipe.state_dict()
    context = context_of(generator, verifier)
    roll_out(recipe, "verifier", 3, context)
    assert context.engines["verifier"].asked, "the verifier's own iteration goes on"


def test_a_verifier_rests_while_outcomes_say_enough_and_no_longer(texts):
    args = {"group_size": 3, "verifications": 2, "reviewed": "failed", "review_below": 0.19, **texts}
    recipe = Tango(verifier_rests=True, **args)
    rests, asked = [], []
    for differ in (False, False, True, True, False, False, False, False):
        own = context_of(lambda p, i, j, s, d=differ: solution(2, "yes" if d and j else "no"), verifier)
        roll_out(recipe, "generator", 3, own)
        context = context_of(generator, verifier)
        rollouts, metrics = roll_out(recipe, "verifier", 3, context)
        rests.append(metrics["rests"])
        asked.append(len(context.engines["verifier"].asked))
        assert bool(rollouts) == bool(asked[-1])
    assert rests == [0, 0, 1, 1, 1, 1, 0, 0], "the moving share is 0, 0, 0.2, 0.36, 0.288, 0.230, 0.184, 0.147"
    assert [bool(count) for count in asked] == [not rest for rest in rests]
    with pytest.raises(ConfigError, match="review_below"):
        Tango(verifier_rests=True, **texts)


class NoProblems:
    """A source that gives none."""

    def take(self):
        raise AssertionError("an iteration without work takes no problems: the next iteration is to have them")


def test_an_iteration_of_a_verifier_that_rests_takes_no_problems_also_after_a_resume(texts):
    args = {"group_size": 3, "reviewed": "failed", "review_below": 0.1, "verifier_rests": True, **texts}
    recipe, resumed = Tango(**args), Tango(**args)
    roll_out(recipe, "generator", 3, context_of(lambda p, i, j, s: solution(2, "yes" if j else "no"), verifier))
    resumed.load_state_dict(json.loads(json.dumps(recipe.state_dict())))
    for each in (recipe, resumed):
        context = context_of(generator, verifier)
        assert each.rollout(iteration("verifier"), NoProblems(), context) == {"verifier": []}
        assert not context.engines["verifier"].asked and context.metrics["verifier"] == {"rests": 1.0}
    with pytest.raises(AssertionError, match="takes no problems"):
        Tango(**args).rollout(iteration("verifier"), NoProblems(), context_of(generator, verifier))


def test_the_papers_settings_verify_however_much_outcomes_say(texts):
    recipe = Tango(group_size=3, **texts)
    for _ in range(3):
        context = context_of(lambda p, i, j, s: solution(2, "yes" if j else "no"), verifier)
        roll_out(recipe, "generator", 3, context)
        assert len(context.engines["verifier"].asked) == 9


def test_a_group_that_lacks_solutions_is_decided_on_when_all_are_known(texts):
    """Two of three solutions could not be graded, and the third failed: it is verified."""
    kinds = itertools.chain([Outcome.SCORE], itertools.repeat(Outcome.ERROR))
    context = context_of(
        lambda *_: solution(2, "no"),
        verifier,
        grade=lambda texts, payloads: [
            replace(one, outcome=next(kinds)) for one in graded(lambda *_: 0.0)(texts, payloads)
        ],
    )
    rollouts, metrics = roll_out(Tango(group_size=3, reviewed="failed", **texts), "generator", 1, context)
    assert len(rollouts) == 1 and "verdicts" in rollouts[0].payload and metrics["reviews_skipped"] == 0


def test_the_verifiers_own_iteration_verifies_every_solution(texts):
    context = context_of(lambda p, i, j, s: solution(2, "yes"), verifier)
    rollouts, _ = roll_out(Tango(reviewed="failed", verifications=2, **texts), "verifier", 3, context)
    assert len(rollouts) == 6


def test_a_step_is_compared_with_the_same_step_of_the_other_solutions(texts):
    """Re-derived by loops from the verdicts of the paper's worked example: ++++, +-, ++--."""
    recipe = Tango(group_size=3, step_credit=OWN, alpha_start=1.0, alpha_min=1.0, **texts)
    rollouts, _ = roll_out(recipe, "generator", 1, context_of(paper_generator, paper_verifier))
    signs = [[1.0 if v == "+" else -1.0 for v in verdicts] for verdicts, _ in PAPER]
    for rollout, own in zip(rollouts, signs, strict=True):
        expected = []
        for k, value in enumerate(own):
            others = np.array([other[k] for other in signs if k < len(other)])
            expected.append((value - others.mean()) / (others.std(ddof=1) + 1e-6))
        assert segments(rollout) == pytest.approx([*expected, 0.0], abs=1e-4)
        assert rollout.annotations_of(STEP).scores.tolist() == own, "not divided by the number of steps"


def test_rewards_of_own_steps_are_not_divided_by_their_number():
    longest = step_rewards([True, False, True], 3, credit=OWN)
    assert longest.tolist() == [1.0, -1.0, 1.0]


def test_a_step_that_stands_alone_gets_no_credit(texts):
    def some(prompt, i, j, sampling):
        return solution(3 if j == 0 else 1, "no")

    def said(prompt, i, j, sampling):
        return verification("+++" if "#3" in prompt else "-", "-")

    recipe = Tango(group_size=3, step_credit=OWN, alpha_start=1.0, alpha_min=1.0, **texts)
    rollouts, _ = roll_out(recipe, "generator", 1, context_of(some, said))
    assert segments(rollouts[0])[1:] == [0.0, 0.0, 0.0] and segments(rollouts[0])[0] > 0


def test_the_tokens_of_a_step_get_its_own_verdict_alone(texts):
    """span own with the paper's baseline: the same comparison, without the sum over later steps."""
    credit = StepCredit(span="own", baseline="group")
    recipe = Tango(group_size=3, step_credit=credit, alpha_start=1.0, alpha_min=1.0, **texts)
    rollouts, _ = roll_out(recipe, "generator", 1, context_of(paper_generator, paper_verifier))
    signs = np.array([1.0 if v == "+" else -1.0 for verdicts, _ in PAPER for v in verdicts])
    z = (signs - signs.mean()) / (signs.std(ddof=1) + 1e-6)
    assert segments(rollouts[1]) == pytest.approx([z[4], z[5], 0.0], abs=1e-4)
    between = steps_of(rollouts[1])[0][1]
    assert per_token(rollouts[1])[between] == pytest.approx(z[5], abs=1e-4), "what leads to a step belongs to it"


def test_alpha_may_be_one_number_for_each_rollout(texts):
    rollouts, _ = roll_out(Tango(group_size=3, **texts), "generator", 1, context_of(paper_generator, paper_verifier))
    bare = assign_advantages(rollouts, reward="outcome")
    mixed = assign_advantages(rollouts, reward="outcome", alpha=[0.0, 0.1, 1.0])
    whole = assign_advantages(rollouts, reward="outcome", alpha=1.0)
    assert per_token(mixed[0]) == pytest.approx(per_token(bare[0]), abs=1e-6)
    assert per_token(mixed[1]) == per_token(rollouts[1]) and per_token(mixed[2]) == per_token(whole[2])
    with pytest.raises(ValueError, match="2 alphas for 3 rollouts"):
        assign_advantages(rollouts, reward="outcome", alpha=[0.1, 0.1])
    with pytest.raises(ValueError, match="alpha = 1.5"):
        assign_advantages(rollouts, reward="outcome", alpha=[0.1, 0.1, 1.5])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"reviewed": "some"}, "reviewed.*some"),
        ({"step_credit": {"span": "all"}}, "span.*all"),
        ({"step_credit": {"spam": "own"}}, "spam"),
    ],
)
def test_settings_that_cannot_be_are_refused(args, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build(Use(target="megatron_rl.recipes.tango:Tango", args=args))


def test_the_defaults_are_the_papers():
    paper = Tango()
    assert (paper.reviewed, paper.step_credit, paper.alpha_start, paper.alpha_min) == ("all", StepCredit(), 0.1, 1e-3)


def test_verdicts_on_a_generators_iteration_can_be_the_likeliest(texts):
    """The verifier's own iteration draws by chance all the same: its verifications must differ to be compared."""
    temperatures = {}
    for role in ("generator", "verifier"):
        context = context_of(paper_generator, paper_verifier)
        roll_out(Tango(group_size=3, verifications=2, greedy_verdicts=True, **texts), role, 1, context)
        temperatures[role] = {sampling.temperature for _, sampling in context.engines["verifier"].asked}
        assert {sampling.temperature for _, sampling in context.engines["generator"].asked} == {1.0}
    assert temperatures == {"generator": {0.0}, "verifier": {1.0}}


def test_a_verification_that_does_not_match_the_steps_does_not_count(texts):
    recipe = Tango(group_size=2, step_credit=OWN, **texts)
    context = context_of(lambda p, i, j, s: solution(3, "no"), lambda p, i, j, s: verification("++", "-"))
    rollouts, _ = roll_out(recipe, "generator", 1, context)
    assert [r.annotations_of(STEP).scores for r in rollouts] == [None, None]
    assert [r.payload["verdicts"] for r in rollouts] == [[True, True]] * 2, "the verdicts are kept"


def test_a_solution_too_long_to_verify_has_no_confidence(texts):
    """It is never chosen by best_of_n before one that the verifier calls wrong."""
    recipe = Tango(balanced_per_class=0, **texts)
    long = lambda prompt, i, j, sampling: solution(200 if i == 0 else 2, "yes")  # noqa: E731
    context = context_of(long, lambda *_: verification("++", "+"), verifier_limit=300)
    recipe.evaluate(problems(3), context)
    found = [(row["confidence"], bool(row["verification"])) for own in context.answers["generator"] for row in own]
    assert found == [(0.0, False), (1.0, True), (1.0, True)]
