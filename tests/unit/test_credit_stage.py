"""The credit stage: scores come before it, the recipe's state changes there alone, and what it returns is checked."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from test_collector import MIXED, START, Greedy, credited, rollout, rollout_maker, stage

from megatron_rl.training.collector import Collector, upcoming
from megatron_rl.training.credit import RolloutError
from megatron_rl.training.iteration import Iteration, Score
from megatron_rl.training.store import IterationStore
from megatron_rl.types import STEP, Annotations


def test_a_recipe_that_changes_its_state_in_the_rollout_stage_is_refused():
    class Early(Greedy):
        def rollout(self, iteration, source, context):
            self.seen = [*self.seen, "early"]
            return super().rollout(iteration, source, context)

    with pytest.raises(RolloutError, match="iteration 3: the recipe changed its state in the method rollout"):
        rollout_maker(Early()).make(Iteration(cycle=0, index=0, roles=("a",), number=3), {"seen": []})


class Scored(Greedy):
    """A recipe whose credit needs a value of each token."""

    def scores(self, iteration):
        return [Score(role=role, name="value", by="critic") for role in iteration.roles]

    def credit(self, iteration, rollouts, context):
        found = super().credit(iteration, rollouts, context)
        return {role: [replace(r, advantages=float(r.values["value"][1])) for r in own] for role, own in found.items()}


@pytest.mark.parametrize("k", [0, 2])
def test_an_iteration_whose_credit_needs_scores_is_credited_after_they_are_computed(tmp_path, k):
    """Also after a kill between the two: the file of the iteration then has the rollouts without the credit."""

    def begin(every=1):
        store = IterationStore(tmp_path, keep_every=every)
        credit = stage(recipe=Scored(), k=k, after_scores=True)
        return Collector(
            rollout_maker(Scored(), max_staleness=k), credit, upcoming(MIXED, START), store, max_staleness=k
        ), store

    def score(collected):
        valued = {
            role: [replace(r, values={"value": np.full(2, 0.25 + r.tokens[0], np.float32)}) for r in own]
            for role, own in collected.rollouts.items()
        }
        return replace(collected, rollouts=valued)

    first, second = islice(upcoming(MIXED, START), 2)
    for _ in range(2):  # the first process is killed before the credit
        collector, store = begin()
        taken = collector.take(first)
        assert not taken.credited and collector.state()["recipe"] == [{"seen": []}]
        collector.close()
    credited = collector.credit(first, score(taken))
    assert [r.advantages for r in credited.rollouts["a"]] == [0.25, 1.25, 2.25, 3.25]
    seen = {"seen": ["s0", "s1", "s2", "s3"]}
    assert collector.state()["recipe"] == ([{"seen": []}, seen] if k else [seen])
    read, _ = store.read(first)
    assert read.credited and [r.advantages for r in read.rollouts["a"]] == [0.25, 1.25, 2.25, 3.25]
    collector, _ = begin()  # a process that was killed after the credit, before the checkpoint, credits again
    again = collector.credit(first, score(collector.take(first)))
    assert [r.advantages for r in again.rollouts["a"]] == [0.25, 1.25, 2.25, 3.25]
    collector.trained()
    assert collector.take(second).rollouts["b"][0].group == "b0"
    collector.close()


class ScoredSometimes(Scored):
    """Only the iterations of role a need scores. Leaves out the first rollout of each iteration."""

    def scores(self, iteration):
        return super().scores(iteration) if iteration.role == "a" else ()

    def credit(self, iteration, rollouts, context):
        self.seen = [*self.seen, iteration.number]
        return {role: own[1:] for role, own in rollouts.items()}


def test_iterations_are_credited_in_order_also_if_only_some_need_scores(tmp_path):
    """One that needs none was credited as soon as its rollouts were there, before the iteration that is due."""
    store, credit = IterationStore(tmp_path), stage(recipe=ScoredSometimes(), k=1, after_scores=True)
    maker = rollout_maker(ScoredSometimes(), max_staleness=1)
    collector = Collector(maker, credit, upcoming(MIXED, START), store, max_staleness=1)
    for iteration in islice(upcoming(MIXED, START), 3):
        taken = collector.take(iteration)
        assert not taken.credited
        collector.credit(iteration, taken)
        assert credit.recipe.seen == [*range(iteration.number + 1)]
        collector.trained()
    collector.close()
    read, _ = store.read(next(upcoming(MIXED, START)))
    assert len(read.rollouts["a"]) == 4, "a later process needs the rollouts that the credit leaves out"


FAULTS = [
    ({"b": []}, "trains a, and the recipe returned rollouts of b"),
    ({}, "rollouts of no role"),
    ({"a": [], "b": []}, "rollouts of a, b"),
    ({"a": [rollout(), rollout("b")]}, r"a: rollout 1 \(group '0'\) is of role 'b'"),
    ({"a": [rollout(advantages=None)]}, "has no advantages: assign them"),
    ({"a": [rollout(advantages=[0.0, np.nan])]}, "advantages that are not finite"),
    (
        {"a": [rollout(experts=np.zeros((2, 1, 1), np.int16))]},
        "experts of 2 tokens; an engine tells those of all 2 but",
    ),
    ({"a": [rollout(annotations={STEP: Annotations([(0, 3)])})]}, "has annotations 'step' outside its 2 tokens"),
]


@pytest.mark.parametrize(("returned", "message"), FAULTS)
def test_rollouts_that_cannot_be_trained_on_are_named(returned, message):
    with pytest.raises(RolloutError, match=message):
        credited(rollout_maker(Greedy(wrong={0: returned})), Iteration(cycle=0, index=0, roles=("a",), number=0))


def test_a_role_whose_loss_reads_no_advantages_needs_none():
    maker = rollout_maker(Greedy(wrong={0: {"a": [rollout(advantages=None)]}}))
    collected = credited(maker, Iteration(cycle=0, index=0, roles=("a",), number=0), uncredited="a")
    assert collected.rollouts["a"][0].advantages is None and "groups_without_signal" not in collected.metrics["a"]
