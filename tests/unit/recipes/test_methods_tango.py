"""Tango's credit derived again by loops, and Tango with other estimators."""

import numpy as np
import pytest
from test_recipes import PAPER, context_of, paper_generator, paper_verifier, roll_out, texts

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.recipes.tango import Tango
from megatron_rl.types import STEP

__all__ = ["texts"]  # a fixture


def test_step_rewards_are_compared_over_the_groups_steps(texts):
    """Re-derived from the verdicts: rewards by loops, then z-scores over the group's steps, then sums to the end."""
    rollouts, _ = roll_out(Tango(group_size=3, **texts), "generator", 1, context_of(*SIDES))
    rewards = []
    for verdicts, _ in PAPER:
        y = [1.0 if v == "+" else -1.0 for v in verdicts]
        rewards.append([value / len(y) for value in y])
    every = np.array([value for own in rewards for value in own])
    for rollout, own in zip(rollouts, rewards, strict=True):
        annotations = rollout.annotations_of(STEP)
        assert annotations.scores.tolist() == own
        outcomes = np.array([1.0, 0.0, 0.0])
        outcome = (rollout.rewards["outcome"] - outcomes.mean()) / (outcomes.std(ddof=1) + 1e-6)
        z = [(value - every.mean()) / (every.std(ddof=1) + 1e-6) for value in own]
        for k, (start, _) in enumerate(annotations.ranges.tolist()):
            assert rollout.advantages[start] == pytest.approx(0.9 * outcome + 0.1 * sum(z[k:]), abs=1e-5)


SIDES = (paper_generator, paper_verifier)


def test_an_estimator_with_arguments_credits_both_players(texts):
    """Outcomes and step rewards alike: r - mean + 0.2."""
    named = Use(target="asymre", args={"baseline_shift": -0.2})
    rollouts, _ = roll_out(Tango(group_size=3, estimator=named, **texts), "generator", 1, context_of(*SIDES))
    scores = [r.annotations_of(STEP).scores for r in rollouts]
    mean = np.concatenate(scores).mean()
    last = rollouts[0].annotations_of(STEP).ranges[-1][0]
    assert rollouts[0].advantages[last] == pytest.approx(0.9 * (1 - 1 / 3 + 0.2) + 0.1 * (0.25 - mean + 0.2), abs=1e-6)
    bare = assign_advantages(rollouts, reward="outcome", estimator=named)
    assert [r.advantages for r in bare] == pytest.approx([1 - 1 / 3 + 0.2, -1 / 3 + 0.2, -1 / 3 + 0.2])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"estimator": "w_reinforce"}, "no rule for step rewards"),
        ({"estimator": {"target": "opmd", "args": {"tau": -1.0}}}, "tau = -1.0"),
    ],
)
def test_tango_refuses_what_it_cannot_do_where_it_is_built(args, message):
    with pytest.raises(ConfigError, match=message):
        build(Use(target="megatron_rl.recipes.tango:Tango", args=args))
