"""Where the scale of a reward is unknown there is no accuracy, and whatever rests on correct answers is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bad_rewards import big, share
from test_faults_cut_off import completion
from test_faults_replaced import context_of, problems
from test_report_signs import told, wrong_run

from megatron_rl.algorithms.estimators import w_reinforce
from megatron_rl.api.data_files import reward_settings
from megatron_rl.commands.offline import grade_completions
from megatron_rl.config import files as config_files
from megatron_rl.config.evaluation import NO_SCALE
from megatron_rl.config.schema import ConfigError, EvalConfig, GenerateConfig, GradingConfig, Reward, TrainConfig
from megatron_rl.data.problems import Problem
from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.draw import ProblemSet
from megatron_rl.evaluation.samples import Samples
from megatron_rl.evaluation.set_metrics import metrics_of
from megatron_rl.evaluation.solve import SOLVE, answer_of, sample_of
from megatron_rl.recipes.answers import accuracies
from megatron_rl.recipes.solutions import solve
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.session.run_record import RunRecord
from megatron_rl.spec.explain import explain_recipe
from megatron_rl.spec.resolve import resolve
from megatron_rl.training.rollouts import measure
from megatron_rl.types import SOURCE, Outcome, is_correct


def pool_of(function, directory, **settings):
    section, _ = reward_settings(function, directory)
    return GradePool(Reward(**section, workers=1, **settings))


def evaluated(pool, *answers):
    """The metrics of an evaluation in a run whose answers to problems a, b, c are `answers`."""
    texts = dict(zip("abc", answers, strict=True))
    context = context_of(lambda q, rng, s: texts[q], pool.grade, threshold=pool.reward.threshold)
    return accuracies(context, "generator", problems(*"abc"))[0]


def test_cases_a_reward_of_another_scale_has_no_accuracy(tmp_path):
    """A random model had accuracy 1.0: every score was above 0.5."""
    with pool_of(big, tmp_path) as pool:
        metrics = evaluated(pool, "xxx", "", "right")
        assert metrics["generator/reward"] == pytest.approx((1.3 + 1.0 + 100) / 3)
        assert not [name for name in metrics if "accuracy" in name or "pass@" in name]
        graded = pool.grade(["xxx", "right"], [{}] * 2)
    with pool_of(big, tmp_path, range=(0.0, 100.0)) as pool:
        assert evaluated(pool, "xxx", "", "right")["generator/accuracy"] == pytest.approx(1 / 3)
    own = ProblemSet(name="s", title="s", problems=[Problem(row=i, values={}) for i in range(2)], prompts=[[1]] * 2)
    samples = Samples(None, "")
    samples.add([sample_of(own, i, 0, SOLVE) | answer_of("x", completion(), g)] for i, g in enumerate(graded))
    assert {*metrics_of(samples, "s", "s", SOLVE, ks=[1], seed=0).metrics} == {"reward", "finished", "tokens"}


def test_faults_scores_from_0_to_1_have_an_accuracy_without_a_range(tmp_path):
    with pool_of(share, tmp_path) as pool:
        assert evaluated(pool, "right", "half", "")["generator/accuracy"] == pytest.approx(1 / 3)


def test_faults_one_rule_says_what_is_correct():
    assert [is_correct(score, None) for score in (-0.1, 0.0, 0.5, 0.6, 1.0, 1.8)] == [
        None,
        False,
        False,
        True,
        True,
        None,
    ]
    assert [is_correct(score, 50.0) for score in (1.8, 50.0, 100.0)] == [False, False, True]


def test_faults_a_range_of_0_to_1_can_be_declared_for_a_sum(tmp_path):
    """The range [0, 1] was taken for none at all."""
    with pool_of(big, tmp_path, range=(0.0, 1.0)) as pool:
        (beyond,) = pool.grade(["right"], [{}])
    assert beyond.outcome is Outcome.ERROR and "100 is outside of reward.range = [0, 1]" in beyond.detail


def test_faults_the_accuracy_of_a_source_is_left_out_where_the_scale_is_unknown(tmp_path):
    with pool_of(big, tmp_path) as pool:
        context = context_of(lambda q, rng, s: "xxx", pool.grade)
        asked = [replace(prompt, payload={**prompt.payload, SOURCE: "s"}) for prompt in problems("a")]
        solutions, _ = solve(context, "generator", asked, Sampling(max_tokens=50))
    metrics = measure([solution.rollout for solution in solutions])
    assert "accuracy/s" not in metrics and metrics["reward/outcome/s"] == pytest.approx(1.3)


def test_faults_completions_of_another_scale_have_no_accuracy(tmp_path, capsys):
    rows = [{"id": i, "answer": "x", "completion": text} for i, text in enumerate(("right", "xxx"))]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section, _ = reward_settings(big, tmp_path)
    config = GradingConfig(reward=Reward(**section, workers=1))
    assert grade_completions(config, tmp_path / "c.jsonl", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert f"no accuracy: {NO_SCALE}" in said and "reward       50.65" in said
    assert "accuracy" not in json.loads((tmp_path / "out/summary.json").read_text())


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    place = tmp_path_factory.mktemp("scale")
    write_tiny_model(place / "model")
    (place / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "1", "solution": "s"}) + "\n")
    section, _ = reward_settings([big, "megatron_rl.rewards.math_answer:grade"], place)
    (place / "reward.yaml").write_text(config_files.dump_tree({"reward": section}))
    words = [f"data.path={place}/rows.jsonl", f"evaluation.sets=[{{path: {place}/rows.jsonl}}]", "evaluation.every=1"]
    return place / "reward.yaml", [*words, f"roles.generator.model.path={place}/model"]


def spec_of(words, *more):
    file, settings = words
    more = [*more] if "recipe.target=tango" in more else ["recipe.target=dapo", "recipe.args.updates=1", *more]
    return resolve(config_files.load(TrainConfig, [file], [*settings, *more]), 1)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["recipe.args.curriculum={}"], "recipe.args.curriculum needs to know which answers are correct"),
        (["recipe.args.length_reward={}"], "recipe.args.length_reward needs"),
        (["recipe.args.hints={}", "data.fields.solution=solution"], "recipe.args.hints needs"),
        (["recipe.args.estimator=w_reinforce"], "recipe.args.estimator needs"),
        (["recipe.target=tango", "roles.verifier.model.path=${roles.generator.model.path}"], "Tango's verifier needs"),
        (["evaluation.best.metric=generator/accuracy"], "or name generator/reward as the metric"),
        (["evaluation.early_stop.metric=generator/pass@1_greedy"], "or name generator/reward as the metric"),
    ],
)
def test_faults_what_rests_on_correct_answers_is_refused_without_a_scale(words, more, part):
    with pytest.raises(ConfigError, match=f"reward.range is not set(.|\n)*{part}"):
        spec_of(words, *more)


def test_twins_correct_to_an_estimator_is_correct_to_the_metrics(words):
    """w_reinforce has a threshold of its own, because estimators get rewards alone. Where 0.5 is not the middle of the
    scale, also of a source's, the run is refused."""
    file, (place, *settings) = words
    estimator, path = "recipe.args.estimator=w_reinforce", place.partition("=")[2]
    source = f"{{path: {path}, reward: {{target: 'megatron_rl.rewards.math_answer:grade', range: [-1, 1]}}}}"
    with pytest.raises(ConfigError, match="reward.range = .* by scores above 0.5; scale the reward"):
        spec_of(words, estimator, "reward.range=[-1,1]")
    with pytest.raises(ConfigError, match="all rewards of a run have the same range"):
        spec_of((file, settings), estimator, "reward.range=[0,1]", f"data.sources={{a: {source}}}")
    scores, threshold = np.array([0.0, 0.2, 0.5, 0.51, 1.0]), Reward().threshold
    correct = [is_correct(score, threshold) for score in scores]
    assert (w_reinforce(scores, np.zeros(5, np.int64), np.ones(5)) > 0).tolist() == correct


def test_faults_a_run_without_a_scale_says_so_at_its_start(words):
    assert any(NO_SCALE in line for line in explain_recipe(spec_of(words)))
    declared = spec_of(
        words, "reward.range=[0,101]", "recipe.args.curriculum={}", "evaluation.best.metric=generator/accuracy"
    )
    assert not any(NO_SCALE in line for line in explain_recipe(declared))


def test_faults_generate_sets_wrong_answers_aside_by_a_declared_scale_alone(words, tmp_path):
    section, _ = reward_settings(big, tmp_path)
    tree = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "output": str(tmp_path / "out"), "reward": section}
    with pytest.raises(ConfigError, match="reward.range is not set.*so that wrong answers can be set aside"):
        config_files.load(GenerateConfig, trees=[("t", tree)])
    config_files.load(GenerateConfig, trees=[("t", {**tree, "reward": {**section, "range": [1, 100]}})])


def test_faults_eval_takes_the_range_that_the_message_asks_for():
    """An evaluation refused every other range, and named Trainer.evaluate, which refused it, too."""
    words = ["model.path=m", "sets=[{path: d.jsonl}]", "reward.range=[0.0, 100.0]"]
    assert config_files.load(EvalConfig, [], words).reward.threshold == 50.0


def test_faults_the_report_says_that_there_is_no_accuracy(tmp_path):
    run = wrong_run(tmp_path, **{"held out": (0.1, 0.6)})
    assert RunRecord(run).threshold() == 0.5 and not any(NO_SCALE in sign for sign in told(run))
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"] = {name: value for name, value in line["metrics"].items() if "accuracy" not in name}
    (Path(run) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (Path(run) / "config.yaml").write_text(
        "reward: {target: megatron_rl.rewards.reward_functions:RewardFunctions, args: {functions: []}}\n"
    )
    assert RunRecord(run).threshold() is None and any(NO_SCALE in sign for sign in told(run))
