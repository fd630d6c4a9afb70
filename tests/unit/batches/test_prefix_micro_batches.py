"""How rollouts that begin with one prompt are cut into micro-batches that compute it once."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_policy import TablePolicy

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches import data_parallel_split
from megatron_rl.batches.micro_batches import Cost, Prefixes, micro_batches
from megatron_rl.batches.replica_batch import Work
from megatron_rl.config.schema import Layout, LossConfig, Model, RoleConfig
from megatron_rl.megatron.router_replay import pooled
from megatron_rl.models.setting_limits import prefix_problems
from megatron_rl.models.sizes import Sizes
from megatron_rl.types import FREE, Author, Rollout, spans_of


def make(groups):
    """Lengths of sequences and their prefixes; `groups`: (tokens of the prefix, tokens behind it of each sequence)."""
    lengths = [prompt + own for prompt, answers in groups for own in answers]
    numbers = [i for i, (_, answers) in enumerate(groups) for _ in answers]
    prompts = [prompt for prompt, answers in groups for _ in answers]
    return lengths, Prefixes(numbers=np.array(numbers), lengths=np.array(prompts))


def computed(micro, lengths, prefixes):
    """Tokens of a micro-batch with each prefix once for sequences that follow each other."""
    total, before = 0, None
    for i in micro:
        total += lengths[i] - (prefixes.lengths[i] if prefixes.numbers[i] == before else 0)
        before = prefixes.numbers[i]
    return total


def test_every_sequence_is_cut_once_and_a_budget_holds_for_what_is_computed():
    rng = random.Random(0)
    for _ in range(300):
        groups = [
            (rng.randint(0, 40), [rng.randint(1, 40) for _ in range(rng.randint(1, 12))])
            for _ in range(rng.randint(1, 12))
        ]
        lengths, prefixes = make(groups)
        replicas, budget = rng.randint(1, 4), rng.randint(80, 300)
        shares = micro_batches(
            lengths, max_tokens=budget, replicas=replicas, cost=Cost(rng.choice([0, 50])), prefixes=prefixes
        ).sequences
        assert len(shares) == replicas and len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for micro in share for i in micro) == list(range(len(lengths)))
        for micro in (micro for share in shares for micro in share):
            assert computed(micro, lengths, prefixes) <= budget
            numbers = [prefixes.numbers[i] for i in micro]
            changes = sum(a != b for a, b in zip(numbers, numbers[1:], strict=False))
            assert changes == max(0, len(set(numbers)) - 1), "sequences of one prefix follow each other"


def test_a_group_stays_together_where_the_budget_holds_it():
    lengths, prefixes = make([(50, [5] * 8)] * 6)
    (share,) = micro_batches(lengths, max_tokens=200, replicas=1, prefixes=prefixes).sequences
    for micro in share:
        assert len(micro) % 8 == 0 and computed(micro, lengths, prefixes) == 90 * len(micro) // 8
    assert len(share) == 3, "two groups of 90 tokens fit where not four sequences did"


def test_a_group_that_does_not_fit_is_cut_into_parts_that_repeat_its_prompt():
    lengths, prefixes = make([(50, [20] * 8)])
    (share,) = micro_batches(lengths, max_tokens=100, replicas=1, prefixes=prefixes).sequences
    assert sorted(len(micro) for micro in share) == [2, 2, 2, 2]


def test_replicas_get_whole_groups_where_that_is_even_and_parts_where_it_is_not():
    lengths, prefixes = make([(100, [50] * 4)] * 8)
    shares = micro_batches(lengths, max_tokens=2000, replicas=4, prefixes=prefixes)
    assert all(computed(micro, lengths, prefixes) == 600 for share in shares.sequences for micro in share)
    assert shares.replica_imbalance == 0
    lengths, prefixes = make([(100, [50] * 16)])
    shares = micro_batches(lengths, max_tokens=2000, replicas=4, prefixes=prefixes)
    assert [[len(micro) for micro in share] for share in shares.sequences] == [[4]] * 4
    lengths, prefixes = make([(1000, [5] * 16)])
    shares = micro_batches(lengths, max_tokens=2000, replicas=4, prefixes=prefixes)
    loads = [computed(micro, lengths, prefixes) for share in shares.sequences for micro in share]
    assert max(loads) < 1000 + 5 * 16, "some parts cost less than the whole, though all of them repeat the prompt"


def test_the_least_loaded_replica_gets_the_dearest_micro_batch():
    shares = micro_batches([10, 5, 4, 1], max_tokens=10, replicas=2, multiple=2)
    assert shares.sequences == [[[0], [3]], [[1], [2]]] and shares.replica_imbalance == pytest.approx(0.1)
    shares = micro_batches([9, 9, 9, 8, 1, 1, 1, 1], max_tokens=9, replicas=4, multiple=2)
    assert shares.sequences[3] == [[3], [4]], "of equal loads the first replica comes first"


def test_a_sequence_costs_what_its_model_computes():
    """A layer with experts in three of four: weights are counted by what a token meets."""
    sizes = Sizes(
        family="x", num_layers=4, hidden=8, heads=4, kv_heads=2, head_dim=3, value_dim=5, ffn=32, vocab=9, tied=True,
        experts=6, expert_ffn=10, shared_ffn=7, dense_layers=1,
    )  # fmt: skip
    weights = 2 * 8 * (4 + 2) * 3 + 3 * 8 * (0.75 * (10 * 2 + 7) + 0.25 * 32)
    cost = Cost.of_model(sizes, 2)
    assert cost.balance == pytest.approx(weights / (4 * (3 + 5) / 2))
    assert cost.of(np.array([0, 2 * cost.balance])) == pytest.approx([0.0, 6 * cost.balance])
    assert Cost().of(np.array([3, 4])).tolist() == [3.0, 4.0]


def test_what_follows_a_shared_prompt_costs_the_rest_of_its_sequence():
    lengths, prefixes = make([(5, [5]), (5, [15])])  # 10 + 10 and 20 + 40 tokens that attend to nothing
    shares = micro_batches(lengths, max_tokens=20, replicas=2, cost=Cost(10), prefixes=prefixes)
    assert shares.replica_imbalance == pytest.approx(60 / 40 - 1)
    lengths, prefixes = make([(10, [10, 10]), (10, [30])])  # 20 + 2 x 40 and 200
    shares = micro_batches(lengths, max_tokens=40, replicas=1, cost=Cost(10), prefixes=prefixes)
    assert shares.micro_batch_imbalance == pytest.approx(200 / 150 - 1)


def test_thousands_of_sequences_are_cut_in_no_time():
    draw = np.random.default_rng(0)
    lengths, prefixes = make([(500, draw.integers(1, 3000, 16).tolist()) for _ in range(500)])
    shares = micro_batches(lengths, max_tokens=8192, replicas=8, cost=Cost(20000), prefixes=prefixes)
    assert sorted(i for share in shares.sequences for micro in share for i in micro) == list(range(8000))
    assert shares.replica_imbalance < 0.02


@pytest.mark.parametrize("count", [1, 2, 127, 129, 300])
def test_there_are_no_more_micro_batches_than_the_budget_needs(count):
    [share] = micro_batches([10] * 2 * count, max_tokens=20, replicas=1).sequences
    assert len(share) == count


@pytest.mark.parametrize("kind", ["groups", "prefixes", "alone"])
def test_a_sequence_that_exceeds_the_budget_is_refused_with_both_numbers(kind):
    lengths, prefixes = make([(5, [5]), (5, [16])])
    more = {"groups": {"groups": np.array([0, 1])}, "prefixes": {"prefixes": prefixes}, "alone": {}}[kind]
    with pytest.raises(ValueError, match="a sequence of 21 tokens exceeds micro_batch_tokens = 20: raise it or"):
        micro_batches(lengths, max_tokens=20, replicas=1, **more)
    assert micro_batches(lengths, max_tokens=21, replicas=1, **more).sequences


def test_groups_that_begin_with_one_prompt_each_compute_it():
    """Other groups may lie between them in a micro-batch, or they in other micro-batches."""
    lengths, prefixes = make([(10, [5, 5, 5, 5])])
    groups = np.array([0, 0, 1, 1])
    for budget, count in ((20, 2), (39, 2), (40, 1)):
        shares = micro_batches(lengths, max_tokens=budget, replicas=1, prefixes=prefixes, groups=groups)
        assert len(shares.sequences[0]) == count
    with pytest.raises(ValueError, match="20 tokens of rollouts that are compared"):
        micro_batches(lengths, max_tokens=19, replicas=1, prefixes=prefixes, groups=groups)


def rollout(group, tokens, prompt):
    return Rollout(
        role="a",
        group=group,
        tokens=tokens,
        logprobs=np.zeros(len(tokens)),
        spans=spans_of((prompt, Author.ENVIRONMENT, -1), (len(tokens) - prompt, Author.POLICY, 0)),
    )


class Sharing(TablePolicy):
    shares_prefixes = True


def test_a_replica_is_told_which_tokens_stand_in_the_rollout_before():
    """Prompts are compared by their tokens: groups may share one, and rollouts of one group may differ in theirs."""
    made = [
        rollout("x", [1, 2, 3, 7, 8], 3),
        rollout("y", [1, 2, 3, 9], 3),
        rollout("x", [1, 2, 4, 7], 3),
        rollout("x", [1, 2, 3, 5, 5, 5], 3),
        rollout("z", [6, 6], 0),
        rollout("z", [6, 6], 0),
        rollout("w", [4, 4, 4], 3),
        rollout("w", [4, 4, 4], 3),
    ]
    loss = PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
    shares = data_parallel_split.split_over_replicas(made, Sharing(10), loss=loss)
    work = Work.over(shares.buffer(0), shares.outline, 0)
    (micro,) = work.micros()
    batch = work.batch(micro)
    wanted = {0: 3, 1: 3, 3: 3, 2: 0, 4: 0, 5: 0, 6: 2, 7: 2}
    order, shared = work.flat.numbers.tolist(), batch.shared.tolist()
    firsts = [i for i, n in zip(order, shared, strict=True) if n == 0]
    assert len(firsts) == 5 and all(n in (0, wanted[i]) for i, n in zip(order, shared, strict=True))
    assert work.steps[0].shared_tokens == sum(shared) == 3 + 3 + 2 and work.steps[0].packed_tokens == 29
    for first, start, length in batch.repeats:
        assert torch.equal(batch.tokens[first : first + length], batch.tokens[start : start + length])
    assert len(batch.repeats) == 3


def test_the_experts_of_a_shared_prompt_are_those_that_some_sequence_knows():
    experts = torch.full((9, 1, 1), FREE)
    experts[[1, 3, 4, 6, 7], 0, 0] = torch.tensor([11, 20, 21, 30, 31])
    found = pooled(experts, [(0, 3, 2), (0, 6, 2)])[:, 0, 0].tolist()
    assert found[:2] == [20, 11] and found[2:] == experts[2:, 0, 0].tolist()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, None),
        ({"layout": Layout(cp=2)}, "layout.cp = 2: context parallelism cuts whole sequences"),
        ({"model": Model(path="m", router_aux_loss=0.1)}, "would count a prompt once"),
    ],
)
def test_what_shared_prefixes_do_not_go_with_is_refused(settings, says):
    role = replace(RoleConfig(model=Model(path="m"), shared_prefixes=True), **settings)
    assert [says in problem for problem in prefix_problems(role)] == ([True] if says else [])
    assert prefix_problems(replace(role, shared_prefixes=False)) == []
