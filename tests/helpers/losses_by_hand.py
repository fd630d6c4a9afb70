"""Losses of the field's methods by hand: their formulas one token at a time in float64, with derivatives from pen and
paper, and batches of a few rollouts to compare with."""

import math
from collections import namedtuple
from dataclasses import replace

import numpy as np
import torch

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import Statistics, pack
from megatron_rl.config.schema import CorrectionConfig
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
    values = {name: [row + width * rng.standard_normal(len(row)) for row in base] for name in NAMES}
    values = {name: [np.minimum(row, -0.01) for row in rows] for name, rows in values.items()}
    advantages = [rng.standard_normal(len(text) if by_token else 1) * 1.5 for text in TEXTS]
    batch, live = batch_of(TEXTS, advantages, values)
    return batch, live, [tokens_of(i, values, advantages) for i in range(len(TEXTS))]


def tokens_of(number, values, advantages):
    """Lists the tokens of a rollout that are in the loss. `next`: the same of the token behind, None where that is not
    in the loss."""
    text, first = TEXTS[number], sum(map(len, TEXTS[:number]))
    written, behind = [], None
    for t in reversed(range(1, len(text))):
        weight = {"P": 1.0, "J": PARTNER_WEIGHT, "E": 0.0}[text[t]]
        numbers = [float(values[name][number][t]) for name in NAMES]
        advantage = float(np.broadcast_to(advantages[number], len(text))[t])
        token = Token(first + t - 1, text[t] == "P", weight, advantage, *numbers, behind)
        behind = token if weight else None
        written = [token, *written] if weight else written
    return written


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
        total = sum(-w * t.advantage * mean for t, w in zip(tokens, weights, strict=True))
        slopes = [total / n if log == t.new - t.old else 0.0 for t, log in zip(tokens, logs, strict=True)]
        return [-t.advantage * mean for t in tokens], slopes

    return of


def each(function):
    """Makes a formula of a rollout from (loss, derivative) of one token."""

    def of(tokens, weights):
        terms = [function(t) for t in tokens]
        return [loss for loss, _ in terms], [w * slope for w, (_, slope) in zip(weights, terms, strict=True)]

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


def dppo(*, by, low, high, cap):
    """-sg(min(u, cap)) A log pi of the tokens that have not moved too far along A, by the change of the probability or
    by the KL divergence of (token, all others) from the old policy (arXiv 2602.04879; verl 0.9.1, core_algos.py,
    compute_policy_loss_dppo_tv, compute_policy_loss_dppo_kl)."""

    @each
    def of(t):
        pi, old = math.exp(t.new), math.exp(t.old)
        far = abs(pi - old)
        if by == "kl":
            far = old * math.log(old / pi) + (1 - old) * math.log((1 - old + 1e-8) / (1 - pi + 1e-8))
        along = pi > old if t.advantage > 0 else pi < old
        if along and far > (high if t.advantage > 0 else low):
            return 0.0, 0.0
        weight = -min(math.exp(t.new - t.old), cap) * t.advantage
        return weight * t.new, weight

    return of


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
    "dppo_tv": (
        dict(objective="dppo_tv", objective_args={"clip_low": 0.02, "clip_high": 0.03, "cap": 1.3}),
        dppo(by="tv", low=0.02, high=0.03, cap=1.3),
    ),
    "dppo_kl": (
        dict(objective="dppo_kl", objective_args={"clip_low": 0.002, "clip_high": 0.003}),
        dppo(by="kl", low=0.002, high=0.003, cap=20.0),
    ),
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
    ratios = [t.old - t.engine for t in tokens if t.own]
    weighted = []
    for t in tokens:
        if correction is None or correction.kind == "none" or not t.own:
            weighted.append((1.0, False))
            continue
        logs = {"token": t.old - t.engine, "sequence": sum(ratios), "geometric": sum(ratios) / len(ratios)}
        r = math.exp(logs[correction.level])
        low, high = correction.low or 0.0, correction.high or math.inf
        outside = not low <= r <= high
        inside = {"truncate": r, "mask": r, "drop": 1.0}[correction.kind]
        weighted.append(
            ((min(max(r, low), high) if correction.kind == "truncate" else 0.0) if outside else inside, outside)
        )
    return [w for w, _ in weighted], [o for _, o in weighted]


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


def close(actual, expected, **bounds):
    bounds = {"rtol": 1e-10, "atol": 1e-12} | bounds
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected, dtype=torch.float64), **bounds)
