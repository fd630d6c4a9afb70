"""A reward that compares a response with the model's own majority vote says nothing about the known answer."""

from __future__ import annotations

import pytest
from scripted_rollouts import context_of
from test_report_signs import CONFIG, wrong_run
from toys import graded

from megatron_rl.config.schema import Rollouts
from megatron_rl.contrib.hacpo import Hacpo
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.solutions import solve
from megatron_rl.report.reading import read_run
from megatron_rl.report.shown_rollouts import pick, rollout_is_correct
from megatron_rl.texts.tags import boxed
from megatron_rl.training.rollouts import measure
from megatron_rl.types import SOURCE, Prompt

AGREES = graded(lambda response, payload: boxed(response) == payload["answer"])


def solved(*, voted: bool):
    """Returns four solutions: three say 3 and one says 4, which is the known answer."""
    context = context_of(lambda text, j, sampling: rf"\boxed{{{4 if j == 0 else 3}}}", grade=AGREES)
    prompt = Prompt(id="0/0", tokens=[1], payload={"question": "q", "answer": "4", SOURCE: "math"})
    solutions, metrics = solve(context, "generator", [prompt], Sampling(max_tokens=50, n=4), voted=voted)
    return [solution.rollout for solution in solutions], metrics


def test_agreement_with_votes_is_not_logged_as_accuracy():
    rollouts, metrics = solved(voted=True)
    found = measure(rollouts)
    assert found["reward/outcome/math"] == metrics["votes/share"] == 0.75 and metrics["votes/labels_right"] == 0.0
    assert "accuracy/math" not in found
    assert measure(solved(voted=False)[0])["accuracy/math"] == 0.25


@pytest.mark.parametrize(("labels", "correct"), [("votes", None), ("known", True)])
def test_a_report_does_not_mark_agreement_with_votes_as_correct(tmp_path, labels, correct):
    run = read_run(wrong_run(tmp_path, config=f"{CONFIG}rollouts: {{labels: {labels}}}\n"))
    assert rollout_is_correct({"correct": None, "rewards": {"outcome": 1.0}}, run.record.threshold()) is correct
    assert bool(pick([run.record]).correct) is bool(correct)


def test_two_models_never_elect_two_labels_of_one_group():
    assert Rollouts(labels="votes").labels == "votes" and not Hacpo.allows_votes
