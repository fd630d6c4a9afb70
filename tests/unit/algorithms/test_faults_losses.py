"""Faults of losses: probability ratios that float32 cannot hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.algorithms import objectives
from megatron_rl.algorithms.corrections import EXP_LIMIT, bounded_exp
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import VALUE, Statistics, pack
from megatron_rl.config.schema import CorrectionConfig, LossConfig
from megatron_rl.types import Author, Rollout

EXTREMES = (-3000.0, -100.0, -89.0, 0.0)  # log-probs whose differences overflow exp in float32 (from 88.8 on)
CANDIDATES = 3


def extreme_batch():
    """Returns a batch in which new, old, engine's and reference's log-probs take all combinations of EXTREMES, with
    each sign of the advantage, as one rollout for each advantage; and its live log-probs, a leaf."""
    rows = np.array(np.meshgrid(EXTREMES, EXTREMES, EXTREMES, EXTREMES)).reshape(4, -1)
    spans = [(0, 1, Author.ENVIRONMENT, 0), (1, rows.shape[1] // 2, Author.POLICY, 0)]
    spans.append((rows.shape[1] // 2, rows.shape[1] + 1, Author.PARTNER, 0))
    rollouts = [
        Rollout(role="a", group=str(place), tokens=np.arange(rows.shape[1] + 1), logprobs=np.zeros(rows.shape[1] + 1),
                spans=spans, advantages=advantage, partner_weight=0.5)
        for place, advantage in enumerate((-1.5, 0.0, 2.0))
    ]  # fmt: skip
    new, old, engine, reference = (torch.tensor(np.tile(np.append(row, 0.0), 3), dtype=torch.float32) for row in rows)
    batch = replace(pack(rollouts), old_logprobs=old, engine_logprobs=engine, reference_logprobs=reference)
    candidates = torch.stack([old - 1e-3, engine - 2.0, reference - 3.0], dim=-1)
    values = {"teacher_logprobs": reference, "old_vocab_mean": old, "teacher_candidate_logprobs": candidates}
    values["kl"] = torch.zeros_like(old)
    live = new.requires_grad_()
    named = torch.stack([live - 1e-3, live - 2.0, live - 3.0], dim=-1)
    entropy = torch.ones_like(new)
    return replace(batch, values=values), Statistics(live, entropy, new.detach(), named)


SETTINGS = [
    # those of reward models read no log-probs, and have no ratios
    *({"objective": word} for word in sorted(objectives.WORDS) if VALUE not in objectives.find(word, {}).needs),
    {"objective_args": {"dual_clip": 3.0}},
    {"objective": "vespo", "objective_args": {"k_neg": 30.0, "lambda_neg": 0.01}},
    *({"kl_coef": 1.0, "kl": kl, "kl_bias_correction": True} for kl in ("k1", "k2", "k3")),
    {"kl_coef": 1.0, "kl_clamp": 10.0},
    {"kl_coef": 1.0, "off_policy_mask": 0.1},
    *(
        {"objective": word, "correction": CorrectionConfig(kind=kind, level=level, low=0.5)}
        for word, level in (("clipped", "token"), ("clipped", "sequence"), ("gmpo", "geometric"), ("vespo", "token"))
        for kind in ("truncate", "mask", "drop")
    ),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_faults_ratios_beyond_float32_leave_loss_gradient_and_metrics_finite(settings):
    batch, live = extreme_batch()
    total, sums = PolicyLoss(LossConfig(**{"kl_coef": 0.0, **settings}))(live, batch)
    total.backward()
    assert torch.isfinite(total) and all(torch.isfinite(value) for value in sums.values())
    assert torch.isfinite(live.logprobs.grad).all()


def test_faults_a_ratio_that_float32_holds_keeps_every_bit_and_its_gradient():
    logs = torch.linspace(-120.0, EXP_LIMIT, 5001, requires_grad=True)
    plain = logs.detach().requires_grad_()
    weights = torch.linspace(-3.0, 3.0, 5001)
    (weights * bounded_exp(logs)).sum().backward()
    (weights * plain.exp()).sum().backward()
    assert torch.equal(bounded_exp(logs), plain.exp()) and torch.equal(logs.grad, plain.grad)


def test_faults_a_bad_token_whose_ratio_overflows_is_still_made_less_likely():
    """Beyond the limit exp goes on as its tangent: the loss has the slope that it has at the limit, not 0."""
    logs = torch.tensor([EXP_LIMIT, EXP_LIMIT + 50, 1e4], requires_grad=True)
    bounded_exp(logs).sum().backward()
    assert logs.grad.tolist() == pytest.approx([float(torch.tensor(EXP_LIMIT).exp())] * 3)
    assert bounded_exp(logs).diff().min() > 0
