"""Evaluations on several sets during a run: names and means of metrics, the best checkpoints, the early stop, and the
same after a resume.
"""

import json
import math
import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_policy import TablePolicy
from loops import VOCAB, Log, Questions, make, train

from megatron_rl.config.base import ConfigError
from megatron_rl.config.evaluation import Best, EarlyStop
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.training import collector, loop
from megatron_rl.training.held_out_sets import HeldOutSet, evaluate_sets, followed, ranked, stopped_early
from megatron_rl.training.iteration import EvaluationDraws

VALUES = [0.1, 0.3, 0.7, 0.4, 0.7, 0.2]  # of the evaluations after 0, 2, 4, ... iterations; the best after 4
BEST = Best(metric="generator/accuracy", keep=2)


@dataclass(frozen=True, kw_only=True)
class Scripted(Grpo):
    """Grpo whose evaluations have the metrics VALUES, one after the other."""

    def evaluate(self, prompts, context):
        context.kept["calls"] = context.kept.get("calls", -1) + 1
        return {"generator/accuracy": VALUES[context.kept["calls"]], "generator/num_problems": float(len(prompts))}


@pytest.fixture
def template(tmp_path):
    (tmp_path / "template.txt").write_text("{question}")
    return str(tmp_path / "template.txt")


def run(template, directory, plan, *, stop_after=None, state=None, policy=None):
    """Trains with scripted evaluations. Returns (log, progress, what was kept as the best, whether all is done)."""
    log, kept = Log(), []
    recipe = Scripted(updates=10, group_size=8, template=template)
    parts = {"recipe": recipe, "policy": policy, "state": state, "stop_after": stop_after}
    setup, progress = make(template, log, directory, **parts)
    setup = replace(setup, keep_best=lambda number, best: kept.append([number, [list(one) for one in best]]))
    finished = train(setup, plan, progress)
    return log, progress, kept, finished


def resumed(template, folder, plan, stop_after):
    """Trains until `stop_after` iterations are done, then goes on from the checkpoint of that stop."""
    policy = TablePolicy(VOCAB, lr=0.3, seed=1)
    first, _, before, finished = run(template, folder / "cut", plan, stop_after=stop_after, policy=policy)
    assert not finished
    policy.save(folder)
    again = TablePolicy(VOCAB, lr=0.3, seed=1)
    again.load(folder)
    state = first.saved[stop_after]["state"]
    second, progress, after, finished = run(template, folder / "cut", plan, state=state, policy=again)
    return first.lines + second.lines, progress, before + after, finished


def told(lines):
    return json.dumps([(iteration, cycle, scope, metrics) for iteration, cycle, scope, metrics in lines])


@pytest.mark.parametrize("stop_after", [3, 4, 5, 8])
def test_the_best_is_the_same_after_a_stop_before_at_and_after_it(template, tmp_path, stop_after):
    plan = loop.Plan(iterations=10, evaluate_every=2, save_every=3, best=BEST)
    whole, progress, kept, finished = run(template, tmp_path / "whole", plan)
    assert finished and progress.best == [(4, 0.7), (8, 0.7)]
    assert kept[2] == [4, [[4, 0.7], [2, 0.3]]] and kept[-1] == [10, [[4, 0.7], [8, 0.7]]]
    assert {2, 4, 6, 8, 10} <= set(whole.saved), "there is a checkpoint of every evaluation"
    lines, later, kept_again, finished = resumed(template, tmp_path, plan, stop_after)
    assert finished and told(lines) == told(whole.lines)
    assert [tuple(one) for one in later.best] == progress.best
    assert kept_again == kept


@pytest.mark.parametrize("stop_after", [3, 4, 6, 7])
def test_a_run_ends_early_at_the_same_iteration_after_a_resume(template, tmp_path, stop_after):
    stop = EarlyStop(metric="generator/accuracy", patience=2)
    plan = loop.Plan(iterations=10, evaluate_every=2, save_every=3, early_stop=stop)
    whole, progress, _, finished = run(template, tmp_path / "whole", plan)
    assert finished and progress.number == 8 and stopped_early(plan.early_stop, progress.early_stop)
    assert max(whole.saved) == 8, "the weights of the end are in a checkpoint"
    lines, later, _, finished = resumed(template, tmp_path, plan, stop_after)
    assert finished and later.number == 8 and told(lines) == told(whole.lines)


def test_a_run_without_patience_to_lose_goes_on_to_its_end(template, tmp_path):
    stop = EarlyStop(metric="generator/accuracy", patience=3)
    plan = loop.Plan(iterations=6, evaluate_every=2, early_stop=stop)
    _, progress, _, finished = run(template, tmp_path / "whole", plan)
    assert finished and progress.number == 6 and not stopped_early(plan.early_stop, progress.early_stop)


def test_a_metric_that_no_evaluation_has_is_named_with_those_there_are(template, tmp_path):
    plan = loop.Plan(iterations=2, best=Best(metric="generator/pass@4"))
    with pytest.raises(ConfigError, match=r"best.metric = 'generator/pass@4'.*it has generator/accuracy"):
        run(template, tmp_path / "whole", plan)


def test_a_better_model_replaces_an_earlier_one_only_when_a_checkpoint_says_so(template, tmp_path):
    """A run that is killed at any time finds the models that its newest checkpoint names as the best."""
    log, events = Log(), []
    setup, progress = make(template, log, tmp_path, recipe=Scripted(updates=10, group_size=8, template=template))
    save = setup.save
    setup = replace(
        setup,
        keep_best=lambda number, best: events.append(("exported", number)),
        save=lambda number, state: (events.append(("saved", number)), save(number, state))[1],
        remove_surpassed=lambda best: events.append(("removed", progress.number)),
    )
    plan = loop.Plan(iterations=10, evaluate_every=2, save_every=2, best=BEST)
    train(setup, plan, progress)
    assert events == [
        ("exported", 0),
        *((what, n) for n in (2, 4, 6, 8, 10) for what in ("exported", "saved", "removed")),
    ]
    for number, best in ((4, [[4, 0.7], [2, 0.3]]), (10, [[4, 0.7], [8, 0.7]])):
        state = log.saved[number]["state"]["progress"]
        assert state["evaluated"] == number and [[*one] for one in state["best"]] == best


@pytest.mark.parametrize("evaluations", [1, 2])
def test_faults_a_stop_during_an_evaluation_keeps_nothing_of_it(template, tmp_path, evaluations):
    """Values that the evaluation stores for later ones stayed in the checkpoint, from which the run evaluates again."""
    plan = loop.Plan(iterations=4, evaluate_every=2)
    policy, again, log = TablePolicy(VOCAB, lr=0.3, seed=1), TablePolicy(VOCAB, lr=0.3, seed=1), Log()
    recipe = Scripted(updates=10, group_size=8, template=template)
    setup, progress = make(template, log, tmp_path / "cut", recipe=recipe, policy=policy)
    setup = replace(setup, should_stop=lambda: sum(line[2] == "eval" for line in log.lines) == evaluations)
    assert not train(setup, plan, progress)
    measured = {"generator/accuracy": VALUES[0], "generator/num_problems": 5.0} if evaluations > 1 else {}
    assert progress.first_evaluation == progress.last_evaluation == measured
    assert progress.kept == ({"questions": {"calls": 0}} if measured else {})
    if evaluations > 1:
        policy.save(tmp_path)
        again.load(tmp_path)
        rest, *_ = run(template, tmp_path / "cut", plan, state=log.saved[2]["state"], policy=again)
        whole, *_ = run(template, tmp_path / "whole", plan)
        assert told(log.lines[:-1] + rest.lines) == told(whole.lines)


def test_a_run_that_goes_on_after_an_evaluation_does_not_evaluate_again(template, tmp_path):
    plan = loop.Plan(iterations=10, evaluate_every=2, save_every=3, best=BEST)
    policy, again = (TablePolicy(VOCAB, lr=0.3, seed=1) for _ in range(2))
    first, _, _, _ = run(template, tmp_path, plan, stop_after=4, policy=policy)
    policy.save(tmp_path)
    again.load(tmp_path)
    state = first.saved[4]["state"]
    state["progress"] |= {"evaluated": 4, "last_evaluation": {"generator/accuracy": 0.75}}
    second, progress, _, _ = run(template, tmp_path, plan, state=state, policy=again)
    evaluations = [(iteration, metrics) for iteration, _, scope, metrics in second.lines if scope == "eval"]
    assert evaluations[0] == (4, {"generator/accuracy": 0.75}), "its line is written again"
    assert [iteration for iteration, _ in evaluations] == [4, 6, 8, 10] and progress.evaluated == 10


class Counting(TablePolicy):
    """A table that tells how many updates it has had, at once."""

    def __init__(self):
        super().__init__(VOCAB, lr=0.3, seed=1)
        self.updates, self.changed = 0, threading.Condition()

    def update(self, *args):
        found = super().update(*args)
        with self.changed:
            self.updates += 1
            self.changed.notify_all()
        return found

    def wait_for(self, count):
        with self.changed:
            return self.changed.wait_for(lambda: self.updates >= count, 60)


@dataclass(frozen=True, kw_only=True)
class Lasting(Scripted):
    """Evaluations that last until the policy has had one more update, and tell the engine's versions meanwhile."""

    policy: Any
    last: int  # the evaluation after the last iteration lasts no longer

    def __deepcopy__(self, memo):
        return self

    def evaluate(self, prompts, context):
        found, engine = super().evaluate(prompts, context), context.engines["generator"]
        before = engine.version
        assert before == self.last or self.policy.wait_for(before + 1), "nothing was trained beside the evaluation"
        complete(engine, [prompt.tokens for prompt in prompts], Sampling(max_tokens=1))
        return {**found, "generator/before": float(before), "generator/after": float(engine.version)}


def test_an_evaluation_beside_training_has_the_weights_of_its_iteration(template, tmp_path):
    """The trainer waited for every evaluation, and the engines idled while it trained."""
    policy, log = Counting(), Log()
    recipe = Lasting(updates=6, group_size=8, template=template, policy=policy, last=6)
    setup, progress = make(template, log, tmp_path, recipe=recipe, policy=policy, max_staleness=1)
    plan = loop.Plan(iterations=6, evaluate_every=2, evaluate_beside=True, train_without_signal=True, save_every=1)
    assert train(setup, plan, progress)
    found = [
        (iteration, m["generator/before"], m["generator/after"]) for iteration, _, s, m in log.lines if s == "eval"
    ]
    assert found == [(done, float(done), float(done)) for done in (0, 2, 4, 6)]
    for number in range(1, 7):  # a checkpoint has the result of every evaluation that began before its iteration
        assert log.saved[number]["state"]["progress"]["evaluated"] == (number - 1) // 2 * 2 if number < 6 else 6


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_evaluations_beside_training_are_the_same_after_a_resume(template, tmp_path, stop_after):
    plan = loop.Plan(iterations=6, evaluate_every=2, evaluate_beside=True, train_without_signal=True, save_every=1)
    found, state, policy = [], None, None
    for stop in (stop_after, None):
        log, own = Log(), Counting()
        if policy is not None:
            policy.save(tmp_path)
            own.load(tmp_path)
            own.updates = stop_after
        recipe = Lasting(updates=6, group_size=8, template=template, policy=own, last=6)
        parts = {"recipe": recipe, "policy": own, "state": state, "stop_after": stop, "max_staleness": 1}
        setup, progress = make(template, log, tmp_path / "store", **parts)
        assert train(setup, plan, progress) == (stop is None)
        setup.iterations.close()
        found += [
            (iteration, metrics["generator/accuracy"]) for iteration, _, scope, metrics in log.lines if scope == "eval"
        ]
        state, policy = log.saved[max(log.saved)]["state"], own
    assert found == [(0, 0.1), (2, 0.3), (4, 0.7), (6, 0.4)]


def test_an_evaluation_beside_training_that_fails_ends_the_run(template, tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Failing(Grpo):
        def evaluate(self, prompts, context):
            raise ArithmeticError("no figure")

    recipe = Failing(updates=3, group_size=8, template=template)
    setup, progress = make(template, Log(), tmp_path, recipe=recipe, max_staleness=1)
    plan = loop.Plan(iterations=3, evaluate_beside=True, train_without_signal=True)
    with pytest.raises(ArithmeticError, match="no figure"):
        train(setup, plan, progress)


def test_an_evaluation_whose_weights_no_engine_has_any_more_is_left_out(template, tmp_path, monkeypatch):
    """The evaluation waited for a server, the server for a refit, and the refit for the evaluation."""
    monkeypatch.setattr(collector, "UNSERVED_S", 0.2)
    asked, lost, said = threading.Event(), threading.Event(), []

    @dataclass(frozen=True, kw_only=True)
    class Waiting(Grpo):
        def evaluate(self, prompts, context):
            if asked.is_set():
                return {"generator/accuracy": 0.5}
            asked.set()
            lost.wait(60)
            complete(context.engines["generator"], [prompts[0].tokens], Sampling(max_tokens=1))
            raise AssertionError("the sessions of a cancelled evaluation are closed")

    log, recipe = Log(), Waiting(updates=3, group_size=8, template=template)
    setup, progress = make(template, log, tmp_path, recipe=recipe, max_staleness=1)
    setup = replace(setup, served=lambda: lost.is_set(), say=said.append)
    plan = loop.Plan(iterations=3, evaluate_beside=True, train_without_signal=True)
    assert train(setup, plan, progress)
    lost.set()
    assert [(number, m["generator/accuracy"]) for number, _, scope, m in log.lines if scope == "eval"] == [(3, 0.5)]
    assert "the evaluation after iteration 0 is left out: no server has its weights any more" in said


def test_an_evaluation_without_a_value_does_not_count():
    best, stop = Best(metric="f1", keep=2), EarlyStop(metric="f1", patience=1)
    for missing in ({}, {"f1": math.nan}):
        assert ranked([(1, 0.5)], 3, missing, best) == [(1, 0.5)] and followed((0.5, 0), missing, stop) == (0.5, 1)
    assert ranked([], 0, {"f1": math.nan}, best) == [] and followed(None, {"f1": math.nan}, stop) is None
    with pytest.raises(ConfigError, match="early_stop.metric = 'f1'"):
        followed(None, {}, stop)


def test_lower_is_better_where_the_config_says_so():
    least = Best(metric="loss", mode="min", keep=2)
    assert ranked([(1, 0.5), (2, 0.4)], 3, {"loss": 0.45}, least) == [(2, 0.4), (3, 0.45)]
    assert ranked([(1, 0.5)], 3, {"loss": 0.5}, Best(metric="loss", keep=1)) == [(1, 0.5)], "the earlier of equal ones"
    stop = EarlyStop(metric="loss", mode="min", patience=1)
    assert followed((0.5, 1), {"loss": 0.4}, stop) == (0.4, 0) and followed((0.5, 1), {"loss": 0.5}, stop) == (0.5, 2)


def test_metrics_of_several_sets_are_means_with_equal_weights_and_sums_of_counts(template, tmp_path):
    setup, _ = make(template, Log(), tmp_path / "run")
    evaluate = lambda sets: setup.commands.drive(evaluate_sets, setup.recipe, sets, setup.context)  # noqa: E731
    setup.commands.drive(setup.refits["generator"], 0)
    draws = [EvaluationDraws(n=2, k=(1, 2)), EvaluationDraws(n=4, k=(2, 4), temperature=0.5), EvaluationDraws(k=(1,))]
    sets = [
        HeldOutSet(name=name, prompts=Questions().take(count), draws=own)
        for name, count, own in zip("abc", (2, 4, 3), draws, strict=True)
    ]
    metrics, answers = evaluate(sets[:2])
    for name in ("accuracy", "reward", "pass@2", "accuracy_greedy"):
        own = [metrics[f"generator/{place}/{name}"] for place in "ab"]
        assert metrics[f"generator/{name}"] == pytest.approx(sum(own) / 2)
    assert "generator/pass@4" not in metrics and "generator/b/pass@4" in metrics
    assert metrics["generator/num_problems"] == 6.0 and "generator/b/maj@4" in metrics
    assert [len(group) for group in answers["b"]["generator"]] == [4] * 4
    alone, _ = evaluate(sets[2:])
    assert all(name.count("/") == 1 for name in alone), "one set needs no name"
    twice, _ = evaluate(sets[:2])
    assert twice == metrics
