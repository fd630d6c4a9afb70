"""From rollouts to batches: packing against a plain loop, dealing to replicas, and what an update computes and
sends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_policy import TablePolicy, without_speed
from one_process import OneProcess

from megatron_rl.algorithms.objectives import objective
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches import data_parallel_split
from megatron_rl.batches.micro_batches import micro_batches
from megatron_rl.batches.packed_batch import pack
from megatron_rl.batches.replica_batch import Work
from megatron_rl.batches.rollout_buffer import _join
from megatron_rl.config.schema import LossConfig
from megatron_rl.training.update import Trainee, evaluate, policy_logprobs, scatter, update
from megatron_rl.types import FREE, Author, Rollout, spans_of

VOCAB, LAYERS, CHOSEN = 12, 3, 2


def rollout(rng, number, *, advantages="float", experts=False, trained=True):
    """A rollout whose spans alternate at random; it may begin with a token that the policy wrote."""
    authors = rng.integers(0, 3, rng.integers(1, 5)) if trained else [2]
    parts = [(int(rng.integers(1, 6)), int(a), int(rng.integers(0, 3))) for a in authors] + [
        (1, int(not trained) * 2, 4)
    ]
    size = sum(n for n, _, _ in parts)
    return Rollout(
        role="generator",
        group=str(number // 3),
        tokens=rng.integers(0, VOCAB, size),
        logprobs=-rng.random(size),
        spans=spans_of(*parts),
        partner_weight=float(rng.choice([0.0, 0.25])),
        advantages=float(rng.normal()) if advantages == "float" else rng.normal(size=size),
        values={"teacher_logprobs": -rng.random(size).astype(np.float32)},
        experts=rng.integers(0, 300, (size - 1, LAYERS, CHOSEN)).astype(np.int16) if experts else None,
    )


def rollouts(seed, count=7, **settings):
    rng = np.random.default_rng(seed)
    return [rollout(rng, i, **settings) for i in range(count)]


def by_loop(made):
    """Returns what `pack` gives, token by token."""
    out = {n: [] for n in ("tokens", "mask", "weights", "labels", "engine_logprobs", "advantages", "teacher_logprobs")}
    for r in made:
        for i in range(len(r.tokens)):
            last = i + 1 == len(r.tokens)
            author = None if last else r.authors[i + 1]
            out["tokens"].append(int(r.tokens[i]))
            out["mask"].append(author == Author.POLICY)
            out["weights"].append({Author.POLICY: 1.0, Author.PARTNER: r.partner_weight}.get(author, 0.0))
            later = {"labels": r.tokens, "engine_logprobs": r.logprobs, **r.values}
            for name, values in later.items():
                out[name].append(0 if last else values[i + 1].item())
            one = r.advantages if isinstance(r.advantages, float) else 0 if last else r.advantages[i + 1].item()
            out["advantages"].append(one)
    return out


@pytest.mark.parametrize("kind", ["float", "token"])
def test_packing_equals_a_plain_loop(kind):
    for seed in range(20):
        made = rollouts(seed, advantages=kind)
        batch, wanted = pack(made), by_loop(made)
        ends = batch.cu_seqlens[1:] - 1
        inner = torch.ones(len(batch.tokens), dtype=torch.bool)
        inner[ends] = False
        assert batch.tokens.tolist() == wanted["tokens"]
        assert batch.mask.tolist() == wanted["mask"] and batch.weights.tolist() == wanted["weights"]
        for name in ("labels", "engine_logprobs", "advantages", "teacher_logprobs"):
            found = batch.values[name] if name in batch.values else getattr(batch, name)
            assert torch.equal(found[inner], torch.tensor(wanted[name], dtype=found.dtype)[inner]), name
        assert batch.lengths.tolist() == [len(r.tokens) for r in made]


def test_a_batch_has_a_row_of_experts_for_each_token_and_says_where_nothing_is_known():
    rng = np.random.default_rng(0)
    made = [rollout(rng, 0, experts=True), rollout(rng, 1), rollout(rng, 2, experts=True)]
    experts = pack(made).experts.split([len(r.tokens) for r in made])
    for own, r in zip(experts, made, strict=True):
        assert (own[-1] == FREE).all(), "last tokens go through no layer of the engine"
        assert np.array_equal(own[:-1], r.experts) if r.experts is not None else (own == FREE).all()
    assert pack(made[1:2]).experts is None


@pytest.mark.parametrize("absent", ["old_logprobs", "reference_logprobs"])
def test_a_dummy_batch_has_the_log_probs_that_the_batch_has(absent):
    batch = pack(rollouts(0))
    whole = replace(batch, old_logprobs=batch.engine_logprobs, reference_logprobs=batch.engine_logprobs)
    for each, there in ((whole, True), (replace(whole, **{absent: None}), False)):
        dummy = each.dummy(3)
        assert (getattr(dummy, absent) is not None) == there and not dummy.mask.any()
        assert dummy.values.keys() == batch.values.keys() and dummy.experts is dummy.shared is None


def test_nothing_is_packed_of_no_rollouts():
    with pytest.raises(ValueError, match="cannot pack an empty list of rollouts"):
        pack([])


def test_sequence_sums_and_spread_are_per_rollout():
    made = rollouts(3)
    batch = pack(made)
    values = torch.randn(len(batch.tokens), dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([part.sum() for part in values.split(batch.lengths.tolist())])
    found = batch.sequence_sums(values)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(batch.spread(found), wanted.repeat_interleave(batch.lengths))
    assert torch.equal(torch.autograd.grad(found.sum(), values)[0], torch.ones_like(values))


@pytest.mark.parametrize("lacking", ["advantages", "teacher_logprobs", "rollouts", "trained"])
def test_what_cannot_be_trained_on_is_refused_with_the_cure(lacking):
    made, loss = rollouts(1), PolicyLoss(LossConfig(kl_coef=0.0))
    if lacking == "advantages":
        made, said = [*made[:2], replace(made[2], advantages=None)], "group '0' has no advantages"
    elif lacking == "teacher_logprobs":
        made = [*made[:2], replace(made[2], values={})]
        loss, said = PolicyLoss(LossConfig(kl_coef=0.0, objective="distilled")), "no values 'teacher_logprobs'"
    elif lacking == "rollouts":
        made, said = [], "no rollouts"
    else:
        made, said = rollouts(1, trained=False), "rollouts 0 to 6 have no trained token"
    with pytest.raises(ValueError, match=said):
        update(OneProcess(), Trainee(policy=TablePolicy(VOCAB), loss=loss), made)


class Cut(TablePolicy):
    """Says that it lies over two replicas; for dealing alone."""

    def shares(self, lengths, prefixes=None, groups=None):
        most = self.micro_batch_tokens
        return micro_batches(lengths, max_tokens=most, replicas=2, prefixes=prefixes, groups=groups)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
@pytest.mark.parametrize("size", [None, 5])
def test_replicas_get_each_rollout_once_with_the_weights_of_its_step(aggregation, size):
    made = rollouts(5, count=17, advantages="token")
    config = LossConfig(kl_coef=0.0, aggregation=aggregation, max_tokens=9)
    shares = data_parallel_split.split_over_replicas(
        made, Cut(VOCAB, micro_batch_tokens=60), loss=PolicyLoss(config), samples_per_step=size
    )
    works = [Work.over(shares.buffer(r), shares.outline, r) for r in range(2)]
    assert sorted(i for w in works for i in w.flat.numbers.tolist()) == list(range(17))
    parts = data_parallel_split.split(17, size)
    assert len(works[0].steps) == len(parts)
    for number, part in enumerate(parts):
        seen, weight, trained = [], 0.0, 0
        for work in works:
            for micro in work.micros(number):
                batch = work.batch(micro)
                own = work.flat.numbers[micro.first : micro.last].tolist()
                assert batch.tokens.tolist() == [t for i in own for t in made[i].tokens.tolist()]
                assert micro.end - micro.start == len(batch.tokens) <= 60
                seen += own
                weight, trained = weight + float(batch.weights.double().sum()), trained + int(batch.mask.sum())
        totals = works[0].steps[number]
        assert sorted(seen) == list(part) and totals.trained_tokens == trained
        assert totals.packed_tokens == sum(len(made[i].tokens) for i in part)
        if aggregation == "constant":
            assert totals.denominator == len(part) * 9
        else:
            assert weight == pytest.approx(totals.denominator, rel=1e-6)  # a mean: the weights sum to it


def test_a_buffer_is_little_more_than_the_arrays_it_carries():
    """And neither values nor experts nor advantages travel unless they are asked for."""
    rng = np.random.default_rng(0)
    size = 2000
    made = [
        Rollout(
            role="a",
            group=str(i // 4),
            tokens=rng.integers(0, 99, size),
            logprobs=-rng.random(size),
            spans=spans_of((100, 2, -1), (size - 100, 0, 3)),
            advantages=0.5,
            values={"teacher_logprobs": -rng.random(size)},
            experts=np.zeros((size - 1, LAYERS, CHOSEN), np.int16),
        )
        for i in range(32)
    ]

    def bytes_a_token(loss, policy):
        return sum(data_parallel_split.split_over_replicas(made, policy, loss=loss).outline.sizes) / (32 * size)

    plain, sft = PolicyLoss(LossConfig(kl_coef=0.0)), PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
    policy = Cut(VOCAB, micro_batch_tokens=4000)
    assert 8 < bytes_a_token(plain, policy) < 8 * 1.01 and bytes_a_token(sft, policy) < bytes_a_token(plain, policy)
    distilled = PolicyLoss(LossConfig(kl_coef=0.0, objective="distilled"))
    assert bytes_a_token(distilled, policy) == pytest.approx(12, rel=0.01)
    policy.replays = True
    assert bytes_a_token(plain, policy) == pytest.approx(8 + 2 * LAYERS * CHOSEN, rel=0.01)


class Watched(TablePolicy):
    """Counts its passes and what they are asked for."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.asked = []

    def statistics(self, work, names=("logprobs",), *, reference=False):
        self.asked.append((tuple(names), reference))
        return super().statistics(work, names, reference=reference)

    def update(self, work, step, loss):
        batch = work.batch(work.micros(step)[0])
        self.asked.append((step, batch.old_logprobs is not None, sorted(batch.values)))
        return super().update(work, step, loss)


HEAD = ["candidates", "engine_candidate_logprobs"]


@objective(needs=["advantages", "old"])
def wants_old(live, batch):
    return -(live.logprobs - batch.old_logprobs).exp() * batch.advantages


@pytest.mark.parametrize(
    ("settings", "size", "passes"),
    [
        ({}, None, [(0, False, [])]),
        ({}, 4, [(("logprobs",), False), (0, True, []), (1, True, [])]),
        ({"kl_coef": 0.1}, None, [(("logprobs",), True), (0, False, [])]),
        ({"objective": "test_data_parallel_split:wants_old"}, None, [(("logprobs",), False), (0, True, [])]),
        (
            {"objective": "rover"},
            None,
            [(("logprobs", "vocab_mean"), False), (0, True, ["old_vocab_mean"])],
        ),
        ({"objective": "distilled"}, None, [(0, False, ["teacher_logprobs"])]),
        ({"centering": 3}, None, [(0, False, HEAD)]),
        (
            {"centering": 3},
            4,
            [
                (("logprobs", "candidate_logprobs"), False),
                *(
                    (step, True, ["candidates", "engine_candidate_logprobs", "old_candidate_logprobs"])
                    for step in (0, 1)
                ),
            ],
        ),
    ],
)
def test_what_a_loss_does_not_ask_for_is_not_computed(settings, size, passes):
    policy = Watched(VOCAB)
    loss = PolicyLoss(LossConfig(**{"kl_coef": 0.0} | settings))
    made = []
    for r in rollouts(2):
        head = (np.zeros((len(r.tokens), 3), np.int32), np.full((len(r.tokens), 3), -2.0, np.float32))
        made.append(replace(r, values={**r.values, **dict(zip(HEAD, head, strict=True))}))
    metrics = update(OneProcess(), Trainee(policy=policy, loss=loss, samples_per_optimizer_step=size), made)
    assert policy.asked == passes and metrics["optimizer_steps"] == len([p for p in passes if isinstance(p[0], int)])


def test_log_probs_come_back_in_the_order_of_the_rollouts():
    made, policy = rollouts(4, count=9), TablePolicy(VOCAB, micro_batch_tokens=50)
    made = [replace(r, advantages=None) for r in made]
    found = policy_logprobs(OneProcess(), policy, made)
    table = policy.table.detach().double().log_softmax(-1)
    for r, own in zip(made, found, strict=True):
        tokens = r.tokens.tolist()
        assert own.dtype == np.float32 and len(own) == len(tokens)
        for i in range(1, len(tokens)):
            before = tokens[i - 2] if i > 1 else tokens[0]
            wanted = table[before * VOCAB + tokens[i - 1], tokens[i]].item() if r.weights[i] > 0 else 0.0
            assert own[i] == pytest.approx(wanted, abs=1e-6)


def test_rollouts_of_several_versions_are_rescored_and_no_others():
    made = rollouts(6, count=9)
    mixed = [len(r.versions) > 1 for r in made]
    assert 0 < sum(mixed) < 9
    policy = TablePolicy(VOCAB, micro_batch_tokens=50)
    work = scatter(OneProcess(), policy, made, loss=PolicyLoss(LossConfig(kl_coef=0.0)), rescore=True)
    assert work.rescored
    ours = policy.statistics(work)["logprobs"]
    rescored = work.rescore(ours)
    for micro in work.micros():
        batch, own = rescored.batch(micro), ours[micro.start : micro.end]
        flags = torch.tensor([mixed[i] for i in work.flat.numbers[micro.first : micro.last]])
        wanted = torch.where(batch.spread(flags), own, work.batch(micro).engine_logprobs)
        assert torch.equal(batch.engine_logprobs[batch.mask], wanted[batch.mask])
    gaps = []
    for rescore in (False, True):
        trainee = Trainee(policy=TablePolicy(VOCAB), loss=PolicyLoss(LossConfig(kl_coef=0.0)))
        gaps.append(update(OneProcess(), trainee, made, rescore=rescore)["engine_gap"])
    assert gaps[1] < gaps[0]


def test_an_update_does_not_depend_on_the_cut_into_micro_batches():
    made = rollouts(8, count=20)
    tables, metrics = [], []
    for budget in (30, 1000):
        policy = TablePolicy(VOCAB, micro_batch_tokens=budget)
        trainee = Trainee(policy=policy, loss=PolicyLoss(LossConfig(kl_coef=0.1, aggregation="prompt_mean")))
        metrics.append(without_speed(update(OneProcess(), trainee, made)))
        tables.append(policy.table.detach())
    assert torch.equal(*tables) and metrics[0] == metrics[1] and metrics[0]["optimizer_steps"] == 1.0


def test_completions_without_advantages_are_learned():
    made = [replace(r, advantages=None, partner_weight=0.0) for r in rollouts(9)]
    trainee = Trainee(policy=TablePolicy(VOCAB), loss=PolicyLoss(LossConfig(objective="nll", kl_coef=0.0)))
    before = evaluate(OneProcess(), trainee, made)["loss"]
    assert update(OneProcess(), trainee, made)["loss"] == pytest.approx(before, rel=1e-6)
    assert evaluate(OneProcess(), trainee, made)["loss"] < before


def test_split_is_even_and_complete():
    assert [len(p) for p in data_parallel_split.split(80, 32)] == [26, 27, 27] and data_parallel_split.split(
        4, None
    ) == [range(4)]
    assert [i for p in data_parallel_split.split(7, 3) for i in p] == list(range(7))


def test_what_is_joined_ends_with_0_whatever_stood_there():
    buffer = np.full(4, 7)
    _join(buffer, [np.array([1, 2]), np.array([3])])
    assert buffer.tolist() == [1, 2, 3, 0]
    _join(buffer[:1], [])
    assert buffer.tolist() == [0, 2, 3, 0]
