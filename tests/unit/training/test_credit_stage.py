"""The credit stage: scores come before it, the recipe's state changes there alone, and what it returns is checked."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from test_collector import MIXED, START, Greedy, credited, rollout, rollout_maker, stage

from megatron_rl.training.collector import Collector, upcoming
from megatron_rl.training.credit import RolloutError
from megatron_rl.training.iteration import Iteration, RecipeRole, Score
from megatron_rl.training.store import IterationStore, read_rows
from megatron_rl.types import STEP, Annotations


def test_a_recipe_that_changes_its_state_in_the_rollout_stage_is_refused():
    class Early(Greedy):
        def rollout(self, iteration, source, context):
            self.seen = [*self.seen, "early"]
            return super().rollout(iteration, source, context)

    with pytest.raises(RolloutError, match="iteration 3: the recipe changed its state in the method rollout"):
        rollout_maker(Early()).make(Iteration(cycle=0, index=0, roles=("a",), number=3), {"seen": []})


class Scored(Greedy):
    """A recipe whose credit needs a value of each token, and takes 1 from the outcome."""

    def scores(self, iteration):
        return [Score(role=role, name="value", by="critic") for role in iteration.roles]

    def credit(self, iteration, rollouts, context):
        found = super().credit(iteration, rollouts, context)
        return {
            role: [
                replace(
                    r, advantages=float(r.values["value"][1]), rewards={"outcome": r.rewards.get("outcome", 3.0) - 1}
                )
                for r in own
            ]
            for role, own in found.items()
        }


@pytest.mark.parametrize("k", [0, 2])
def test_faults_an_iteration_whose_credit_needs_scores_is_credited_once_from_what_was_drawn(tmp_path, k):
    """Also after a kill before or after the credit: the file of the iteration has the rollouts without the credit, and
    shows the credit to readers."""

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
    assert [(r.advantages, r.values) for r in read.rollouts["a"]] == [(0.5, {})] * 4 and not read.credited, (
        "as `rollout` gave them"
    )
    rows = read_rows(store.path(0))
    assert [row["advantage"] for row in rows] == [0.25, 1.25, 2.25, 3.25]
    assert [row["rewards"]["outcome"] for row in rows] == [2.0] * 4
    collector, _ = begin()  # a process that was killed after the credit, before the checkpoint, credits again
    again = collector.credit(first, score(collector.take(first)))
    assert [r.advantages for r in again.rollouts["a"]] == [0.25, 1.25, 2.25, 3.25]
    assert [r.rewards["outcome"] for r in again.rollouts["a"]] == [2.0] * 4, "1.0 if credit came upon credit"
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


class Declaring(Greedy):
    """A recipe with a declaration of what the rollouts of its role give."""

    def __init__(self, gives, *returned) -> None:
        super().__init__(wrong={0: {"a": [*returned]}})
        self.gives = gives

    def roles(self):
        return {"a": RecipeRole(gives=frozenset({self.gives}))}


TAUGHT = rollout(advantages=None, values={"teacher_logprobs": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Declaring("teacher_logprobs", TAUGHT, rollout()), "rollout 1 .* has no teacher_logprobs in its values, which"),
        (Declaring("rewards", rollout(advantages=None)), "rollout 0 .* has no advantages"),
        (
            Declaring("pairs", rollout(), rollout(), rollout(group="1")),
            "group '1' has 1 rollouts, and the",
        ),
    ],
)
def test_faults_rollouts_without_what_the_recipe_declares_are_named(recipe, message):
    with pytest.raises(RolloutError, match=message):
        credited(rollout_maker(recipe), Iteration(cycle=0, index=0, roles=("a",), number=0), recipe=recipe)


def test_a_role_whose_recipe_gives_no_advantages_needs_none():
    recipe = Declaring("teacher_logprobs", TAUGHT)
    collected = credited(rollout_maker(recipe), Iteration(cycle=0, index=0, roles=("a",), number=0), recipe=recipe)
    assert collected.rollouts["a"][0].advantages is None and "groups_without_signal" not in collected.metrics["a"]
