"""One name for one metric: training's evaluations, `eval`, reports and data frames, against each other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_environments_rewards import agents
from test_environments_rewards import context_of as episode_context
from test_environments_rewards import problems as tasks
from test_recipes import says
from toys import characters, graded

from megatron_rl.api.callbacks import Callback, RunState, take_event
from megatron_rl.api.result import read_result
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.data.problems import Problem
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.answer_values import answer_values
from megatron_rl.evaluation.completions import grade_file
from megatron_rl.evaluation.draw import ProblemSet
from megatron_rl.evaluation.solve import Solver
from megatron_rl.recipes.answers import accuracies, answers_of
from megatron_rl.report.curves import thin, thin_clock
from megatron_rl.report.reading import read_run
from megatron_rl.report.run_comparison import arms, runs_table
from megatron_rl.run.console import headline
from megatron_rl.run.metric_sinks import Prometheus
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Outcome, Prompt

TOKENIZER = characters()
# What is answered to each of five problems, and the scores of these answers: 0.2 is no right answer, "e" has no score.
SCORES = {"a": 1.0, "b": 0.2, "c": 0.2, "d": 0.8, "e": Outcome.ERROR}
rule = graded(lambda response, payload: SCORES[response])


def answers():
    return says(lambda prompt, i, j, sampling: prompt)


def prompts():
    return [Prompt(id=text, tokens=TOKENIZER(text)["input_ids"], payload={"question": text}) for text in SCORES]


def by_training():
    """The metrics of an evaluation in a run."""
    context = RolloutContext(
        engines={"g": answers()}, tokenizers={"g": TOKENIZER}, samplings={"g": Sampling(max_tokens=9)},
        max_prompt_tokens={"g": 99}, grade=rule,
    )  # fmt: skip
    return accuracies(context, "g", prompts())[0]


def by_eval():
    """The metrics of `megatron-rl eval` and of Trainer.evaluate, which calls it."""
    asked = prompts()
    problems = [Problem(row=i, values={"question": p.id}) for i, p in enumerate(asked)]
    own = ProblemSet(name="s", title="s", problems=problems, prompts=[p.tokens for p in asked])
    solver = Solver(engine=answers(), tokenizer=TOKENIZER, sampling=Sampling(max_tokens=9), grade=rule)
    groups = solver(own, range(len(asked)))
    return {name: float(np.mean(values)) for name, values in answer_values(groups, [1]).items()}


def by_completions(tmp_path):
    """The metrics of `megatron-rl eval --completions`."""
    rows = [{"id": i, "answer": "x", "completion": text} for i, text in enumerate(SCORES)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return grade_file(tmp_path / "c.jsonl", tmp_path / "out", rule)


def test_cases_accuracy_and_reward_are_two_metrics_with_one_name_each_everywhere(tmp_path):
    """Training logged the accuracy 0.300, and eval called the mean score 0.440 accuracy."""
    training, evaluation, completions = by_training(), by_eval(), by_completions(tmp_path)
    for name, wanted in {"accuracy": 2 / 5, "reward": 2.2 / 5}.items():
        found = [training[f"g/{name}"], training[f"g/{name}_greedy"], evaluation[name], completions[name]]
        assert found == pytest.approx([wanted] * 4)
    assert training["g/ungraded"] == training["g/ungraded_greedy"] == 1.0


def test_faults_votes_count_right_answers_as_accuracy_does():
    """Of one sample each, maj@n of alike answers was the mean score, and pass@k the share that is right."""
    rows = [[{"score": 0.8, "correct": True, "key": "x", "finished": True, "tokens": 1, "confidence": 1.0}] * 2]
    metrics = answer_values(rows, [2])
    names = ("accuracy", "pass@2", "maj@2", "best_of_2", "vote_of_2")
    assert [metrics[name] for name in names] == [[1.0]] * 5 and metrics["reward"] == [0.8]


def test_votes_of_responses_without_an_extracted_answer_compare_the_responses():
    """Eight equal answers to a reward of the user's own had accuracy 0.125 and maj@8 0."""
    row = {"score": 1.0, "correct": True, "key": None, "finished": True, "tokens": 1}
    rows = [[row | {"response": "ee"}] * 3, [row | {"response": "a", "correct": False}] * 2 + [row | {"response": "b"}]]
    assert answer_values(rows, [])["maj@3"] == [1.0, 0.0]
    # texts that are no numbers, beside a problem whose answers are numbers: maj@3 of the former was 0
    numbers = [row | {"response": text, "key": "7"} for text in ("7", "so 7", "7.0")]
    mixed = [[row | {"response": "!!"}] * 2 + [row | {"response": "0", "key": "0", "correct": False}], numbers]
    assert answer_values(mixed, [])["maj@3"] == [1.0, 1.0]


def test_faults_answers_are_those_of_all_agents_in_every_figure():
    """The console's column said that they were those of an agent."""
    recipe, context = agents({"won": 1.0}), episode_context(0.0)
    assert recipe.play_episodes(context, tasks(2), [0, 1], context.samplings).metrics["answers"] == 2.0, "of two agents"
    metrics = recipe.evaluate(tasks(2), context)
    assert metrics["episodes/answers"] == headline({"answers": 2.0})["answers"] == 2.0


def test_faults_the_outcome_of_episodes_is_called_reward_and_has_its_accuracy():
    recipe, context = agents(name="answers"), episode_context(0.0)
    metrics = recipe.evaluate(tasks(2), context)
    assert {metrics[f"player/{name}_greedy"] for name in ("reward", "accuracy")} == {1.0}
    assert not [name for name in metrics if "outcome" in name]


@pytest.fixture
def run(tmp_path):
    """A run of three iterations in two cycles: evaluated at its start, after the first cycle of two iterations, and at
    its end."""
    directory = RunDirectory(tmp_path / "run")
    with Tracker(directory.metrics) as tracker:
        tracker.log(0, "eval", {"g/accuracy": 0.1}, iteration=0)
        for iteration, cycle in ((0, 0), (1, 0)):
            tracker.log(cycle, "g", {"loss": float(iteration)}, iteration=iteration)
        tracker.log(1, "eval", {"g/accuracy": 0.2}, iteration=2)
        tracker.log(1, "g", {"loss": 2.0}, iteration=2)
        tracker.log(2, "eval", {"g/accuracy": 0.3}, iteration=3)
    directory.config.write_text("run: {name: run}\n")
    return directory


def test_faults_evaluations_stand_at_the_iteration_that_they_measure(run):
    """They stood one iteration too far right: beside the iteration that was collected after them."""
    config = config_files.load(TrainConfig, [], [
        "recipe.target=megatron_rl.recipes.grpo:Grpo", "recipe.args={updates: 1}", "data.path=x",
        "roles={generator: {model: {path: x}}}", f"run.dir={run.path.parent}", "run.name=run",
    ])  # fmt: skip
    history = read_result(config.directory).history
    assert [(row["iteration"], row["cycle"]) for row in history if row["scope"] == "eval"] == [(-1, -1), (1, 0), (2, 1)]
    assert [(row["iteration"], row["cycle"]) for row in history if row["scope"] == "g"] == [(0, 0), (1, 0), (2, 1)]
    state = RunState(run=run.path, iterations=3)
    for row in map(json.loads, run.metrics.read_text().splitlines()):
        event = {"event": "metrics", **{name: row[name] for name in ("iteration", "cycle", "scope", "metrics")}}
        take_event(state, event, [Callback()])
    assert state.history == history and state.cycle == 2
    found = read_run(run.path)
    curve = found.curves["eval", "g/accuracy"]
    assert list(curve.iterations) == [-1, 1, 2] and list(found.clock.iterations) == [-1, 0, 1, 1, 2, 2]
    assert thin(curve, 1)["x"] == [-1, 1, 2] and thin(curve, 4)["x"] == [-1, 0]
    assert thin_clock(found.clock)["iteration"] == [-1, 0, 1, 2] and thin_clock(found.clock)["cycle"] == [0, 1, 1, 2]
    assert "3 iterations so far" in str(runs_table([found], arms([found])))


def test_faults_a_first_evaluation_is_no_iteration(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with Tracker(directory.metrics, [sink := Prometheus("127.0.0.1", 0)]) as tracker:
        tracker.log(0, "eval", {"g/accuracy": 0.1}, iteration=0)
        assert 'megatron_rl_iteration{scope="eval"} 0' in sink.text(), "iterations count from 1 there"
    found = read_run(directory.path)
    assert "not begun" in str(runs_table([found], arms([found])))
    assert thin_clock(found.clock) == {"iteration": [-1], "cycle": [0], "hours": [0.0]}


def test_an_answer_without_a_score_is_empty_wrong_and_unfinished():
    [[answer]] = answers_of([Prompt(id=7, tokens=[1], payload={"question": "2 + 2", "answer": 4, "level": 1})], {}, 1)
    assert answer == {
        "id": 0, "row": 7, "sample": 0, "question": "2 + 2", "answer": "4", "response": "", "score": 0.0,
        "correct": False, "outcome": Outcome.ERROR.value, "key": None, "finished": False, "tokens": 0,
    }  # fmt: skip
