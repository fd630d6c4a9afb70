"""Losses against formulas written token by token in float64: values, gradients, metrics, and independence of how a
batch is cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.algorithms.objectives import objective
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import Batch, Statistics
from megatron_rl.config.schema import ConfigError, CorrectionConfig, LossConfig

LENGTHS = [5, 1, 9, 4, 6]
CONFIGS = {
    "plain": LossConfig(kl_coef=0.0),
    "paper": LossConfig(kl_coef=0.001, entropy_coef=0.001),
    "k1": LossConfig(kl_coef=0.5, kl="k1"),
    "k2_sequence": LossConfig(kl_coef=0.5, kl="k2", aggregation="sequence_mean", entropy_coef=0.1),
    "k3_clip_higher": LossConfig(kl_coef=0.5, kl="k3", clip_low=0.1, clip_high=0.4),
    "tis_sequence": LossConfig(
        kl_coef=0.2, correction=CorrectionConfig(kind="truncate", high=1.3), aggregation="sequence_mean"
    ),
}


def make(seed=0, *, old=True, dtype=torch.float64):
    """logprobs [N], entropy [N] (leaves) and a batch whose sequence 1 (one token) and 3 (no response) train nothing."""
    draw = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    mask = torch.rand(n, generator=draw) < 0.6
    ends = torch.tensor(LENGTHS).cumsum(0)
    mask[ends - 1] = False  # the last token of a sequence predicts nothing
    mask[ends[2] : ends[3]] = False
    mask[0] = mask[ends[1]] = mask[ends[3]] = True
    mean = -2 * torch.rand(n, generator=draw, dtype=dtype)

    def near(width):
        return mean + width * torch.randn(n, generator=draw, dtype=dtype)

    batch = Batch(
        tokens=torch.arange(n),
        labels=torch.arange(n),
        mask=mask,
        weights=mask.to(dtype),
        engine_logprobs=near(0.3),
        advantages=torch.randn(n, generator=draw, dtype=dtype),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
        old_logprobs=near(0.3) if old else None,
        reference_logprobs=near(0.3),
    )
    entropy = torch.rand(n, generator=draw, dtype=dtype)
    return near(0.3).requires_grad_(), entropy.requires_grad_(), batch


def weighed(config, batch, groups=None):
    """The batch with the weights of an optimizer step that holds it alone, and the denominator."""
    counts = [float(part.sum()) for part in batch.mask.split(batch.lengths.tolist())]
    numbers = np.arange(len(counts)) if groups is None else np.array(groups)
    weights, denominator = PolicyLoss(config).aggregate(np.array(counts), numbers)
    return replace(batch, weights=batch.mask * batch.spread(torch.from_numpy(weights))), denominator


def select(batch, sequences):
    """The batch of the named sequences, and where its positions stand in the whole."""
    cu = batch.cu_seqlens.tolist()
    index = torch.cat([torch.arange(cu[s], cu[s + 1]) for s in sequences])
    lengths = torch.tensor([0] + [cu[s + 1] - cu[s] for s in sequences])
    names = (
        "tokens",
        "labels",
        "mask",
        "weights",
        "engine_logprobs",
        "advantages",
        "old_logprobs",
        "reference_logprobs",
    )
    own = {name: None if (values := getattr(batch, name)) is None else values[index] for name in names}
    return Batch(cu_seqlens=lengths.cumsum(0), **own), index


def by_hand(config, logprobs, entropy, batch):
    """Loss, gradients to logprobs and entropy, and sums, one token at a time in Python floats; gradients from pen and
    paper."""
    lp, ent, n = logprobs.tolist(), entropy.tolist(), len(batch.tokens)
    old = lp if batch.old_logprobs is None else batch.old_logprobs.tolist()
    weight = [1.0] * n
    if config.aggregation == "sequence_mean":
        for a, b in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
            weight[a:b] = [float(np.float32(1 / max(1, int(batch.mask[a:b].sum()))))] * (b - a)
    total, d_lp, d_ent = 0.0, [0.0] * n, [0.0] * n
    sums = dict.fromkeys(("clip_frac", "ratio", "entropy", "engine_gap", "engine_kl"), 0.0) | (
        {"kl_ref": 0.0} if config.kl_coef else {}
    )
    sums |= {"correction_truncated": 0.0} if config.correction else {}
    for i in (i for i in range(n) if batch.mask[i]):
        adv, engine, ref = (
            batch.advantages[i].item(),
            batch.engine_logprobs[i].item(),
            batch.reference_logprobs[i].item(),
        )
        ratio = math.exp(lp[i] - old[i])
        bound = (ratio > 1 + config.clip_high and adv > 0) or (ratio < 1 - config.clip_low and adv < 0)
        used = (1 + config.clip_high if ratio > 1 else 1 - config.clip_low) if bound else ratio
        tis = 1.0 if config.correction is None else min(math.exp(old[i] - engine), config.correction.high)
        q = math.exp(ref - lp[i])
        kl = {"k1": lp[i] - ref, "k2": (lp[i] - ref) ** 2 / 2, "k3": q - 1 - (ref - lp[i])}[config.kl]
        d_kl = {"k1": 1.0, "k2": lp[i] - ref, "k3": 1 - q}[config.kl]
        total += weight[i] * (-tis * used * adv + config.kl_coef * kl - config.entropy_coef * ent[i])
        d_lp[i] = weight[i] * ((0.0 if bound else -tis * ratio * adv) + config.kl_coef * d_kl)
        d_ent[i] = -weight[i] * config.entropy_coef
        gap = old[i] - engine
        sums["clip_frac"] += bound
        sums["ratio"] += ratio
        sums["entropy"] += ent[i]
        sums["engine_gap"] += abs(gap)
        sums["engine_kl"] += math.exp(gap) - 1 - gap
        if config.kl_coef:
            sums["kl_ref"] += q - 1 - (ref - lp[i])
        if config.correction:
            sums["correction_truncated"] += math.exp(gap) > config.correction.high
    return total, d_lp, d_ent, sums


def gradients(total, *leaves):
    """Zeros where a leaf plays no part: the entropy with coefficient 0."""
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True, retain_graph=True)


def close(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_value_gradients_and_sums_equal_the_formulas_token_by_token(config, old):
    logprobs, entropy, batch = make(old=old)
    batch, _ = weighed(config, batch)
    total, sums = PolicyLoss(config)(Statistics(logprobs, entropy), batch)
    d_lp, d_ent = gradients(total, logprobs, entropy)
    value, want_lp, want_ent, want_sums = by_hand(config, logprobs, entropy, batch)
    close(total.detach(), value)
    close(d_lp, want_lp)
    close(d_ent, want_ent)
    assert {name: s.item() for name, s in sums.items()} == pytest.approx(want_sums) and not any(
        s.requires_grad for s in sums.values()
    )
    assert not old or 0 < want_sums["clip_frac"] < int(batch.mask.sum())  # the draw reaches both sides of the clip


def test_at_ratio_1_the_gradient_is_minus_the_advantage():
    logprobs, entropy, batch = make(old=False)
    total, sums = PolicyLoss(LossConfig(kl_coef=0.0))(Statistics(logprobs, entropy), batch)
    total.backward()
    assert torch.equal(logprobs.grad, torch.where(batch.mask, -batch.advantages, 0.0))
    assert (sums["ratio"].item(), sums["clip_frac"].item()) == (float(batch.mask.sum()), 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [  # clip_low 0.2, clip_high 0.28
        (1.25, 1.0, -1.25, -1.25, 0),
        (1.30, 1.0, -1.28, 0.0, 1),
        (1.30, -1.0, 1.30, 1.30, 0),  # worse than the bound: it still learns
        (0.75, -1.0, 0.80, 0.0, 1),
        (0.75, 1.0, -0.75, -0.75, 0),
        (0.85, -1.0, 0.85, 0.85, 0),
        (1.50, 0.0, 0.0, 0.0, 0),
    ],
)
def test_each_side_of_the_ratio_has_its_own_clip(ratio, advantage, value, gradient, clipped):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    batch = Batch(
        tokens=torch.zeros(1, dtype=torch.int64),
        labels=torch.zeros(1, dtype=torch.int64),
        mask=torch.tensor([True]),
        weights=torch.ones(1, dtype=torch.float64),
        engine_logprobs=zero,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 1]),
        old_logprobs=zero,
    )
    total, sums = PolicyLoss(LossConfig(kl_coef=0.0, clip_low=0.2, clip_high=0.28))(Statistics(logprobs, zero), batch)
    total.backward()
    assert (total.item(), logprobs.grad.item(), sums["clip_frac"].item()) == pytest.approx((value, gradient, clipped))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "cut", [[[0, 1, 2, 3, 4]], [[4, 2], [0], [3], [1]], [[1, 3], [0, 2, 4]]], ids=["whole", "mixed", "untrained_first"]
)
def test_sums_and_gradients_do_not_depend_on_the_cut_into_micro_batches(config, cut):
    logprobs, entropy, batch = make(3)
    loss, (batch, _) = PolicyLoss(config), weighed(config, batch)
    whole, sums = loss(Statistics(logprobs, entropy), batch)
    parts, part_sums = [], dict.fromkeys(sums, 0.0)
    for sequences in cut:
        micro, index = select(batch, sequences)
        value, found = loss(Statistics(logprobs[index], entropy[index]), micro)
        parts.append(value)
        part_sums = {name: part_sums[name] + found[name].item() for name in sums}
    close(sum(parts).detach(), whole.detach())
    for got, want in zip(gradients(sum(parts), logprobs, entropy), gradients(whole, logprobs, entropy), strict=True):
        close(got, want)
    assert part_sums == pytest.approx({name: s.item() for name, s in sums.items()})


def test_each_aggregation_is_the_mean_that_its_name_says():
    logprobs, entropy, batch = make(5, old=False)
    cu = batch.cu_seqlens.tolist()
    own = [-batch.advantages[a:b][batch.mask[a:b]] for a, b in zip(cu, cu[1:], strict=False) if batch.mask[a:b].any()]
    groups = [0, 0, 1, 1, 1]  # of own: [0], [2], [4]
    means = {
        "token_mean": torch.cat(own).mean(),
        "sequence_mean": torch.stack([o.mean() for o in own]).mean(),
        "prompt_mean": torch.stack([own[0].mean(), torch.cat(own[1:]).mean()]).mean(),
        "constant": torch.cat(own).sum() / (5 * 64),
    }
    for kind, wanted in means.items():
        config = LossConfig(kl_coef=0.0, aggregation=kind, max_tokens=64)
        weighted, denominator = weighed(config, batch, groups)
        found = PolicyLoss(config)(Statistics(logprobs, entropy), weighted)[0].detach() / denominator
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)  # weights are float32


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_at_an_untrained_place_reaches_loss_sums_or_gradients(config, poison):
    clean, clean_entropy, batch = make(6)
    batch, _ = weighed(config, batch)
    want, want_sums = PolicyLoss(config)(Statistics(clean, clean_entropy), batch)
    want_grads = gradients(want, clean, clean_entropy)

    def spoil(values):
        return torch.where(batch.mask, values.detach(), poison)

    names = ("engine_logprobs", "advantages", "old_logprobs", "reference_logprobs")
    spoiled = replace(batch, **{name: spoil(getattr(batch, name)) for name in names})
    logprobs, entropy = spoil(clean).requires_grad_(), spoil(clean_entropy).requires_grad_()
    total, sums = PolicyLoss(config)(Statistics(logprobs, entropy), spoiled)
    assert torch.equal(total, want) and all(torch.equal(sums[name], want_sums[name]) for name in want_sums)
    for got, expected in zip(gradients(total, logprobs, entropy), want_grads, strict=True):
        assert torch.equal(got, expected)


def two_models(num_tokens=6):
    draw = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, num_tokens, generator=draw, dtype=torch.float64).log_softmax(-1)
    return p, q


def one_token(token, **logprobs):
    """A batch of one trained token that stands for `token` of the distributions given."""
    zero = torch.zeros(1, dtype=torch.float64)
    fields = {"engine_logprobs": zero} | {name: values[token : token + 1] for name, values in logprobs.items()}
    where = torch.zeros(1, dtype=torch.int64)
    return Batch(
        tokens=where,
        labels=where,
        mask=torch.tensor([True]),
        weights=torch.ones(1, dtype=torch.float64),
        advantages=zero,
        cu_seqlens=torch.tensor([0, 1]),
        **fields,
    )


def expected_sum(name, config, live, sampled_from, **logprobs):
    """The exact expectation of a logged sum over tokens drawn from `sampled_from`."""
    zero = torch.zeros(1, dtype=torch.float64)
    rows = [
        PolicyLoss(config)(Statistics(live[t : t + 1], zero), one_token(t, **logprobs))[1][name]
        for t in range(len(live))
    ]
    return (sampled_from.exp() * torch.stack(rows)).sum()


def test_engine_kl_is_the_kl_of_the_engine_that_sampled_to_the_trainer():
    """Tokens come from the engine: the k3 estimate is unbiased with the ratio trainer / engine, not with its
    inverse."""
    trainer, engine = two_models()
    found = expected_sum(
        "engine_kl", LossConfig(kl_coef=0.0), trainer, engine, engine_logprobs=engine, old_logprobs=trainer
    )
    close(found, (engine.exp() * (engine - trainer)).sum())


def test_kl_ref_is_the_kl_of_the_policy_to_its_reference_whatever_the_estimate_in_the_loss():
    policy, reference = two_models()
    for kind in ("k1", "k2", "k3"):
        found = expected_sum("kl_ref", LossConfig(kl_coef=1.0, kl=kind), policy, policy, reference_logprobs=reference)
        close(found, (policy.exp() * (policy - reference)).sum())


def test_truncated_importance_sampling_gives_the_trainers_gradient_from_the_engines_samples():
    """The mean is taken over the engine's tokens, with a cap that never binds; with a cap of 1 no token weighs more
    than its own.
    """
    trainer, engine = two_models()
    gains = torch.randn(len(trainer), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    live = trainer.clone().requires_grad_()
    zero = torch.zeros(1, dtype=torch.float64)
    found = {}
    for cap in (1e9, 1.0):
        totals = []
        for t in range(len(live)):
            batch = replace(one_token(t, engine_logprobs=engine, old_logprobs=trainer), advantages=gains[t : t + 1])
            config = LossConfig(kl_coef=0.0, correction=CorrectionConfig(kind="truncate", high=cap))
            totals.append(PolicyLoss(config)(Statistics(live[t : t + 1], zero), batch)[0])
        [found[cap]] = torch.autograd.grad((engine.exp() * torch.stack(totals)).sum(), live)
    close(found[1e9], -trainer.exp() * gains)
    close(found[1.0], -torch.minimum(trainer, engine).exp() * gains)


def test_kl_without_reference_is_refused_with_the_cure():
    logprobs, entropy, batch = make()
    with pytest.raises(ValueError, match=r"kl_coef = 0.5.*reference"):
        PolicyLoss(LossConfig(kl_coef=0.5))(Statistics(logprobs, entropy), replace(batch, reference_logprobs=None))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_rank_with_nothing_to_train_takes_part_with_zeros(config):
    """A rank, where there are fewer sequences than replicas, gets a dummy micro-batch, which has no reference; it must
    not stop the others.
    """
    zeros = torch.zeros(4)
    empty = zeros.long()
    batch = Batch(
        tokens=empty,
        labels=empty,
        mask=empty > 0,
        weights=zeros,
        engine_logprobs=zeros,
        advantages=zeros,
        cu_seqlens=torch.tensor([0, 4]),
    )
    live = torch.zeros(4, requires_grad=True)
    total, sums = PolicyLoss(config)(Statistics(live, zeros), batch)
    total.backward()
    assert total.item() == 0.0 and not live.grad.any()
    logprobs, entropy, some = make()
    assert sums.keys() == PolicyLoss(config)(Statistics(logprobs, entropy), some)[1].keys()
    assert not any(s.item() for s in sums.values())


def test_float32_as_the_trainer_calls_it_stays_float32_and_close():
    logprobs, entropy, batch = make(8, dtype=torch.float32)
    config = CONFIGS["k2_sequence"]
    batch, _ = weighed(config, batch)
    total, sums = PolicyLoss(config)(Statistics(logprobs, entropy), batch)
    assert total.dtype == torch.float32 and {s.dtype for s in sums.values()} == {torch.float32}
    assert total.item() == pytest.approx(by_hand(config, logprobs, entropy, batch)[0], rel=1e-5)


def test_completion_loss_is_the_cross_entropy_of_the_trained_labels():
    _, _, batch = make(2)
    n = len(batch.tokens)
    logits = torch.randn(n, 40, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    picked = torch.where(batch.mask, logprobs.gather(1, batch.labels[:, None])[:, 0], -math.inf)
    loss = PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
    total, sums = loss(Statistics(picked, entropy), batch)
    _, denominator = loss.aggregate(np.array([float(batch.mask.sum())]), np.zeros(1))
    labels = batch.labels.masked_fill(~batch.mask, -100)
    reference = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    close((total / denominator).detach(), reference.detach())
    close(
        torch.autograd.grad(total, logits, retain_graph=True)[0] / denominator,
        torch.autograd.grad(reference, logits)[0],
    )
    assert (
        sums["entropy"].item() == pytest.approx(entropy[batch.mask].sum().item()) and not sums["entropy"].requires_grad
    )


@pytest.mark.parametrize(
    ("kind", "weights", "denominator"),
    [
        ("token_mean", [1, 1, 1, 1], 10.0),
        ("sequence_mean", [1 / 2, 0, 1 / 5, 1 / 3], 3.0),
        ("prompt_mean", [1 / 2, 1 / 2, 1 / 8, 1 / 8], 2.0),
        ("constant", [1, 1, 1, 1], 4 * 16.0),
    ],
)
def test_aggregation_is_a_function_of_counts_alone(kind, weights, denominator):
    counts, groups = np.array([2, 0, 5, 3]), np.array([7, 7, 2, 2])
    found, by = aggregate(kind, counts, groups, max_tokens=16)
    assert found.dtype == np.float32 and found.tolist() == np.array(weights, np.float32).tolist() and by == denominator
    if kind == "constant":
        with pytest.raises(ValueError, match="max_tokens"):
            aggregate(kind, counts, groups)


def positive_only(live, batch, *, least=0.0):
    """Stands for a user's own: REINFORCE on tokens whose advantage is above `least`."""
    return -live.logprobs * batch.advantages * (batch.advantages > least)


@objective(needs=["teacher_logprobs", "old"])
def towards_teacher(live, batch):
    gap = live.logprobs - batch.values["teacher_logprobs"]
    return gap**2, {"teacher_gap": gap.abs()}


def test_an_objective_is_named_in_the_config():
    logprobs, entropy, batch = make(4)
    loss = PolicyLoss(
        LossConfig(objective="test_policy_loss:positive_only", objective_args={"least": 0.5}, kl_coef=0.0)
    )
    total, sums = loss(Statistics(logprobs, entropy), batch)
    kept = batch.mask & (batch.advantages > 0.5)
    close(total.detach(), -(logprobs * batch.advantages)[kept].sum().detach())
    assert loss.needs == {"advantages", "entropy"} and "clip_frac" not in sums


def test_an_objective_says_what_it_asks_for_and_what_it_reports():
    logprobs, entropy, batch = make(4)
    loss = PolicyLoss(LossConfig(objective="test_policy_loss:towards_teacher"))
    assert loss.needs == {"teacher_logprobs", "old", "entropy", "reference"}
    teacher = torch.where(batch.mask, -1.0, math.nan)
    _, sums = loss(Statistics(logprobs, entropy), replace(batch, values={"teacher_logprobs": teacher}))
    close(sums["teacher_gap"], (logprobs + 1).abs()[batch.mask].sum().detach())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective": "clippd"}, "one of a_lol, bradley_terry, cispo, clipped"),
        (
            {"objective_args": {"clip": 0.1}},
            "loss.objective_args clip: clipped takes clip_low, clip_high, dual_clip, ratio_bound",
        ),
        ({"objective": "test_policy_loss:CONFIGS"}, "is a dict: name a function"),
    ],
)
def test_an_objective_that_cannot_be_used_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        PolicyLoss(LossConfig(**settings))


def test_gspo_clips_the_mean_ratio_of_a_rollout_and_shares_its_gradient():
    logprobs, entropy, batch = make(7)
    config = LossConfig(objective="gspo", objective_args={"clip_low": 0.05, "clip_high": 0.05}, kl_coef=0.0)
    total, sums = PolicyLoss(config)(Statistics(logprobs, entropy), batch)
    wanted, clipped = 0.0, 0
    for where in torch.arange(len(batch.tokens)).split(batch.lengths.tolist()):
        own = where[batch.mask[where]]
        if len(own):
            mean = (logprobs[own] - batch.old_logprobs[own]).mean()
            ratio = (mean.detach() + logprobs[own] - logprobs[own].detach()).exp()
            gains, bounded = (r * batch.advantages[own] for r in (ratio, ratio.clamp(0.95, 1.05)))
            wanted, clipped = wanted - torch.min(gains, bounded).sum(), clipped + int((bounded < gains).sum())
    close(total.detach(), wanted.detach())
    close(gradients(total, logprobs)[0], gradients(wanted, logprobs)[0])
    assert sums["clip_frac"].item() == clipped > 0


def test_cispo_weighs_tokens_by_the_capped_ratio_without_its_gradient():
    logprobs, entropy, batch = make(8)
    config = LossConfig(objective="cispo", objective_args={"cap": 1.1}, kl_coef=0.0)
    total, _ = PolicyLoss(config)(Statistics(logprobs, entropy), batch)
    weight = (logprobs - batch.old_logprobs).exp().clamp(max=1.1).detach() * batch.advantages
    close(gradients(total, logprobs)[0], torch.where(batch.mask, -weight, 0.0))


def test_rover_regresses_onto_the_next_positions_mean_over_the_vocabulary():
    logprobs, entropy, batch = make(9)
    means = torch.randn(2, len(batch.tokens), dtype=torch.float64)
    loss = PolicyLoss(LossConfig(objective="rover", objective_args={"temperature": 2.0}, kl_coef=0.0))
    total, _ = loss(Statistics(logprobs, entropy, means[0]), replace(batch, values={"old_vocab_mean": means[1]}))
    wanted = 0.0
    for i in batch.mask.nonzero()[:, 0].tolist():
        later = 2.0 * (means[0] - means[1])[i + 1] if i + 1 < len(batch.mask) and batch.mask[i + 1] else 0.0
        wanted += (2.0 * (logprobs[i] - batch.old_logprobs[i]) - batch.advantages[i] - later) ** 2
    close(total.detach(), wanted.detach())
    first, _ = loss(Statistics(logprobs, entropy, means[0]), replace(batch, old_logprobs=None))
    close(first.detach(), batch.advantages[batch.mask].square().sum())  # at the old weights both log-ratios are 0
