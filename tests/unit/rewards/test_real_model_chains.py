"""The labels of examples/studies/real_model: which steps of a chain are true.

Also how its arms are compared at equal time.
"""

import random
import subprocess
import sys

import pytest

from examples.studies.real_model import run
from examples.studies.real_model.chains import solution, step_labels, verification
from megatron_rl.rewards import verdicts
from megatron_rl.rewards.math_answer import grade
from megatron_rl.texts.tags import step_texts

QUESTION = "27 + 5 - 14 ="


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (["27 + 5 = 32", "32 - 14 = 18"], [True, True]),
        (["27 + 5 = 33", "33 - 14 = 19"], [False, True]),  # the second goes on rightly from a wrong number
        (["27 + 5 = 32", "31 - 14 = 17"], [True, False]),
        (["27 - 5 = 22", "22 - 14 = 8"], [False, True]),
        (["27 + 5 = 32", "so it is 18", "18 - 14 = 4"], [True, False, False]),
        (["27 + 5 = 32", "32 - 14 = 18", "18 + 0 = 18"], [True, True, False]),
        ([], []),
    ],
)
def test_a_step_is_true_when_it_holds_and_goes_on_from_the_one_before(steps, wanted):
    assert step_labels(steps, {"question": QUESTION}) == wanted


def test_teachers_without_fault_are_graded_right_and_judged_right():
    text = solution(random.Random(0), QUESTION, 0.0)
    assert step_texts(text) == ["27 + 5 = 32", "32 - 14 = 18"]
    assert grade(text, {"question": QUESTION, "answer": "18"}) == 1.0
    review = verdicts.review(
        verification(text, 0.0, random.Random(0)), num_steps=2, correct=True, generator_format=1.0, gamma=0.8
    )
    assert list(review.verdicts) == [True, True] and review.agrees and review.format == 1.0


def test_a_wrong_step_is_named_by_a_verifier_without_fault():
    rng = random.Random(1)
    text = solution(rng, QUESTION, 1.0)
    labels = step_labels(step_texts(text), {"question": QUESTION})
    assert labels == [False, False]
    review = verdicts.review(verification(text, 0.0, rng), num_steps=2, correct=False, generator_format=1.0, gamma=0.8)
    assert list(review.verdicts) == labels and review.agrees


@pytest.mark.parametrize(("seconds", "wanted"), [(0.0, 0.25), (50.0, 0.375), (100.0, 0.5), (250.0, 0.75), (900.0, 1.0)])
def test_a_metric_at_a_time_lies_between_the_evaluations_around_it(seconds, wanted):
    assert run.at([(0.0, 0.25), (100.0, 0.5), (400.0, 1.0)], seconds) == pytest.approx(wanted)


def test_seconds_before_an_evaluation_are_those_of_generation_and_training(tmp_path):
    lines = [
        '{"iteration": 0, "cycle": 0, "scope": "eval", "time": {"rollout": 9.0}, "metrics": {"a": 0.25}}',
        '{"iteration": 0, "cycle": 0, "scope": "generator", "time": {"train": 5.0, "save": 50.0}, "metrics": {}}',
        '{"iteration": 1, "cycle": 1, "scope": "eval", "time": {"rollout": 9.0}, "metrics": {"a": 0.5}}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert run.curve(tmp_path, "a", "seconds") == [(0.0, 0.25), (5.0, 0.5)]
    assert run.spent(tmp_path, "seconds") == 5.0
    noted = ['{"iteration": 0, "scope": "eval", "cpu_s": 20.0}', '{"iteration": 0, "scope": "generator", "cpu_s": 8.0}']
    (tmp_path / run.CPU).write_text("\n".join(noted) + "\n")
    assert run.curve(tmp_path, "a", "cpu_s") == [(0.0, 0.25), (8.0, 0.5)]
    assert run.spent(tmp_path, "cpu_s") == 8.0


WRITER = """
import sys, time
def line(iteration, scope):
    with open(sys.argv[1], "a") as file:
        file.write('{"iteration": %d, "cycle": 0, "scope": "%s", "time": {}, "metrics": {}}\\n' % (iteration, scope))
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
for iteration in map(int, sys.argv[2:]):
    work(0.3); line(iteration, "generator"); time.sleep(0.3)
"""


def test_an_iteration_that_an_interruption_had_repeated_has_the_cpu_seconds_of_its_first_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LOOK_S", 0.02)
    path, first = tmp_path / "metrics.jsonl", {}
    for iterations in (["0", "1"], ["1", "2"]):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), *iterations])
        run.watch(child, tmp_path)
        first = first or run.costs(tmp_path)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))  # those after the checkpoint are cut
    found = run.costs(tmp_path)
    assert [iteration for iteration, _ in found] == [0, 1, 2] and found[1, "generator"] == first[1, "generator"]
    assert found[2, "generator"] == pytest.approx(0.3, abs=0.15), (
        "the repeated iteration is not counted in the next one"
    )
