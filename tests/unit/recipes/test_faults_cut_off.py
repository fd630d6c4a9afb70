"""No grading that was cut off becomes a score unseen: it is counted, shown, and stops a run where there are many."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from test_faults_replaced import context_of, problems
from test_report_signs import told, wrong_run
from toys import EOS, characters, graded
from written_rewards import grading_by

from megatron_rl.commands.check_trials import _score
from megatron_rl.commands.evaluate import gradings
from megatron_rl.commands.generate import Answered, Asked, _Generation
from megatron_rl.commands.offline import grade_completions
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import GenerateConfig, GradingConfig
from megatron_rl.contrib.proposals import AnswerRule
from megatron_rl.data.problems import Problem
from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.evaluation.draw import ProblemSet
from megatron_rl.evaluation.samples import Samples
from megatron_rl.evaluation.set_metrics import metrics_of
from megatron_rl.evaluation.solve import SOLVE, answer_of, sample_of
from megatron_rl.jobs import status
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.solutions import solve
from megatron_rl.recipes.votes import VotedLabels
from megatron_rl.rewards.grading_pool import Graded, RewardFailure, check_failures
from megatron_rl.run.console import RunConsole
from megatron_rl.run.metrics import MetricsRow, Tracker
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.training.collector import RolloutMaker
from megatron_rl.training.held_out_sets import HeldOutSet, evaluate_sets
from megatron_rl.training.iteration import EvaluationDraws, Iteration
from megatron_rl.training.preflight import PreflightFailure, check_reward
from megatron_rl.training.write_ahead import WriteAhead
from megatron_rl.types import Outcome, Stop

TOKENIZER = characters()
# A reward function that scores good... and the known answer with 1. It hangs for hang..., the first time for once...,
# and for every text while the file `down` exists.
REWARD = """
import os, pathlib, time
notes = pathlib.Path({path!r})
def grade(response, payload):
    with (notes / response[:8]).open("a") as note:
        note.write("x")
    once = response.startswith("once") and (notes / response[:8]).stat().st_size > 1
    if (notes / "down").exists() or (response.startswith(("hang", "once")) and not once):
        time.sleep(60)
    if response == "exit":
        os._exit(3)
    return float(response.startswith(("good", "once")) or payload["answer"] in response)
"""
CUT_OFF = Graded(Outcome.SCORE, 0.0, "no answer within 5 s", cut_off=True, by_response=True)


@pytest.fixture
def pool(tmp_path, monkeypatch):
    with grading_by("hanging_rewards", REWARD, tmp_path, monkeypatch, workers=4) as pool:
        yield pool


def test_cases_a_judge_that_hangs_for_a_third_of_the_answers_stops_the_run(pool):
    """19 of 64 rewards were 0, graded/timeout was 0, and the run was done."""
    texts = {q: f"hang{q}" if q in "cfil" else f"good{q}" for q in "abcdefghijkl"}
    asked = [replace(prompt, payload={**prompt.payload, "answer": "known"}) for prompt in problems(*texts)]
    context = context_of(lambda q, rng, s: texts[q], pool.grade, max_failure_share=0.05)
    why = r"4 of 12 gradings failed \(0 time-outs, 0 errors, 4 cut off although .* A service that hangs"
    with pytest.raises(RewardFailure, match=why):
        solve(context, "generator", asked, Sampling(max_tokens=50, seed=3))


def test_cases_right_answers_get_no_score_while_the_service_is_down(pool, tmp_path):
    """The known answer of a problem that had been graded once was never tried again: right answers got 0.0."""
    payload = {"answer": "known"}
    (hung,) = pool.grade(["hang"], [payload])
    assert (hung.score, hung.cut_off, hung.by_response) == (0.0, True, True)
    (tmp_path / "down").touch()
    (right,) = pool.grade(["good"], [payload])
    assert right.outcome is Outcome.TIMEOUT and right.failed and not right.by_response


def test_faults_a_hang_that_passes_costs_no_score(pool, tmp_path):
    (found,) = pool.grade(["once"], [{"answer": "known"}])
    assert (found.score, found.cut_off, found.repeated) == (1.0, False, True)
    (hung,) = pool.grade(["hang"], [{"answer": "known"}])
    assert hung.by_response and hung.repeated and len((tmp_path / "hang").read_text()) == 2


def test_faults_the_share_that_may_be_cut_off_is_that_of_failures():
    good = Graded(Outcome.SCORE, 1.0)
    check_failures([good] * 95 + [CUT_OFF] * 5, 0.05)
    for scored in (CUT_OFF, replace(CUT_OFF, outcome=Outcome.TIMEOUT)):  # of cut_off: wrong and drop
        with pytest.raises(RewardFailure, match=r"6 of 100 gradings failed \(0 time-outs, 0 errors, 6 cut off"):
            check_failures([good] * 94 + [scored] * 6, 0.05)


def rule(response, payload):
    return CUT_OFF if response.startswith("hang") else 1.0


def test_faults_every_cut_off_grading_of_an_iteration_and_of_an_evaluation_is_a_metric(tmp_path):
    (tmp_path / "q.txt").write_text("Q{question}:")
    recipe = Dapo(updates=1, group_size=4, template=str(tmp_path / "q.txt"))
    texts = iter(["hang", "good", "good", "good"] * 9)
    context = context_of(lambda q, rng, s: next(texts), graded(rule))

    class Reader:
        dropped = 0

        def take(self, count, fits, draw):
            return problems("a", "b")

        def state_dict(self):
            return {}

    maker = RolloutMaker(recipe=recipe, readers={"generator": Reader()}, context=context, prompts_per_iteration=2)
    collected, _ = maker.make(Iteration(cycle=0, index=0, roles=("generator",), number=0), recipe.state_dict())
    assert collected.metrics["generator"]["graded/cut_off"] == 2
    marks = [rollout.payload["grading"] for rollout in collected.rollouts["generator"]]
    assert marks == ["cut_off", "score", "score", "score"] * 2
    draws = EvaluationDraws(n=4, greedy=False)
    metrics, answers = evaluate_sets(recipe, [HeldOutSet(name="s", prompts=problems("a"), draws=draws)], context)
    assert metrics["generator/cut_off"] == 1


def test_faults_the_console_the_status_and_the_report_tell_of_cut_off_gradings(tmp_path):
    out, metrics = io.StringIO(), {"reward/trained": 0.5, "graded/cut_off": 3.0, "replaced/timeout": 1.0}
    with RunConsole(tmp_path / "log", 9, stream=out) as console:
        console.log(MetricsRow(iteration=3, cycle=0, scope="generator", time={"rollout": 2.0}, metrics=metrics))
    said = "1 sample replaced (1 timeout), 3 gradings cut off"
    assert out.getvalue().strip().endswith(said) and said in (tmp_path / "log").read_text()
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("{}")
    with Tracker(run.metrics) as tracker:
        for iteration in range(2):
            tracker.log(0, "generator", metrics, iteration=iteration)
        tracker.log(0, "eval", {"generator/cut_off": 1.0}, iteration=2)
    shown = io.StringIO()
    status.show(status.read(run.path, look_s=0, jobs=[]), Console(file=shown, width=200))
    assert "generator: 2 samples replaced (2 timeout), 6 gradings cut off" in shown.getvalue()
    assert "eval: 1 grading cut off" in shown.getvalue()
    found = told(wrong_run(tmp_path / "wrong", reward=(0.2, 0.5), **{"cut off": (1, 1)}))
    assert len(found) == 1 and "20 gradings were cut off by a limit or a crash" in found[0]


def completion():
    return Completion(tokens=np.array([EOS]), logprobs=np.zeros(1), stop=Stop.EOS)


def test_faults_eval_counts_cut_off_gradings_and_fails_above_the_share():
    own = ProblemSet(name="s", title="s", problems=[Problem(row=i, values={}) for i in range(3)], prompts=[[1]] * 3)
    samples = Samples(None, "")
    results = [Graded(Outcome.SCORE, 1.0), CUT_OFF, CUT_OFF]
    samples.add([sample_of(own, i, 0, SOLVE) | answer_of("x", completion(), g)] for i, g in enumerate(results))
    found = metrics_of(samples, "s", "s", SOLVE, ks=[], seed=0)
    assert found.counts == {"grading cut off": 2}
    with pytest.raises(RewardFailure, match="2 of 3 gradings failed .0 time-outs, 0 errors, 2 cut off"):
        check_failures(gradings(samples, [found]), 0.05)


def test_faults_completions_whose_grading_was_cut_off_are_told_and_fail_the_command(pool, tmp_path, capsys):
    rows = [{"id": i, "answer": "known", "completion": text} for i, text in enumerate(("good", "hang", "bad", "hung"))]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = GradingConfig(reward=replace(pool.reward, max_failure_share=0.25))
    assert grade_completions(config, tmp_path / "c.jsonl", tmp_path / "out") == 0
    assert "cut_off      1" in capsys.readouterr().out
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "out/graded.jsonl").read_text().splitlines()]
    assert outcomes == ["score", "cut_off", "score", "score"]
    config = GradingConfig(reward=replace(pool.reward, max_failure_share=0.0))
    with pytest.raises(RewardFailure, match="1 of 4 gradings failed"):
        grade_completions(config, tmp_path / "c.jsonl", tmp_path / "out")


def test_faults_a_resumed_run_grades_again_what_was_cut_off(tmp_path):
    calls = []

    def grade(responses, payloads):
        calls.append([*responses])
        return graded(rule)(responses, payloads)

    for _ in range(2):
        WriteAhead(tmp_path, "same").open(0).grader(grade)(["good", "hang"], [{}] * 2)
    assert calls == [["good", "hang"], ["hang"]]


def test_faults_the_preflight_takes_no_cut_off_grading_for_a_score(caplog):
    asked = [replace(prompt, payload={"question": "q", "answer": "good"}) for prompt in problems(*"abc")]
    hangs = graded(lambda response, payload: CUT_OFF if response == "wrong" else 1.0)
    with pytest.raises(PreflightFailure, match="no score to the known wrong answer 'wrong'.*no answer within 5 s"):
        check_reward(hangs, asked, "wrong", "{answer}")
    texts = iter(["hang", "x", "x", "hang", "y", "y"])
    some = graded(lambda response, payload: CUT_OFF if (t := next(texts)) == "hang" else float(t == "x"))
    with caplog.at_level(logging.WARNING):
        scores = check_reward(some, asked, "wrong", "{answer}")
    assert scores == {"preflight/reward_correct": 1.0, "preflight/reward_wrong": 0.0}
    assert "1 of 3 gradings of known correct answers were cut off" in caplog.text
    assert _score(CUT_OFF) == "no score (no answer within 5 s)"


def test_faults_a_label_or_a_proposal_whose_grading_was_cut_off_is_not_called_wrong(pool):
    asked = [replace(p, payload={**p.payload, "answer": "7"}) for p in problems(*"ab")]
    labels = VotedLabels(1)
    context = context_of(lambda q, rng, s: "", graded(lambda r, p: CUT_OFF if p["question"] == "a" else 1.0))
    texts = [r"\boxed{7}", r"\boxed{7}"]
    labels.grade(context, [0, 1], texts, [prompt.payload for prompt in asked])
    assert labels.metrics(context, asked)["votes/labels_right"] == 1.0
    checked = AnswerRule("hanging_rewards:grade", 2).correct(
        {0: "good", 1: "exit", 2: "bad"}, dict.fromkeys(range(3), {"answer": "known"}), 0.5
    )
    assert checked == {0: True, 1: None, 2: False}


def test_faults_an_answer_whose_grading_was_cut_off_is_not_set_aside_as_wrong(tmp_path):
    config = config_files.load(GenerateConfig, [], ["model.path=m", "data.path=d.jsonl", f"output={tmp_path}/pairs"])
    problem = Problem(row=0, values={"question": "q", "answer": "1"})
    results = {"hang": CUT_OFF, "good": Graded(Outcome.SCORE, 1.0)}
    answers = [Answered(problem, "q", text, True, graded) for text, graded in results.items()]
    settings = {"output": config.output, "engine": {}}
    _Generation(config, settings, [Asked(problem, "q", [1])], {}).write(answers)
    assert [row["response"] for row in pq.read_table(tmp_path / "pairs/ungraded.parquet").to_pylist()] == ["hang"]
    assert not (tmp_path / "pairs/wrong.parquet").exists()
