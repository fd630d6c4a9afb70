"""Tokens at the bounds of objectives: an advantage of 0, a ratio that is the bound itself."""

import math
from dataclasses import replace

import pytest
import torch
from test_policy_loss import make

from megatron_rl.algorithms.corrections import off_policy_mask
from megatron_rl.algorithms.objectives import find
from megatron_rl.batches.packed_batch import Batch, Statistics


def bounds(objective, ratios, advantages, **args):
    """The metrics of an objective by token, for tokens of one rollout each."""
    count = len(ratios)
    batch = Batch(
        tokens=torch.zeros(2 * count, dtype=torch.int64),
        labels=torch.zeros(2 * count, dtype=torch.int64),
        mask=torch.tensor([True, False] * count),
        weights=torch.tensor([1.0, 0.0] * count, dtype=torch.float64),
        engine_logprobs=torch.zeros(2 * count, dtype=torch.float64),
        advantages=torch.tensor([[a, 0.0] for a in advantages], dtype=torch.float64).flatten(),
        cu_seqlens=torch.arange(0, 2 * count + 1, 2),
        old_logprobs=torch.zeros(2 * count, dtype=torch.float64),
    )
    live = torch.tensor([[math.log(r), 0.0] for r in ratios], dtype=torch.float64).flatten()
    found = find(objective, args)(Statistics(live), batch, **args)
    loss, metrics = found if isinstance(found, tuple) else (found, {})
    return {name: values[::2].tolist() for name, values in {"loss": loss, **metrics}.items()}


def test_an_advantage_of_0_is_on_the_side_that_the_objective_says_and_bounds_themselves_are_within():
    """GMPO clips from above where the advantage is not negative, VESPO takes 0 for positive, CISPO's cap is allowed."""
    high, low = math.exp(0.5), math.exp(-0.5)
    assert bounds("gmpo", [high, low, high, low], [0.0, 0.0, -1.0, -1.0])["clip_frac"] == [True, False, False, True]
    positive = bounds("vespo", [2.0, 2.0, 2.0], [0.0, 1.0, -1.0])["rollout_weight"]
    assert positive[:2] == pytest.approx([4 * math.exp(-3)] * 2) and positive[2] == pytest.approx(8 * math.exp(-2))
    assert bounds("cispo", [1.0, 2.0], [1.0, 1.0], cap=1.0)["clip_frac"] == [False, True]
    clipped = bounds("clipped", [1.0, 1.0, 2.0, 2.0], [1.0, -1.0, 0.0, -1.0], clip_low=0.0, clip_high=0.0)
    assert clipped["clip_frac"] == [False] * 4
    dual = bounds("clipped", [2.0, 4.0, 4.0], [-1.0, -1.0, 0.0], dual_clip=2.0)
    assert dual["dual_clip_frac"] == [False, True, False] and dual["loss"] == [2.0, 2.0, 0.0]


def test_the_off_policy_mask_takes_negative_advantages_beyond_its_threshold_alone():
    _, _, batch = make(3)
    n = len(batch.tokens)
    for moved, advantage, masked in ((0.5, -1.0, True), (0.25, -1.0, False), (0.5, 0.0, False), (0.5, 1.0, False)):
        zeros = torch.zeros(n, dtype=torch.float64)
        own = replace(batch, engine_logprobs=zeros + moved, advantages=zeros + advantage)
        weights, metrics = off_policy_mask(0.25, zeros, own)
        assert torch.equal(weights == 0, batch.mask & masked) and torch.equal(
            metrics["off_policy_masked"], batch.mask & masked
        )
