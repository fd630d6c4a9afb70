"""Objectives, corrections and KL of the field's methods: against their formulas, one token at a time in float64 with
derivatives from pen and paper, and against what released code gave for the same numbers (tests/golden/losses.json)."""

import json
import math
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from specs import spec_of

from megatron_rl.algorithms.corrections import correction_weights
from megatron_rl.algorithms.policy_loss import PolicyLoss, k3
from megatron_rl.batches.packed_batch import Batch, Statistics, pack
from megatron_rl.config.files import load
from megatron_rl.config.schema import CORRECTION_AHEAD, ConfigError, CorrectionConfig, LossConfig, TrainConfig
from megatron_rl.main import main
from megatron_rl.session import builders
from megatron_rl.types import Author, Rollout

Token = namedtuple("Token", "place own weight advantage new old engine reference teacher mean old_mean next")
AUTHORS = {"E": Author.ENVIRONMENT, "P": Author.POLICY, "J": Author.PARTNER}
# prompts, tools' outputs between iterations, a partner's tokens, one response of one token, one rollout without any
TEXTS = ["EEEPPPPEEPPP", "EP", "EPJPPJJPP", "EEEEE", "EPPPPEP", "EEPPPPPPPPP"]
PARTNER_WEIGHT = 0.25
NAMES = ("new", "old", "engine", "reference", "teacher", "mean", "old_mean")


def rollout(text, number, advantage):
    edges = [0] + [i for i in range(1, len(text)) if text[i] != text[i - 1]] + [len(text)]
    spans = [(a, b, AUTHORS[text[a]], 0) for a, b in zip(edges, edges[1:], strict=False)]
    return Rollout(
        role="a",
        group=str(number // 2),
        tokens=np.arange(len(text)),
        logprobs=np.zeros(len(text)),
        spans=spans,
        advantages=advantage,
        partner_weight=PARTNER_WEIGHT,
    )


def batch_of(texts, advantages, values):
    """Packs rollouts and puts float64 values [T] per rollout and name at their labels; nan where nothing is in the
    loss. Returns the batch and the live statistics, whose log-probs and entropies are leaves."""
    batch = pack([rollout(text, i, 0.0) for i, (text, _) in enumerate(zip(texts, advantages, strict=True))])

    def place(rows):
        packed = torch.cat([torch.tensor([*row[1:], math.nan], dtype=torch.float64) for row in rows])
        return torch.where(batch.counted, packed, math.nan)

    at = {name: place(values[name]) for name in NAMES}
    batch = replace(
        batch,
        weights=batch.weights.double(),
        engine_logprobs=at["engine"],
        old_logprobs=at["old"],
        reference_logprobs=at["reference"],
        advantages=place([np.broadcast_to(a, len(t)) for a, t in zip(advantages, texts, strict=True)]),
        values={"teacher_logprobs": at["teacher"], "old_vocab_mean": at["old_mean"]},
    )
    entropy = torch.where(batch.counted, 1.0, math.nan).double().requires_grad_()
    return batch, Statistics(at["new"].requires_grad_(), entropy, at["mean"])


def draw(seed, *, width=0.5, by_token=False):
    """Draws a batch of TEXTS whose policies lie about `width` nats apart, and its tokens in the loss by rollout."""
    rng = np.random.default_rng(seed)
    base = [-0.05 - 2 * rng.random(len(text)) for text in TEXTS]
    values = {name: [own + width * rng.standard_normal(len(own)) for own in base] for name in NAMES}
    values = {name: [np.minimum(own, -0.01) for own in rows] for name, rows in values.items()}
    advantages = [rng.standard_normal(len(text) if by_token else 1) * 1.5 for text in TEXTS]
    batch, live = batch_of(TEXTS, advantages, values)
    return batch, live, [tokens_of(i, values, advantages) for i in range(len(TEXTS))]


def tokens_of(number, values, advantages):
    """Lists the tokens of a rollout that are in the loss. `next`: the same of the token behind, None where that is not
    in the loss."""
    text, first = TEXTS[number], sum(map(len, TEXTS[:number]))
    out, behind = [], None
    for t in reversed(range(1, len(text))):
        weight = {"P": 1.0, "J": PARTNER_WEIGHT, "E": 0.0}[text[t]]
        numbers = [float(values[name][number][t]) for name in NAMES]
        advantage = float(np.broadcast_to(advantages[number], len(text))[t])
        token = Token(first + t - 1, text[t] == "P", weight, advantage, *numbers, behind)
        behind = token if weight else None
        out = [token, *out] if weight else out
    return out


# Every formula: ([n] tokens of a rollout, [n] weights) -> [n] losses, [n] derivatives of the weighted sum of the losses
# by the log-prob of each token.


def ppo(*, low=0.2, high=0.2, dual=None, bound=None):
    """PPO's clip (arXiv 1707.06347, eq. 7); dual clip max(min(u A, clip(u) A), c A) for A < 0 (arXiv 1912.09729;
    volcengine/verl, core_algos.py, compute_policy_loss_vanilla); pre-clip of log u (arXiv 2505.02835;
    yfzhang114/r1_reward, openrlhf/models/loss.py)."""

    def of(tokens, weights):
        losses, slopes = [], []
        for t, w in zip(tokens, weights, strict=True):
            log_u, moves = t.new - t.old, 1.0
            if bound is not None and abs(log_u) > math.log(bound):
                log_u, moves = math.copysign(math.log(bound), log_u), 0.0
            u = math.exp(log_u)
            clipped = min(max(u, 1 - low), 1 + high)
            gain, slope = u * t.advantage, moves * u * t.advantage
            if clipped * t.advantage < gain:
                gain, slope = clipped * t.advantage, 0.0
            if dual is not None and t.advantage < 0 and gain < dual * t.advantage:
                gain, slope = dual * t.advantage, 0.0
            losses.append(-gain)
            slopes.append(-w * slope)
        return losses, slopes

    return of


def gspo(*, low, high, cap=math.inf):
    """GSPO-token: s = exp(mean log u), s_t = sg(s) pi / sg(pi) (arXiv 2507.18071); log s at most 10 in
    volcengine/verl, core_algos.py, compute_policy_loss_gspo."""

    def of(tokens, weights):
        s = math.exp(sum(t.new - t.old for t in tokens) / len(tokens)) if tokens else 1.0
        moves, s = s <= cap, min(s, cap)
        losses, slopes = [], []
        for t, w in zip(tokens, weights, strict=True):
            clipped = min(max(s, 1 - low), 1 + high) * t.advantage
            bound = clipped < s * t.advantage
            losses.append(-(clipped if bound else s * t.advantage))
            slopes.append(0.0 if bound or not moves else -w * s * t.advantage)
        return losses, slopes

    return of


def gmpo(*, low, high):
    """exp of the mean of min(sgn(A) log u, sgn(A) clip(log u, -low, high)) sgn(A), times A (arXiv 2507.20673;
    callsys/GMPO, train_zero_math_gmpo.py:676-688)."""

    def of(tokens, weights):
        logs = []
        for t in tokens:
            sign, log_u = -1.0 if t.advantage < 0 else 1.0, t.new - t.old
            logs.append(sign * min(sign * log_u, sign * min(max(log_u, -low), high)))
        n = len(tokens)
        mean = math.exp(sum(logs) / n) if n else 1.0
        whole = sum(-w * t.advantage * mean for t, w in zip(tokens, weights, strict=True))
        slopes = [whole / n if log == t.new - t.old else 0.0 for t, log in zip(tokens, logs, strict=True)]
        return [-t.advantage * mean for t in tokens], slopes

    return of


def each(function):
    """Makes a formula of a rollout from (loss, derivative) of one token."""

    def of(tokens, weights):
        found = [function(t) for t in tokens]
        return [loss for loss, _ in found], [w * slope for w, (_, slope) in zip(weights, found, strict=True)]

    return of


@each
def cispo(t):
    """-sg(min(u, cap)) A log pi (arXiv 2506.13585; huggingface/trl, grpo_trainer.py:3080); cap 1.3."""
    weight = min(math.exp(t.new - t.old), 1.3) * t.advantage
    return -weight * t.new, -weight


@each
def sapo(t):
    """-(4 / tau) sigmoid(tau (u - 1)) A; tau is 1 where A > 0, else 1.05 (arXiv 2511.20347; volcengine/verl b178a3c,
    core_algos.py, compute_policy_loss_sapo)."""
    tau, u = 1.0 if t.advantage > 0 else 1.05, math.exp(t.new - t.old)
    gate = 1 / (1 + math.exp(-tau * (u - 1)))
    return -4 / tau * gate * t.advantage, -4 * gate * (1 - gate) * u * t.advantage


def vespo(corrected):
    """-sg(w^k exp(lambda (1 - w))) A log pi, w the product of all u and of the correction's weights (arXiv 2602.10693;
    FloyedShen/VESPO aa1f304, recipe/vespo/code/core_algos.py, compute_policy_loss_vespo)."""

    def of(tokens, weights):
        product = math.prod(math.exp(t.new - t.old) for t in tokens)
        w = max(product * math.prod(max(c, 1e-8) for c in corrected), 1e-8)
        slopes = []
        for t in tokens:
            k, fall = (2, 3) if t.advantage >= 0 else (3, 2)
            slopes.append(-(w**k) * math.exp(fall * (1 - w)) * t.advantage)
        losses = [slope * t.new for t, slope in zip(tokens, slopes, strict=True)]
        return losses, [share * slope for share, slope in zip(weights, slopes, strict=True)]

    return of


@each
def opmd(t):
    """-A log pi / (1 + tau), tau 1 (Trinity-RFT, trinity/algorithm/policy_loss_fn/opmd_policy_loss.py)."""
    return -t.advantage * t.new / 2, -t.advantage / 2


@each
def rover(t):
    """Q = T (log pi - log pi_old); (Q - sg(A + T (mean log pi - mean log pi_old at the next)))^2, T 2 (arXiv
    2509.24981; tinnerhrhe/ROVER b0fa587, Math/verl/workers/actor/dp_actor.py:926-961, core_algos.py,
    compute_rover_loss)."""
    q, later = 2 * (t.new - t.old), 0.0 if t.next is None else 2 * (t.next.mean - t.next.old_mean)
    return (q - t.advantage - later) ** 2, 2 * 2 * (q - t.advantage - later)


@each
def distilled(t):
    """-u sg(log teacher - log pi), 0 where pi fell more than 0.2 below the engine's (PrimeIntellect-ai/prime-rl,
    src/prime_rl/trainer/rl/loss.py, ref_kl_loss_fn)."""
    if t.own and math.exp(t.new) - math.exp(t.engine) < -0.2:
        return 0.0, 0.0
    loss = -math.exp(t.new - t.old) * (t.teacher - t.new)
    return loss, loss


@each
def rl_plus(t):
    """Own tokens: -u A; an expert's: -2 pi / (pi_old + (pi_old + 1) / 2) A (1 - sg(pi))^0.5 (arXiv 2508.00222;
    YihongDong/RL-PLUS, rlplus_core_alg.py, compute_token_on_off_policy_loss)."""
    if t.own:
        loss = -math.exp(t.new - t.old) * t.advantage
    else:
        p, old = math.exp(t.new), math.exp(t.old)
        loss = -2 * p / (old + 0.5 * (old + 1)) * t.advantage * math.sqrt(1 - p)
    return loss, loss


METHODS = {
    "clipped": ({}, ppo()),
    "dual clip": (dict(clip_high=0.28, objective_args={"dual_clip": 1.5}), ppo(high=0.28, dual=1.5)),
    "pre-clip": (dict(objective_args={"ratio_bound": 1.6}), ppo(bound=1.6)),
    "gspo": (dict(objective="gspo", objective_args={"clip_low": 0.05, "clip_high": 0.06}), gspo(low=0.05, high=0.06)),
    "gspo, capped": (
        dict(objective="gspo", objective_args={"clip_low": 0.05, "clip_high": 0.06, "ratio_cap": 1.1}),
        gspo(low=0.05, high=0.06, cap=1.1),
    ),
    "gmpo": (dict(objective="gmpo"), gmpo(low=0.4, high=0.4)),
    "gmpo, narrow": (
        dict(objective="gmpo", objective_args={"clip_low": 0.1, "clip_high": 0.3}),
        gmpo(low=0.1, high=0.3),
    ),
    "cispo": (dict(objective="cispo", objective_args={"cap": 1.3}), cispo),
    "sapo": (dict(objective="sapo"), sapo),
    "vespo": (dict(objective="vespo"), vespo),
    "opmd": (dict(objective="reinforce", objective_args={"tau": 1.0}), opmd),
    "rover": (dict(objective="rover", objective_args={"temperature": 2.0}), rover),
    "distilled": (dict(objective="distilled", objective_args={"max_fall": 0.2}), distilled),
    "rl_plus": (dict(objective="rl_plus"), rl_plus),
}
CORRECTIONS = {
    "none": None,
    "off": CorrectionConfig(kind="none"),
    "truncate": CorrectionConfig(kind="truncate", high=1.3),
    "truncate both": CorrectionConfig(kind="truncate", low=0.8, high=1.2),
    "truncate by sequence": CorrectionConfig(kind="truncate", level="sequence", high=1.5),
    "mask": CorrectionConfig(kind="mask", low=0.5, high=1.6),
    "mask by sequence": CorrectionConfig(kind="mask", level="sequence", low=0.4, high=2.5),
    "mask by mean": CorrectionConfig(kind="mask", level="geometric", low=0.85, high=1.2),
    "drop": CorrectionConfig(kind="drop", low=0.7),
    "drop by mean": CorrectionConfig(kind="drop", level="geometric", low=0.85, high=1.2),
}


def correction_of(method, name):
    """Finds a correction by its name; vespo takes that by token in place of any other."""
    return CORRECTIONS[name.split(" by ")[0] if method == "vespo" else name]


def weight_by_hand(correction, tokens):
    """[n] weights of a rollout's tokens, and for each whether its r is outside; a partner's have weight 1."""
    own = [t.old - t.engine for t in tokens if t.own]
    found = []
    for t in tokens:
        if correction is None or correction.kind == "none" or not t.own:
            found.append((1.0, False))
            continue
        logs = {"token": t.old - t.engine, "sequence": sum(own), "geometric": sum(own) / len(own)}
        r = math.exp(logs[correction.level])
        low, high = correction.low or 0.0, correction.high or math.inf
        outside = not low <= r <= high
        inside = {"truncate": r, "mask": r, "drop": 1.0}[correction.kind]
        found.append(
            ((min(max(r, low), high) if correction.kind == "truncate" else 0.0) if outside else inside, outside)
        )
    return [w for w, _ in found], [o for _, o in found]


def weighed(config, batch):
    """The batch with the weights of an optimizer step that holds it alone, and the denominator."""
    counts = batch.sequence_sums(batch.weights)
    weights, denominator = PolicyLoss(config).aggregate(counts.numpy(), np.arange(len(counts)))
    return replace(batch, weights=batch.weights * batch.spread(torch.from_numpy(weights).double())), denominator


def shares_by_hand(aggregation, rollouts):
    """[S] weight of each rollout's tokens in the mean."""
    totals = [sum(t.weight for t in tokens) for tokens in rollouts]
    if aggregation == "token_mean":
        return [1 / sum(totals)] * len(totals)
    return [float(np.float32(1 / total)) / sum(x > 0 for x in totals) if total else 0.0 for total in totals]


def close(found, expected, **bounds):
    bounds = {"rtol": 1e-10, "atol": 1e-12} | bounds
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected, dtype=torch.float64), **bounds)


def compare(method, correction, aggregation, *, seed, by_token):
    settings, formula = METHODS[method]
    config = LossConfig(**{"kl_coef": 0.0, "aggregation": aggregation, "correction": correction} | settings)
    batch, live, rollouts = draw(seed, by_token=by_token)
    batch, denominator = weighed(config, batch)
    total, sums = PolicyLoss(config)(live, batch)
    gradient = torch.autograd.grad(total / denominator, live.logprobs)[0]
    value, slopes, outside = 0.0, torch.zeros(len(gradient), dtype=torch.float64), 0
    for tokens, share in zip(rollouts, shares_by_hand(aggregation, rollouts), strict=True):
        corrected, out = weight_by_hand(correction, tokens)
        inside = method == "vespo"  # the correction is part of its formula and does not weigh the loss
        weights = [share * t.weight * (1.0 if inside else c) for t, c in zip(tokens, corrected, strict=True)]
        losses, by = (formula(corrected) if inside else formula)(tokens, weights)
        value += sum(w * loss for w, loss in zip(weights, losses, strict=True))
        slopes[[t.place for t in tokens]] = torch.tensor(by, dtype=torch.float64)
        outside += sum(out)
    close(total.detach() / denominator, value)
    close(gradient, slopes)
    assert torch.isfinite(gradient).all() and gradient[~batch.counted].eq(0).all()
    return sums, outside, batch


@pytest.mark.parametrize(
    ("correction", "aggregation", "by_token"),
    [("none", "token_mean", False), ("truncate by sequence", "sequence_mean", True)],
)
@pytest.mark.parametrize("method", METHODS)
def test_value_and_gradient_of_a_method_are_its_formulas(method, correction, aggregation, by_token):
    for seed in range(3):
        compare(method, correction_of(method, correction), aggregation, seed=seed, by_token=by_token)


@pytest.mark.parametrize(("method", "aggregation"), [("clipped", "token_mean"), ("gmpo", "sequence_mean")])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_weighs_by_its_formula_and_logs_the_share_outside(correction, method, aggregation):
    seen, tokens, config = 0, 0, CORRECTIONS[correction]
    for seed in range(6):
        sums, outside, batch = compare(method, config, aggregation, seed=seed, by_token=True)
        name = None if config is None or config.kind == "none" else config.kind
        names = {"truncate": "correction_truncated", "mask": "correction_masked", "drop": "correction_masked"}
        assert {n for n in sums if "correction" in n} == ({names[name]} if name else set())
        if name:
            assert sums[names[name]].item() == outside
        seen, tokens = seen + outside, tokens + int(batch.mask.sum())
    assert config is None or config.kind == "none" or 0 < seen < tokens, "the draw reaches both sides of the bounds"


def test_metrics_count_the_tokens_that_a_clip_decides():
    counts = dict.fromkeys(("clip_frac", "dual_clip_frac", "gmpo", "drop_frac"), 0)
    for seed in range(6):
        batch, live, rollouts = draw(seed)
        own = [t for tokens in rollouts for t in tokens if t.own]
        ratios = [(math.exp(t.new - t.old), t.advantage) for t in own]
        wanted = {
            "clip_frac": sum((u > 1.28 and a > 0) or (u < 0.8 and a < 0) for u, a in ratios),
            "dual_clip_frac": sum(u > 1.5 and a < 0 for u, a in ratios),
            "gmpo": sum(math.log(u) > 0.4 if a >= 0 else math.log(u) < -0.4 for u, a in ratios),
            "drop_frac": sum(math.exp(t.new) - math.exp(t.engine) < -0.2 for t in own),
        }
        found = {}
        for method in ("dual clip", "gmpo", "distilled"):
            found[method] = PolicyLoss(LossConfig(**{"kl_coef": 0.0} | METHODS[method][0]))(live, batch)[1]
        assert wanted == {
            "clip_frac": found["dual clip"]["clip_frac"].item(),
            "dual_clip_frac": found["dual clip"]["dual_clip_frac"].item(),
            "gmpo": found["gmpo"]["clip_frac"].item(),
            "drop_frac": found["distilled"]["drop_frac"].item(),
        }
        counts = {name: counts[name] + number for name, number in wanted.items()}
    assert all(counts.values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("correction", ["truncate by sequence", "mask by mean"])
def test_sums_and_gradients_do_not_depend_on_how_rollouts_are_packed(method, correction):
    settings = {"kl_coef": 0.1, "correction": correction_of(method, correction), "kl_bias_correction": True}
    settings |= {"off_policy_mask": 0.1} | METHODS[method][0]
    loss = PolicyLoss(LossConfig(**settings))
    batch, live, _ = draw(11, by_token=True)
    whole, sums = loss(live, batch)
    parts = []
    for a, b in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        names = ("tokens", "labels", "mask", "weights", "engine_logprobs", "advantages", "old_logprobs")
        own = {name: getattr(batch, name)[a:b] for name in (*names, "reference_logprobs")}
        values = {name: value[a:b] for name, value in batch.values.items()}
        one = Batch(cu_seqlens=torch.tensor([0, b - a]), values=values, **own)
        parts.append(loss(Statistics(live.logprobs[a:b], live.entropy[a:b], live.vocab_mean[a:b]), one))
    close(sum(total for total, _ in parts).detach(), whole.detach())
    for got, want in zip(
        *(torch.autograd.grad(x, live.logprobs, retain_graph=True) for x in (sum(t for t, _ in parts), whole)),
        strict=True,
    ):
        close(got, want)
    for name, value in sums.items():
        close(sum(own[name] for _, own in parts), value.item())


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_with_nothing_to_train_gives_the_same_metrics_and_zeros(method):
    settings = {"kl_coef": 0.1, "correction": correction_of(method, "mask by sequence"), "kl_bias_correction": True}
    settings |= {"off_policy_mask": 0.1} | METHODS[method][0]
    loss = PolicyLoss(LossConfig(**settings))
    batch, live, _ = draw(1)
    dummy, logprobs = batch.dummy(4), torch.zeros(4, requires_grad=True)
    total, sums = loss(Statistics(logprobs, torch.zeros(4), torch.zeros(4)), dummy)
    total.backward()
    assert total.item() == 0 and not logprobs.grad.any() and not any(value.item() for value in sums.values())
    assert sums.keys() == loss(live, batch)[1].keys()


RELEASED = json.loads((Path(__file__).parents[1] / "golden/losses.json").read_text())


@pytest.mark.parametrize("name", RELEASED["cases"])
def test_released_code_gave_these_losses_and_gradients(name):
    case, rows = RELEASED["cases"][name], [dict(row) for row in RELEASED["rollouts"]]
    texts = [row["authors"] for row in rows]
    for number, first in case.get("partner", ()):
        texts[number] = texts[number][:first] + texts[number][first:].replace("P", "J")
    scale = case.get("scale", 1.0)
    values = {key: [row.get(key, [0.0] * len(row["old"])) for row in rows] for key in NAMES}
    values["new"] = [[o + scale * (n - o) for n, o in zip(row["new"], row["old"], strict=True)] for row in rows]
    batch, live = batch_of(texts, [0.0 if case.get("no_advantage") else row["advantage"] for row in rows], values)
    batch = replace(batch, weights=batch.counted.double())  # released code knows no partner's weight
    settings = {"kl_coef": 0.0} | case["config"]
    if "correction" in settings:
        settings["correction"] = CorrectionConfig(**settings["correction"])
    config = LossConfig(**settings)
    batch, denominator = weighed(config, batch)
    total, sums = PolicyLoss(config)(live, batch)
    gradient = torch.autograd.grad(total / denominator, live.logprobs)[0]
    wanted = torch.cat([torch.tensor([*row[1:], 0.0], dtype=torch.float64) for row in case["gradient"]])
    close(
        total.detach() / denominator, case["loss"], rtol=1e-6
    )  # weights are float32; released code adds 1e-8 to counts
    close(gradient, wanted, rtol=1e-6, atol=1e-9)
    for metric, share in case.get("metrics", {}).items():
        assert sums[metric].item() / batch.mask.sum().item() == pytest.approx(share, rel=1e-6)


def test_the_kl_clamp_holds_k3_and_its_gradient_without_nan():
    """verl and the release of RL Tango: clamp(exp(d) - d - 1, max=10). d = log q - log p = 5 gives 142 or 10."""
    p = torch.tensor([-5.1, -1.0, -300.0, -0.1], requires_grad=True)  # float32: exp(299) overflows
    q = torch.tensor([-0.1, -1.2, -1.0, -40.0])
    found = k3(p, q, clamp=10.0)
    found.sum().backward()
    assert k3(p, q)[0].item() == pytest.approx(math.exp(5) - 6, rel=1e-5)
    assert found.tolist() == pytest.approx([10.0, math.exp(-0.2) + 0.2 - 1, 10.0, 10.0])
    assert p.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-0.2), 0.0, 0.0])


def test_the_kl_clamp_is_in_the_loss_and_not_in_the_logged_kl():
    batch, live, rollouts = draw(3, width=3.0)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    clamped, sums = PolicyLoss(LossConfig(kl_coef=1.0, kl_clamp=10.0))(live, batch)
    tokens = [t for own in rollouts for t in own]
    each = [math.exp(t.reference - t.new) - (t.reference - t.new) - 1 for t in tokens]
    close(clamped.detach(), sum(t.weight * min(k, 10.0) for t, k in zip(tokens, each, strict=True)))
    close(sums["kl_ref"], sum(k for t, k in zip(tokens, each, strict=True) if t.own))
    assert max(each) > 10


def test_the_bias_corrected_kl_is_k3_times_the_live_ratio():
    """DeepSeek-V3.2 (arXiv 2512.02556); TRL's use_bias_correction_kl."""
    batch, live, rollouts = draw(5)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    total, sums = PolicyLoss(LossConfig(kl_coef=0.3, kl_bias_correction=True))(live, batch)
    value, slopes = 0.0, torch.zeros(len(batch.tokens), dtype=torch.float64)
    for t in [t for own in rollouts for t in own]:
        u, d = math.exp(t.new - t.old), t.reference - t.new
        value += 0.3 * t.weight * u * (math.exp(d) - d - 1)
        slopes[t.place] = 0.3 * t.weight * u * ((math.exp(d) - d - 1) + (1 - math.exp(d)))
    close(total.detach(), value)
    close(torch.autograd.grad(total, live.logprobs)[0], slopes)
    plain = PolicyLoss(LossConfig(kl_coef=0.3))(live, batch)
    close(sums["kl_ref"], plain[1]["kl_ref"].item())
    assert abs(total.item() - plain[0].item()) > 1e-3


@pytest.mark.parametrize(("corrected", "unbiased"), [(True, True), (False, False)])
def test_the_bias_corrected_kl_has_the_gradient_of_the_kl_over_an_older_policys_tokens(corrected, unbiased):
    """Every word of a small vocabulary is a rollout of one token, weighed by its probability under the old policy."""
    old, reference = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    logits = torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64, requires_grad=True)
    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)[0]
    loss, labels = PolicyLoss(LossConfig(kl_coef=1.0, kl_bias_correction=corrected)), [0, 2, 4]
    batch = pack([rollout("EP", i, 0.0) for i in range(3)])

    def placed(values):
        return torch.zeros(6, dtype=torch.float64).index_put((torch.tensor(labels),), values)

    batch = replace(
        batch,
        weights=placed(old.exp()),
        old_logprobs=placed(old),
        engine_logprobs=placed(old),
        reference_logprobs=placed(reference),
    )
    total, _ = loss(Statistics(placed(logits.log_softmax(0)), torch.zeros(6)), batch)
    found = torch.autograd.grad(total, logits)[0]
    assert torch.allclose(found, exact, rtol=1e-10) == unbiased


def test_the_off_policy_mask_leaves_out_rollouts_that_are_worse_and_far_from_their_sampler():
    """DeepSeek-V3.2 (arXiv 2512.02556); huggingface/trl f2cd577, grpo_trainer.py, get_off_policy_mask. KL stays."""
    seen = [0, 0]
    for seed in range(6):
        batch, live, rollouts = draw(seed, by_token=seed % 2 == 1)
        config = LossConfig(kl_coef=0.2, off_policy_mask=0.1)
        total, sums = PolicyLoss(config)(live, batch)
        value, masked = 0.0, 0
        for tokens in rollouts:
            moved = [t.engine - t.new for t in tokens if t.own]
            far = sum(moved) / max(1, len(moved)) > 0.1
            losses, _ = ppo()(tokens, [1.0] * len(tokens))
            for t, loss in zip(tokens, losses, strict=True):
                out = t.own and far and t.advantage < 0
                d = t.reference - t.new
                value += t.weight * ((0.0 if out else loss) + 0.2 * (math.exp(d) - d - 1))
                masked += out
        close(total.detach(), value)
        assert sums["off_policy_masked"].item() == masked
        seen = [seen[0] + masked, seen[1] + int(batch.mask.sum())]
    assert 0 < seen[0] < seen[1], "the draw reaches both sides of the bound"


@pytest.mark.parametrize("objective", ["sapo", "vespo"])
def test_ratios_beyond_any_exp_leave_no_nan_in_soft_objectives(objective):
    batch = replace(
        pack([rollout("EP", i, 0.0) for i in range(4)]),
        advantages=torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        old_logprobs=torch.tensor([-300.0, 0.0, -300.0, 0.0, -300.0, 0.0, -0.1, 0.0]),
    )
    live = torch.tensor([-0.1, 0.0, -0.1, 0.0, -0.1, 0.0, -300.0, 0.0], requires_grad=True)
    total, _ = PolicyLoss(LossConfig(objective=objective, kl_coef=0.0))(Statistics(live, torch.zeros(8)), batch)
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(live.grad).all() and live.grad.abs().max() < 1e-6


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask", "drop"])
def test_log_ratios_beyond_any_exp_leave_no_nan(kind, level):
    batch = pack([rollout("EPPP", 0, 0.0)])
    for far in (1e4, -1e4):
        config = CorrectionConfig(kind=kind, level=level, low=0.5)
        weights, _ = correction_weights(config, torch.tensor([far, 0.0, 0.0, 0.0]), batch)
        assert torch.isfinite(weights).all() and not torch.isnan(weights * 0.0).any()
        assert (weights[0] > 1 if far > 0 and kind != "drop" else weights[0] <= 1) and weights[3] == 1


def test_float32_stays_float32():
    batch, live, _ = draw(2)
    single = replace(
        batch,
        **{n: getattr(batch, n).float() for n in ("weights", "engine_logprobs", "advantages", "old_logprobs")},
        values={name: value.float() for name, value in batch.values.items()},
    )
    loose = Statistics(live.logprobs.float(), live.entropy.float(), live.vocab_mean.float())
    for method, (settings, _) in METHODS.items():
        corrected = {"correction": correction_of(method, "mask by sequence"), "off_policy_mask": 0.1}
        config = LossConfig(**{"kl_coef": 0.0} | corrected | settings)
        total, sums = PolicyLoss(config)(loose, single)
        assert total.dtype == torch.float32 and {s.dtype for s in sums.values()} == {torch.float32}
        assert total.item() == pytest.approx(PolicyLoss(config)(live, batch)[0].item(), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective_args": {"dual_clip": 0.5}}, "loss.objective_args.dual_clip = 0.5: give greater than 1"),
        ({"objective_args": {"dual_clip": "3"}}, "loss.objective_args.dual_clip = '3': give a valid number"),
        ({"objective_args": {"ratio_bound": 1.0}}, "loss.objective_args.ratio_bound = 1.0"),
        ({"objective": "gmpo", "objective_args": {"clip_low": -0.1}}, "loss.objective_args.clip_low = -0.1"),
        ({"objective": "cispo", "objective_args": {"cap": 0.0}}, "loss.objective_args.cap = 0.0"),
        ({"objective": "sapo", "objective_args": {"tau_neg": 0.0}}, "loss.objective_args.tau_neg = 0.0"),
        ({"objective": "vespo", "objective_args": {"lambda_pos": 0.0}}, "loss.objective_args.lambda_pos = 0.0"),
        (
            {"objective": "vespo", "correction": CORRECTIONS["mask by sequence"]},
            "loss.correction.level = 'sequence' with loss.objective = 'vespo'",
        ),
        ({"objective": "cispo", "objective_args": {"cap": math.inf}}, "loss.objective_args.cap = inf"),
        ({"objective": "cispo", "objective_args": {"cap": True}}, "loss.objective_args.cap = True"),
        ({"objective": "distilled", "objective_args": {"max_fall": 0.0}}, "loss.objective_args.max_fall = 0.0"),
        ({"objective": "reinforce", "objective_args": {"tau": -1.0}}, "loss.objective_args.tau = -1.0"),
        ({"objective": "reinforce", "objective_args": {"clip_low": 0.1}}, "reinforce takes tau"),
        ({"objective": "gspo", "clip_high": 0.28}, "give them in loss.objective_args"),
        ({"kl": "k2", "kl_clamp": 10.0}, "loss.kl_clamp = 10.0 with loss.kl = 'k2'"),
    ],
)
def test_settings_of_an_objective_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        PolicyLoss(LossConfig(**settings))


@pytest.fixture
def base(tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text(
        "roles: {generator: {model: {path: org/model}}}\ndata: {path: problems.jsonl}\n"
        "recipe: {target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 3}}\n"
    )
    return file


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("correction={kind: mask}", "correction.kind = 'mask' without bounds"),
        ("correction={level: sequence, high: 2.0}", "correction.kind: missing"),
        ("correction={kind: none, level: sequence}", "correction.kind = 'none' with level = 'sequence'"),
        ("correction={kind: none, high: 2.0}", "leave these out"),
        ("correction={kind: mask, low: -0.1}", "correction.low = -0.1: give a value greater than or equal to 0"),
        ("correction={kind: mask, low: 0.5, high: 0.4}", "correction.low = 0.5, high = 0.4"),
        ("correction={kind: drop, low: 1.2, high: 3.0}", "must lie within the bounds"),
        ("correction={kind: clip, high: 3.0}", "choose 'none', 'truncate', 'mask' or 'drop'"),
        ("correction={kind: mask, level: word, high: 3.0}", "choose 'token', 'sequence' or 'geometric'"),
        ("off_policy_mask=0.0", "off_policy_mask = 0.0: give a value greater than 0"),
        ("tis_cap=2.0", "unknown key"),
    ],
)
def test_corrections_that_cannot_be_are_refused_where_the_config_is_read(base, override, said):
    with pytest.raises(ConfigError) as error:
        load(TrainConfig, [base], [f"roles.generator.loss.{override}"])
    assert said in str(error.value) and "roles.generator.loss." in str(error.value)


def test_check_refuses_an_objective_that_cannot_be(base, capsys):
    assert main(["check", str(base), "--elsewhere"]) == 0
    assert main(["check", str(base), "--elsewhere", "roles.generator.loss.objective_args.dual_clip=0.5"]) == 2
    assert "roles.generator: loss.objective_args.dual_clip = 0.5: give greater than 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("staleness", "given", "wanted"),
    [
        (0, None, None),
        (2, None, CORRECTION_AHEAD),
        (2, "{kind: none}", CorrectionConfig(kind="none")),
        (2, "{kind: mask, low: 0.5, high: 5.0}", CorrectionConfig(kind="mask", low=0.5, high=5.0)),
    ],
)
def test_rollouts_ahead_of_training_are_corrected_unless_the_role_says_how(base, staleness, given, wanted):
    overrides = ["engine.kind=vllm", f"rollouts.max_staleness={staleness}"]
    overrides += [f"roles.generator.loss.correction={given}"] if given else []
    config = load(TrainConfig, [base], overrides)
    spec = spec_of(config)
    made = builders.trainee(spec.roles["generator"], spec.run, policy=None, refit=None)
    assert made.loss.config.correction == wanted
