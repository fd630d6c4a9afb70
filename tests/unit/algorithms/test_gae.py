"""Advantages from a critic: against verl's numbers (tests/oracles), and by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracles_verl
import pytest
import torch
from oracles import BAR

from megatron_rl.algorithms.gae import Gae, adapted, assign_gae, gae, mix_steps, whiten
from megatron_rl.algorithms.kl import kl_estimates
from megatron_rl.config.schema import ConfigError
from megatron_rl.types import STEP, Annotations, Author, Rollout, spans_of


@pytest.mark.parametrize("row", oracles_verl.ROWS)
def test_oracles_ppo_is_verls(row):
    assert oracles_verl.ROWS[row][2]() < BAR


def test_oracles_table_of_verl_stands_in_the_docs():
    page = Path(__file__).parents[3] / "docs/reference/methods.md"
    assert oracles_verl.table(measured=False) in page.read_text(), "put the output of tests/oracles/table.py there"


def rollout(*parts, value, outcome=1.0, **more):
    """A rollout of parts (tokens, author), with a critic's values per token."""
    spans = spans_of(*((count, author, 0 if author == Author.POLICY else -1) for count, author in parts))
    tokens = int(spans[-1, 1])
    return Rollout(
        role="generator", group="0", tokens=np.zeros(tokens), logprobs=np.zeros(tokens), spans=spans,
        rewards={"outcome": outcome}, values={"value": np.array(value, np.float32)}, **more,
    )  # fmt: skip


def test_gae_by_loops():
    """Random sequences of every length, also empty ones, against the sums of the paper (eq. 16)."""
    draw, gamma, lam = np.random.default_rng(3), 0.9, 0.7
    lengths = np.array([5, 0, 1, 9, 3, 0, 9])
    rewards, values = draw.normal(size=(2, lengths.sum()))
    found = gae(rewards, values, lengths, gamma=gamma, lam=lam)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        own = slice(end - length, end)
        r, v = rewards[own], np.append(values[own], 0.0)
        deltas = r + gamma * v[1:] - v[:-1]
        for t in range(length):
            wanted = sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t))
            assert found[own][t] == pytest.approx(wanted, abs=1e-12)


def test_gae_turns_have_one_value_and_one_advantage():
    """Two turns of 2 and 3 tokens. With gamma = 0.5 and lam = 1 the first is worth 0.5 x outcome."""
    policy, tool = Author.POLICY, Author.ENVIRONMENT
    own = rollout((1, tool), (2, policy), (2, tool), (3, policy), value=[9, 0.1, 9, 9, 9, 0.2, 9, 9])
    found = assign_gae([own], Gae(gamma=0.5, level="turn", whiten=False), reward="outcome")
    assert found.policy[0].advantages == pytest.approx([0, 0.4, 0.4, 0, 0, 0.8, 0.8, 0.8])
    assert found.critic[0].values["returns"] == pytest.approx([0, 0.5, 0.5, 0, 0, 1, 1, 1])
    assert found.critic[0].values["old_value"] == pytest.approx([0, 0.1, 9, 0, 0, 0.2, 9, 9])


def test_gae_a_rollout_without_trained_tokens_has_no_part():
    one = rollout((1, Author.ENVIRONMENT), (2, Author.POLICY), value=[0, 0.5, 0.25])
    none = rollout((3, Author.ENVIRONMENT), value=[0, 0, 0], outcome=5.0)
    for level in ("token", "turn"):
        alone, both = (assign_gae(own, Gae(level=level), reward="outcome") for own in ([one], [none, one, none]))
        np.testing.assert_array_equal(both.policy[1].advantages, alone.policy[0].advantages)
        assert not np.any(both.policy[0].advantages) and not np.any(both.critic[2].values["returns"])
        assert both.metrics == alone.metrics
    assert assign_gae([], Gae(), reward="outcome").policy == []


def test_gae_weights_come_after_whitening():
    own = [rollout((2, Author.POLICY), value=[0.5, 0.25], outcome=outcome) for outcome in (0.0, 1.0)]
    plain, weighed = (assign_gae(own, Gae(), reward="outcome", weights=w).policy for w in (None, [2.0, 0.5]))
    for a, b, factor in zip(plain, weighed, (2.0, 0.5), strict=True):
        np.testing.assert_allclose(b.advantages, factor * a.advantages, rtol=1e-6)
    assert [r.rewards["trained"] for r in plain] == [0.0, 1.0]


def test_gae_mixes_with_steps_as_tango_does():
    """(1 - alpha) A + alpha S. S is 0 in mean and 1 in deviation over the trained tokens."""
    steps = {STEP: Annotations(np.array([[1, 2], [2, 3]]), np.array([0.5, -0.5]))}
    own = [
        rollout((1, Author.ENVIRONMENT), (3, Author.POLICY), value=[0, 0.5, 0.25, 0.125], annotations=steps),
        rollout((1, Author.ENVIRONMENT), (2, Author.POLICY), value=[0, 0.5, 0.25], outcome=0.0),
    ]
    credited = assign_gae(own, Gae(), reward="outcome").policy
    mixed = mix_steps(credited, alpha=0.25)
    later = np.array([0.0, -0.5, 0.0, 0.0, 0.0])  # sums of the step rewards at or after a token: 0.5 - 0.5, -0.5, 0
    outcome = np.concatenate([r.advantages[1:] for r in credited])
    found = np.concatenate([r.advantages[1:] for r in mixed])
    steps_part = (later - later.mean()) / (later.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found, 0.75 * outcome + 0.25 * steps_part, atol=1e-6)
    assert mix_steps(credited[1:], alpha=[0.25]) == credited[1:]


def test_gae_whitened_over_tokens_and_equal_values_give_0():
    values = whiten(np.array([1.0, 2.0, 4.0]))
    assert values.mean() == pytest.approx(0) and values.std(ddof=1) == pytest.approx(1)
    assert not whiten(np.full(5, 0.1)).any() and whiten(np.array([3.0])) == [0.0]


@pytest.mark.parametrize(("apart", "explained"), [(0.0, 0.0), (1e-7, 0.0), (4e-6, 1.0), (1.0, 1.0)])
def test_gae_values_that_are_the_returns_explain_all_of_them_unless_these_differ_by_rounding_alone(apart, explained):
    own = [rollout((1, Author.POLICY), value=[outcome], outcome=outcome) for outcome in (1.0, 1.0 + apart)]
    assert assign_gae(own, Gae(), reward="outcome").metrics["explained_variance"] == pytest.approx(explained, abs=0.01)


def test_gae_without_trained_tokens_nothing_is_explained():
    own = [rollout((1, Author.ENVIRONMENT), value=[0.5])]
    assert assign_gae(own, Gae(), reward="outcome").metrics["explained_variance"] == 0.0


def test_gae_coefficient_is_fixed_without_a_target_and_a_target_needs_one():
    assert adapted(0.1, 5.0, 100, Gae(kl_coef=0.1)) == 0.1
    with pytest.raises(ConfigError, match="kl_target = 0.1 with kl_coef = 0"):
        Gae(kl_target=0.1)


def test_gae_no_loop_over_tokens():
    """Two million tokens take a fraction of a second; a loop in Python over them takes several."""
    lengths = np.full(2000, 1000)
    values = np.zeros(lengths.sum())
    start = time.perf_counter()
    gae(values, values, lengths, gamma=1.0, lam=1.0)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_twins_the_kl_in_the_reward_is_that_of_the_loss_with_verls_clamp(kind):
    """A log-ratio of 5 is 142.4 as k3, and 10 with verl's clamp, which the penalty in the reward always has."""
    policy, reference = np.array([-6.0, -1.0, -2.0]), np.array([-1.0, -1.5, -2.0])
    made = rollout((3, Author.POLICY), value=[0.0] * 3)
    made = replace(made, values={**made.values, "logprobs": policy, "reference_logprobs": reference})
    penalty = assign_gae([made], Gae(kl_coef=1.0, kl=kind), reward="outcome", kl_coef=1.0).kl
    loss = kl_estimates(kind, torch.tensor(policy), torch.tensor(reference), clamp=10.0)
    assert penalty == pytest.approx(loss.mean().item(), rel=1e-12)
    assert kind != "k3" or loss[0] == 10.0 < kl_estimates(kind, torch.tensor(-6.0), torch.tensor(-1.0)) < 143
