"""Estimators of published methods against their formulas, written here as plain loops; and credit of several roles."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import assign_advantages, step_advantages
from megatron_rl.algorithms.estimators import ESTIMATORS, UNGROUPED, find_estimator
from megatron_rl.algorithms.role_credit import RoleBaselines, compare_peers
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.types import STEP, Annotations, Author, Rollout, spans_of

SETS = [(seed, rewards) for seed in range(3) for rewards in ((0.0, 1.0), (0.0, 0.3, 1.0, -0.5))]


def rollout(reward, *, group="g", role="solver", tokens=4, steps=None):
    annotations = {} if steps is None else {STEP: Annotations([(k, k + 1) for k in range(len(steps))], steps)}
    return Rollout(
        role=role, group=group, tokens=range(tokens), logprobs=[0.0] * tokens,
        spans=spans_of((tokens, Author.POLICY, 0)), rewards={"outcome": reward}, annotations=annotations,
    )  # fmt: skip


def batch(seed, values):
    """Groups of 1 to 5 in mixed order, one of equal rewards. -> rewards, group numbers, tokens"""
    draw = random.Random(seed)
    rows = [(draw.choice(values), g, draw.randint(1, 50)) for g in range(5) for _ in range(draw.randint(2, 5))]
    rows += [(0.1, 5, n) for n in (3, 7, 11)] + [(0.7, 6, 9)]
    draw.shuffle(rows)
    rewards, groups, tokens = zip(*rows, strict=True)
    return np.array(rewards), np.array(groups), np.array(tokens)


def found(name, rewards, groups, tokens, **args):
    return find_estimator(Use(target=name, args=args))(rewards, groups, tokens)


def own(i, groups):
    return [j for j in range(len(groups)) if groups[j] == groups[i]]


@pytest.mark.parametrize(("seed", "values"), SETS)
def test_opo_takes_off_the_mean_that_lengths_weigh(seed, values):
    rewards, groups, tokens = batch(seed, values)
    advantages = found("opo", rewards, groups, tokens)
    for i in range(len(rewards)):
        peers = own(i, groups)
        baseline = sum(tokens[j] * rewards[j] for j in peers) / sum(tokens[j] for j in peers)
        assert advantages[i] == pytest.approx(rewards[i] - baseline, abs=1e-12)
    assert set(advantages[groups == 5]) == {0.0}, "equal rewards have exactly 0, whatever rounding does"


@pytest.mark.parametrize("tau", [0.3, 1.0])
@pytest.mark.parametrize(("seed", "values"), SETS)
def test_opmd_has_the_mean_or_the_log_mean_exp_as_baseline(seed, values, tau):
    rewards, groups, tokens = batch(seed, values)
    mean = found("opmd", rewards, groups, tokens, baseline="mean", tau=tau)
    soft = found("opmd", rewards, groups, tokens, baseline="log_mean_exp", tau=tau)
    for i in range(len(rewards)):
        peers = [rewards[j] for j in own(i, groups)]
        flat = sum(peers) / len(peers)
        raised = tau * math.log(sum(math.exp(r / tau) for r in peers) / len(peers))
        assert mean[i] == pytest.approx(rewards[i] - flat, abs=1e-12)
        assert soft[i] == pytest.approx(rewards[i] - raised, abs=1e-12)
    assert set(soft[groups == 5]) == {0.0}


def test_opmd_of_large_rewards_does_not_overflow():
    rewards = np.array([4000.0, 3999.0])
    advantages = found("opmd", rewards, np.zeros(2, int), np.ones(2, int), baseline="log_mean_exp")
    baseline = 4000 + math.log((1 + math.exp(-1)) / 2)
    assert advantages == pytest.approx([4000 - baseline, 3999 - baseline])


@pytest.mark.parametrize("shift", [-0.1, -0.4, 0.2])
@pytest.mark.parametrize(("seed", "values"), SETS)
def test_asymre_shifts_the_mean(seed, values, shift):
    rewards, groups, tokens = batch(seed, values)
    advantages = found("asymre", rewards, groups, tokens, baseline_shift=shift)
    for i in range(len(rewards)):
        peers = [rewards[j] for j in own(i, groups)]
        baseline = sum(peers) / len(peers) + shift
        assert advantages[i] == pytest.approx(rewards[i] - baseline, abs=1e-12)
    assert np.array_equal(find_estimator("asymre")(rewards, groups, tokens), found("asymre", rewards, groups, tokens))


def test_w_reinforce_weighs_right_answers_less_and_nsr_not_at_all():
    """The released code: 1 x weight for a reward of 1, 0 - 1 for a reward of 0."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    numbers = np.zeros(4, int), np.ones(4, int)
    assert find_estimator("w_reinforce")(rewards, *numbers).tolist() == [0.1, -1.0, -1.0, 0.1]
    assert found("w_reinforce", rewards, *numbers, positive_weight=0).tolist() == [0.0, -1.0, -1.0, 0.0]


def test_w_reinforce_takes_an_answer_for_right_above_a_half_alone():
    rewards = np.array([0.5, np.nextafter(0.5, 1.0), 0.0, np.nextafter(0.5, 0.0)])
    found = find_estimator("w_reinforce")(rewards, np.zeros(4, int), np.ones(4, int))
    assert found.tolist() == [-1.0, 0.1, -1.0, -1.0]


@pytest.mark.parametrize(("seed", "values"), SETS)
def test_reinforce_pp_baseline_whitens_centred_rewards_over_tokens(seed, values):
    rewards, groups, tokens = batch(seed, values)
    rows = []
    for i in range(len(rewards)):
        peers = [rewards[j] for j in own(i, groups)]
        rows.append(rewards[i] - sum(peers) / len(peers))
    spread = [row for row, count in zip(rows, tokens, strict=True) for _ in range(count)]
    mean = math.fsum(spread) / len(spread)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in spread) / (len(spread) - 1))
    expected = [(row - mean) / (std + 1e-6) for row in rows]
    assert found("reinforce_pp_baseline", rewards, groups, tokens) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"asymre", "w_reinforce", "reinforce"}))
def test_equal_rewards_give_exactly_nothing(name):
    rewards, groups = np.full(9, 0.1), np.repeat([0, 1, 2], 3)
    assert set(find_estimator(name)(rewards, groups, np.arange(1, 10)).tolist()) == {0.0}


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - UNGROUPED - {"batch", "reinforce_pp_baseline"}))
def test_groups_are_compared_apart(name):
    rewards, groups, tokens = batch(1, (0.0, 0.4, 1.0))
    whole = find_estimator(name)(rewards, groups, tokens)
    for g in range(5):
        chosen = groups == g
        alone = find_estimator(name)(rewards[chosen], np.zeros(chosen.sum(), int), tokens[chosen])
        assert whole[chosen] == pytest.approx(alone, abs=1e-12)


def test_an_answer_without_a_trained_token_weighs_nothing_in_opo():
    advantages = found("opo", np.array([1.0, 0.0, 0.5]), np.zeros(3, int), np.array([0, 2, 2]))
    assert advantages.tolist() == [0.75, -0.25, 0.25]
    assert found("opo", np.array([1.0, 0.0]), np.zeros(2, int), np.zeros(2, int)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (Use(target="asymre", args={"shift": 1}), "unknown argument 'shift'"),
        (Use(target="asymre", args={"baseline_shift": "low"}), "asymre.*low"),
        (Use(target="opmd", args={"tau": 0.0}), "tau = 0.0: give .* a tau above 0"),
        (Use(target="opmd", args={"baseline": "median"}), "'median'.*give the baseline mean or log_mean_exp"),
        (Use(target="grpo", args={"tau": 1.0}), "unknown argument 'tau'"),
        ("remix", "'remix': use grpo, dr_grpo"),
    ],
)
def test_an_estimator_that_cannot_be_is_refused_where_the_recipe_is_built(named, message):
    args = {"target": named.target, "args": named.args} if isinstance(named, Use) else named
    with pytest.raises(ConfigError, match=message):
        build(Use(target="megatron_rl.recipes.grpo:Grpo", args={"updates": 1, "estimator": args}))


def test_a_recipe_reads_an_estimator_with_arguments_from_its_config():
    args = {"updates": 1, "estimator": {"target": "asymre", "args": {"baseline_shift": -0.2}}}
    recipe = build(Use(target="megatron_rl.recipes.grpo:Grpo", args=args))
    group = [rollout(1.0), rollout(0.0)]
    credited = assign_advantages(group, reward="outcome", estimator=recipe.estimator)
    assert [r.advantages for r in credited] == pytest.approx([0.7, -0.3])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_group_of_one_is_allowed_where_nothing_is_compared_within_it(name):
    if name in UNGROUPED:
        Grpo(updates=1, group_size=1, estimator=name)
    else:
        with pytest.raises(ConfigError, match="group_size = 1: give at least 2"):
            Grpo(updates=1, group_size=1, estimator=name)


def shouted(rewards, groups, tokens, *, loudness=1.0):
    """An estimator of a user's own, with an argument."""
    return rewards * loudness


def test_an_estimator_of_ones_own_may_have_arguments():
    named = Use(target=f"{__name__}:shouted", args={"loudness": 3.0})
    assert [r.advantages for r in assign_advantages([rollout(0.5)] * 2, reward="outcome", estimator=named)] == [1.5] * 2


def test_rloo_with_one_step_reward_in_a_group_gives_0():
    """The release leaves the step advantages of such a group at 0; ten times the raw reward would drown the outcome."""
    group = [rollout(1.0, steps=[1.0]), rollout(0.0), rollout(0.0)]
    assert [np.abs(values).max() for values in step_advantages(group, estimator="rloo")] == [0.0] * 3
    mixed = assign_advantages(group, reward="outcome", estimator="rloo", alpha=0.5)
    assert np.broadcast_to(mixed[0].advantages, 4).tolist() == [0.5] * 4
    two = [rollout(1.0, steps=[1.0]), rollout(0.0, steps=[-1.0])]
    assert [values[0] for values in step_advantages(two, estimator="rloo")] == [20.0, -20.0]


def test_w_reinforce_has_no_rule_for_step_rewards():
    with pytest.raises(ConfigError, match="no rule for step rewards"):
        assign_advantages([], reward="outcome", estimator="w_reinforce", alpha=0.1)


def test_role_baselines_follow_each_roles_own_rewards():
    """Against a loop over the released order: credit first, then the baseline moves."""
    draw = random.Random(0)
    episodes = [rollout(draw.choice((-1.0, 0.0, 1.0)), role=draw.choice("ab")) for _ in range(40)]
    values, expected = {"a": 0.0, "b": 0.0}, []
    for r in episodes:
        gained = r.rewards["outcome"]
        expected.append(gained - values[r.role])
        values[r.role] = 0.95 * values[r.role] + 0.05 * gained
    credited, after = RoleBaselines().credit(episodes, "outcome")
    assert [r.advantages for r in credited] == pytest.approx(expected)
    assert dict(after.values) == pytest.approx(values)


def test_role_baselines_go_on_from_a_checkpoint():
    episodes = [rollout(float(i % 3), role="ab"[i % 2]) for i in range(12)]
    whole, end = RoleBaselines().credit(episodes, "outcome", decay=0.5)
    first, middle = RoleBaselines().credit(episodes[:5], "outcome", decay=0.5)
    resumed = RoleBaselines(**json.loads(json.dumps(dataclasses.asdict(middle))))
    second, again = resumed.credit(episodes[5:], "outcome", decay=0.5)
    assert [r.advantages for r in first + second] == [r.advantages for r in whole] and again == end
    with pytest.raises(ValueError, match=r"no reward 'worth'.*outcome"):
        end.credit(episodes, "worth")


def test_solvers_are_compared_within_a_problem_and_proposers_within_their_task():
    proposers = [rollout(r, role="proposer", group=str(i)) for i, r in enumerate((0.2, 0.6, 1.0))]
    solvers = [rollout(r, group=f"s{i}") for i, r in enumerate((1.0, 0.0, 0.0, 0.5))]
    peers = ["task a", "task a", "task b", "problem 0", "problem 0", "problem 0", "problem 1"]
    credited = compare_peers([*proposers, *solvers], peers, "outcome")
    assert [r.advantages for r in credited] == pytest.approx([-0.2, 0.2, 0.0, 2 / 3, -1 / 3, -1 / 3, 0.0])
    assert [r.group for r in credited] == ["0", "1", "2", "s0", "s1", "s2", "s3"]
    with pytest.raises(ValueError, match="shorter"):
        compare_peers(solvers[:2], ["x"], "outcome")


def test_peers_of_equal_reward_have_exactly_0_and_roles_are_apart():
    rows = [rollout(0.1, role=role) for role in ("solver", "judge") for _ in range(3)]
    rows.append(rollout(0.7, role="judge"))
    credited = compare_peers(rows, ["x"] * 7, "outcome")
    assert [r.advantages for r in credited[:3]] == [0.0] * 3
    assert credited[6].advantages == pytest.approx(0.45)


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([0.7], [0.0]),  # one trained token has nothing to be compared with
        ([0.2, 0.8], [-0.3 / (0.18**0.5 + 1e-6), 0.3 / (0.18**0.5 + 1e-6)]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),  # exactly, although the mean of three times 0.1 is not 0.1
        ([0.1, 0.1], [0.0, 0.0]),
    ],
)
def test_whitening_over_few_or_equal_tokens_divides_by_nothing_small(scores, expected):
    made = [
        Rollout(
            role="g", group=str(i), tokens=[1, 2], logprobs=[0.0, 0.0],
            annotations={STEP: Annotations([(1, 2)], [score])},
            spans=spans_of((1, Author.ENVIRONMENT, -1), (1, Author.POLICY, 0)),
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip
    found = [np.broadcast_to(values, 2)[1] for values in step_advantages(made, estimator="reinforce_pp")]
    assert found == (expected if not any(expected) else pytest.approx(expected, rel=1e-12))


def test_whitening_of_a_batch_without_a_trained_token_gives_no_advantage():
    silent = Rollout(
        role="g", group="0", tokens=[1, 2], logprobs=[0.0, 0.0], annotations={STEP: Annotations([(1, 2)], [0.7])},
        spans=spans_of((2, Author.ENVIRONMENT, -1)),
    )  # fmt: skip
    assert [*step_advantages([silent], estimator="reinforce_pp")] == [0.0]
