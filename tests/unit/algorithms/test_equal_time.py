"""The comparison at equal time: what its arms are, and how the time of a run is counted."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import specs as config_checks
from test_recipes import context_of, per_token, roll_out, segments, solution, texts

from examples.studies.equal_time.arms import LEAN
from examples.studies.equal_time.majority import MajorityGrpo, with_majority
from examples.studies.equal_time.means import DynamicTango, ReusingTango, TrustedTango
from examples.studies.equal_time.own_verdicts import FreeVerdicts, ScoredTango
from examples.studies.equal_time.together import TogetherTango
from megatron_rl.algorithms.advantages import StepCredit, assign_advantages
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import Solution
from megatron_rl.recipes.tango import Tango
from megatron_rl.types import NO_VERSION, STEP, Author, Rollout, spans_of

__all__ = ["texts"]  # a fixture

ROOT = Path(__file__).parents[3]
KINDS = {
    **{"grpo": Grpo, "grpo_32": Grpo, "grpo_dynamic": Dapo, "grpo_majority": MajorityGrpo},
    **{"tango_paper": Tango, "tango_paper_32": Tango, "free_verdicts": FreeVerdicts},
    **{"scored": ScoredTango, "together": TogetherTango, "reusing": ReusingTango, "trusted": TrustedTango},
    **{"dynamic": DynamicTango},
}


@pytest.fixture
def race(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "examples/studies/equal_time"))
    import race

    yield race
    for name in set(sys.modules) - before:  # run and task are names of other examples' files too
        if name in ("race", "run", "task", "compare"):
            del sys.modules[name]


@pytest.mark.parametrize("regime", ["a", "b"])
def test_every_arm_is_a_run_that_check_takes(race, regime, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    verifiers = {arm: Path("runs/last_letter/a/verifier/model") for arm in ["", *race.VERIFIERS]}
    for name, arm in (race.ARMS | race.TRIED).items():
        generator = Path("runs/last_letter") / regime / "generator/model"
        options = argparse.Namespace(regime=regime, verifiers=verifiers, generator=generator)
        file, *settings = race.settings(arm, Path("runs/last_letter") / regime, options, 3, tmp_path / name)
        config = config_files.load(TrainConfig, [file], settings)
        config_checks.check(config, 1)
        recipe = plugins.build(config.recipe)
        assert type(recipe) is KINDS.get(name, Tango) and config.run.seed == 3
        assert config.evaluation.every == arm.evaluate
        lean = arm.config == "tango" and not arm.paper
        assert not lean or (recipe.step_credit, recipe.alpha_min) == (StepCredit(span="own", baseline="step"), 1.0)
        assert recipe.train_verifier == (name not in ("frozen", "free_verdicts")) if "tango" in arm.config else True


WRITER = """
import json, sys, time
def line(scope, **more):
    text = json.dumps({"scope": scope, "time": {}, "metrics": {}, **more}) + "\\n"
    with open(sys.argv[1], "a") as file:
        for part in (text[:20], text[20:]):
            file.write(part)
            file.flush()
            time.sleep(0.1)
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
metrics = {"generator/accuracy": 0.25, "generator/accuracy_greedy": 0.5}
work(0.5); line("preflight"); line("eval", metrics=metrics)
for _ in range(3):
    work(0.4); line("generator", time={"train": 0.1, "rollout": 0.2}, metrics={"tokens": 7.0})
    time.sleep(0.3); work(0.6); time.sleep(0.3)
    line("eval", metrics={**metrics, "generator/accuracy": 0.75})
    time.sleep(0.3)
time.sleep(60)
"""


def test_the_time_of_evaluations_is_left_out_and_a_run_ends_when_its_time_is_over(race, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "metrics.jsonl")])
    try:
        points = race.watch(child, tmp_path / "metrics.jsonl", budget=0.7)
    finally:
        child.kill()
        child.wait()
    assert [point["updates"] for point in points] == [0, 1, 2], "0.8 s of the third are over the 0.7"
    assert points[0]["cpu_s"] == 0.0 and points[1]["cpu_s"] == pytest.approx(0.4, abs=0.2)
    assert (points[2]["seconds"], points[2]["tokens"]) == (pytest.approx(0.6), 14.0)


def test_metrics_between_evaluations_are_on_the_line_between_them(race):
    curve = [(0.0, 0.25), (2.0, 0.25), (4.0, 0.75), (6.0, 0.5)]
    points = [{"cpu_s": cpu_s, "generator/accuracy": accuracy} for cpu_s, accuracy in curve]
    times = (0.0, 1.0, 2.5, 4.0, 5.0, 100.0)
    found = [race.at(points, "generator/accuracy", cpu_s) for cpu_s in times]
    assert found == pytest.approx([0.25, 0.25, 0.375, 0.75, 0.625, 0.5])
    clock = [{**point, "seconds": 2 * point["cpu_s"]} for point in points]
    assert race.reached(clock, 0.5, "seconds") == 6.0
    assert race.reached(points, 0.5) == 3.0 and race.reached(points, 0.2) == 0.0 and race.reached(points, 0.9) is None


def test_a_run_that_is_complete_is_read(race, tmp_path):
    points = [{"cpu_s": 0.0, "generator/accuracy": 0.1}]
    (tmp_path / "grpo_seed0.json").write_text(json.dumps(points))
    assert race.race(race.ARMS["grpo"], tmp_path, argparse.Namespace(), 0, 1.0, tmp_path / "grpo_seed0") == points


def test_the_answer_that_most_give_earns_the_reward_of_the_majority():
    answers = {"a": ["1", "2", "2", "3"], "b": ["1", "2", "3"], "c": [None, None, "7", "7"]}
    solutions = []
    for group, given in answers.items():
        for answer in given:
            text = "nothing" if answer is None else f"<answer>\\boxed{{{answer}}}</answer>"
            spans = spans_of((1, Author.ENVIRONMENT, NO_VERSION), (1, Author.POLICY, 0))
            rollout = Rollout(role="generator", group=group, tokens=range(2), logprobs=[0.0] * 2, spans=spans)
            solutions.append(Solution(rollout=rollout, text=text, correct=True))
    found = [rollout.rewards["majority"] for rollout in with_majority(solutions)]
    assert found == [0.0, 1.0, 1.0, 0.0, *(0.0, 0.0, 0.0), *(0.0, 0.0, 1.0, 1.0)]


def test_true_verdicts_credit_steps_by_their_labels_where_no_solution_is_right(texts):
    """A group that has a correct solution learns from its outcomes alone, as in Tango; nobody is asked to verify."""

    def labels(steps, payload):
        return [k == 0 for k in range(len(steps))]

    def solve(prompt, i, j, sampling):
        return solution(2 if j else 1, "yes" if i == 0 and j == 0 else "no")

    lean = LEAN | {"step_credit": StepCredit(**LEAN["step_credit"]), "verifier_rests": False}
    with pytest.raises(ConfigError, match="step_labels"):
        FreeVerdicts(**texts)
    own = "megatron_rl.contrib.last_letter:step_labels"
    recipe = FreeVerdicts(group_size=3, train_verifier=False, step_labels=own, **lean, **texts)
    recipe._labels = labels
    context = context_of(solve, lambda *_: "")
    rollouts, metrics = roll_out(recipe, "generator", 2, context)
    assert not context.engines["verifier"].asked and metrics["signal"] == 0.0
    outcomes = assign_advantages(rollouts, reward="outcome")
    for rollout, bare in zip(rollouts[:3], outcomes[:3], strict=True):
        assert per_token(rollout) == pytest.approx(per_token(bare), abs=1e-6), "one of them is right"
    assert [r.annotations_of(STEP).scores.tolist() for r in rollouts[3:]] == [[1.0], [1.0, -1.0], [1.0, -1.0]]
    assert all(not any(per_token(r)) for r in rollouts[3:]), "steps of one number are alike"
    recipe._labels = lambda steps, payload: [len(steps) == 1] * len(steps)
    rollouts, _ = roll_out(recipe, "generator", 2, context_of(solve, lambda *_: ""))
    first, second, third = (segments(r)[0] for r in rollouts[3:])
    assert first > 0 > second == third and first == pytest.approx(-2 * second, abs=1e-3)
