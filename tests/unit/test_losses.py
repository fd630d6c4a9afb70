"""Losses against formulas written token by token in float64: values, gradients, metrics, and independence of how a batch is cut."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.losses import CompletionLoss, PolicyLoss
from megatron_rl.config.schema import LossConfig
from megatron_rl.types import Batch

LENGTHS = [5, 1, 9, 4, 6]
CONFIGS = {
    "plain": LossConfig(kl_coef=0.0),
    "paper": LossConfig(kl_coef=0.001, entropy_coef=0.001),
    "k1": LossConfig(kl_coef=0.5, kl="k1"),
    "k2_sequence": LossConfig(kl_coef=0.5, kl="k2", aggregation="sequence_mean", entropy_coef=0.1),
    "k3_clip_higher": LossConfig(kl_coef=0.5, kl="k3", clip_low=0.1, clip_high=0.4),
    "tis_sequence": LossConfig(kl_coef=0.2, tis_cap=1.3, aggregation="sequence_mean"),
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
        engine_logprobs=near(0.3),
        advantages=torch.randn(n, generator=draw, dtype=dtype),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
        old_logprobs=near(0.3) if old else None,
        reference_logprobs=near(0.3),
    )
    entropy = torch.rand(n, generator=draw, dtype=dtype)
    return near(0.3).requires_grad_(), entropy.requires_grad_(), batch


def by_hand(config, logprobs, entropy, batch):
    """Loss, gradients to logprobs and entropy, and sums, one token at a time in Python floats; gradients from pen and paper."""
    lp, ent, n = logprobs.tolist(), entropy.tolist(), len(batch.tokens)
    old = lp if batch.old_logprobs is None else batch.old_logprobs.tolist()
    weight = [1.0] * n
    if config.aggregation == "sequence_mean":
        for a, b in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
            weight[a:b] = [1 / max(1, int(batch.mask[a:b].sum()))] * (b - a)
    total, d_lp, d_ent = 0.0, [0.0] * n, [0.0] * n
    sums = dict.fromkeys(("clip_frac", "ratio", "entropy", "engine_gap", "engine_kl"), 0.0) | (
        {"kl_ref": 0.0} if config.kl_coef else {}
    )
    for i in (i for i in range(n) if batch.mask[i]):
        adv, engine, ref = (
            batch.advantages[i].item(),
            batch.engine_logprobs[i].item(),
            batch.reference_logprobs[i].item(),
        )
        ratio = math.exp(lp[i] - old[i])
        bound = (ratio > 1 + config.clip_high and adv > 0) or (ratio < 1 - config.clip_low and adv < 0)
        used = (1 + config.clip_high if ratio > 1 else 1 - config.clip_low) if bound else ratio
        tis = 1.0 if config.tis_cap is None else min(math.exp(old[i] - engine), config.tis_cap)
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
    total, sums = PolicyLoss(config)(logprobs, entropy, batch)
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
    total, sums = PolicyLoss(LossConfig(kl_coef=0.0))(logprobs, entropy, batch)
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
        engine_logprobs=zero,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 1]),
        old_logprobs=zero,
    )
    total, sums = PolicyLoss(LossConfig(kl_coef=0.0, clip_low=0.2, clip_high=0.28))(logprobs, zero, batch)
    total.backward()
    assert (total.item(), logprobs.grad.item(), sums["clip_frac"].item()) == pytest.approx((value, gradient, clipped))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "cut", [[[0, 1, 2, 3, 4]], [[4, 2], [0], [3], [1]], [[1, 3], [0, 2, 4]]], ids=["whole", "mixed", "untrained_first"]
)
def test_sums_and_gradients_do_not_depend_on_the_cut_into_micro_batches(config, cut):
    logprobs, entropy, batch = make(3)
    loss = PolicyLoss(config)
    whole, sums = loss(logprobs, entropy, batch)
    parts, part_sums, denominator = [], dict.fromkeys(sums, 0.0), 0.0
    cu = batch.cu_seqlens.tolist()
    for sequences in cut:
        index = torch.cat([torch.arange(cu[s], cu[s + 1]) for s in sequences])
        micro = batch.select(sequences)
        value, found = loss(logprobs[index], entropy[index], micro)
        parts.append(value)
        denominator += loss.denominator(micro)
        part_sums = {name: part_sums[name] + found[name].item() for name in sums}
    close(sum(parts).detach(), whole.detach())
    for got, want in zip(gradients(sum(parts), logprobs, entropy), gradients(whole, logprobs, entropy), strict=True):
        close(got, want)
    assert part_sums == pytest.approx({name: s.item() for name, s in sums.items()}) and denominator == loss.denominator(
        batch
    )


def test_sequence_mean_is_the_mean_of_the_sequences_own_means():
    logprobs, entropy, batch = make(5, old=False)
    token, sequence = (PolicyLoss(LossConfig(kl_coef=0.0, aggregation=a)) for a in ("token_mean", "sequence_mean"))
    cu = batch.cu_seqlens.tolist()
    own = [-batch.advantages[a:b][batch.mask[a:b]] for a, b in zip(cu, cu[1:], strict=False) if batch.mask[a:b].any()]
    assert len(own) == 3 and (sequence.denominator(batch), token.denominator(batch)) == (3.0, float(sum(map(len, own))))
    close(
        sequence(logprobs, entropy, batch)[0].detach() / sequence.denominator(batch),
        torch.stack([o.mean() for o in own]).mean(),
    )
    close(token(logprobs, entropy, batch)[0].detach() / token.denominator(batch), torch.cat(own).mean())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_at_an_untrained_place_reaches_loss_sums_or_gradients(config, poison):
    clean, clean_entropy, batch = make(6)
    want, want_sums = PolicyLoss(config)(clean, clean_entropy, batch)
    want_grads = gradients(want, clean, clean_entropy)

    def spoil(values):
        return torch.where(batch.mask, values.detach(), poison)

    names = ("engine_logprobs", "advantages", "old_logprobs", "reference_logprobs")
    spoiled = replace(batch, **{name: spoil(getattr(batch, name)) for name in names})
    logprobs, entropy = spoil(clean).requires_grad_(), spoil(clean_entropy).requires_grad_()
    total, sums = PolicyLoss(config)(logprobs, entropy, spoiled)
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
        advantages=zero,
        cu_seqlens=torch.tensor([0, 1]),
        **fields,
    )


def expected_sum(name, config, live, sampled_from, **logprobs):
    """The exact expectation of a logged sum over tokens drawn from `sampled_from`."""
    zero = torch.zeros(1, dtype=torch.float64)
    rows = [PolicyLoss(config)(live[t : t + 1], zero, one_token(t, **logprobs))[1][name] for t in range(len(live))]
    return (sampled_from.exp() * torch.stack(rows)).sum()


def test_engine_kl_is_the_kl_of_the_engine_that_sampled_to_the_trainer():
    """Tokens come from the engine: the k3 estimate is unbiased with the ratio trainer / engine, not with its inverse."""
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
    """In expectation over the engine's tokens, with a cap that never binds; with a cap of 1 no token weighs more than its own."""
    trainer, engine = two_models()
    gains = torch.randn(len(trainer), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    live = trainer.clone().requires_grad_()
    zero = torch.zeros(1, dtype=torch.float64)
    found = {}
    for cap in (1e9, 1.0):
        totals = []
        for t in range(len(live)):
            batch = replace(one_token(t, engine_logprobs=engine, old_logprobs=trainer), advantages=gains[t : t + 1])
            totals.append(PolicyLoss(LossConfig(kl_coef=0.0, tis_cap=cap))(live[t : t + 1], zero, batch)[0])
        [found[cap]] = torch.autograd.grad((engine.exp() * torch.stack(totals)).sum(), live)
    close(found[1e9], -trainer.exp() * gains)
    close(found[1.0], -torch.minimum(trainer, engine).exp() * gains)


def test_kl_without_reference_is_refused_with_the_cure():
    logprobs, entropy, batch = make()
    with pytest.raises(ValueError, match=r"kl_coef = 0.5.*reference"):
        PolicyLoss(LossConfig(kl_coef=0.5))(logprobs, entropy, replace(batch, reference_logprobs=None))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_rank_with_nothing_to_train_takes_part_with_zeros(config):
    """With fewer sequences than replicas a rank gets a dummy micro-batch, which has no reference; it must not stop the others."""
    zeros = torch.zeros(4)
    empty = zeros.long()
    batch = Batch(
        tokens=empty,
        labels=empty,
        mask=empty > 0,
        engine_logprobs=zeros,
        advantages=zeros,
        cu_seqlens=torch.tensor([0, 4]),
    )
    live = torch.zeros(4, requires_grad=True)
    total, sums = PolicyLoss(config)(live, zeros, batch)
    total.backward()
    assert total.item() == 0.0 and not live.grad.any() and PolicyLoss(config).denominator(batch) == 0.0
    assert sums.keys() == PolicyLoss(config)(*make())[1].keys() and not any(s.item() for s in sums.values())


def test_float32_as_the_trainer_calls_it_stays_float32_and_close():
    logprobs, entropy, batch = make(8, dtype=torch.float32)
    config = CONFIGS["k2_sequence"]
    total, sums = PolicyLoss(config)(logprobs, entropy, batch)
    assert total.dtype == torch.float32 and {s.dtype for s in sums.values()} == {torch.float32}
    assert total.item() == pytest.approx(by_hand(config, logprobs, entropy, batch)[0], rel=1e-5)


def test_completion_loss_is_the_cross_entropy_of_the_trained_labels():
    _, _, batch = make(2)
    n = len(batch.tokens)
    logits = torch.randn(n, 40, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    picked = torch.where(batch.mask, logprobs.gather(1, batch.labels[:, None])[:, 0], -math.inf)
    loss = CompletionLoss()
    total, sums = loss(picked, entropy, batch)
    labels = batch.labels.masked_fill(~batch.mask, -100)
    reference = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    close((total / loss.denominator(batch)).detach(), reference.detach())
    close(
        torch.autograd.grad(total, logits, retain_graph=True)[0] / loss.denominator(batch),
        torch.autograd.grad(reference, logits)[0],
    )
    assert (
        sums["entropy"].item() == pytest.approx(entropy[batch.mask].sum().item()) and not sums["entropy"].requires_grad
    )
