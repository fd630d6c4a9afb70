"""From rewards to per-token advantages: group estimators for outcomes, and Tango's step advantages mixed into them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from megatron_rl.types import Trajectory

Estimator = Literal["grpo", "dr_grpo", "batch", "rloo", "reinforce_pp"]

EPSILON = 1e-6  # added to every standard deviation, as in Tango's released code (verl: 1e-6; TRL: 1e-4)
RLOO_STEP_SCALE = 10.0  # hard-coded factor of the released Tango code on its RLOO step advantages


def assign_advantages(
    trajectories: Sequence[Trajectory], *, reward: str, estimator: Estimator = "grpo", alpha: float | None = None,
    weights: Sequence[float] | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Fills `advantages` of [B] trajectories from `rewards[reward]`, compared within `group`; 0 where a token is not trainable.

    With `alpha`, Tango's mixture A = (1 - alpha) A_outcome + alpha A_step (arXiv 2505.15034, eq. 7); when no trajectory has step
    rewards, A = A_outcome. `weights` [B] multiply a trajectory's advantages (the verifier's class weights, eq. 9).
    """
    rewards, groups = [t.rewards[reward] for t in trajectories], [t.group for t in trajectories]
    if estimator == "reinforce_pp":
        outcome = _whitened([[r * on for on in t.trainable] for t, r in zip(trajectories, rewards, strict=True)], trajectories)
    else:
        scalars = outcome_advantages(rewards, groups, estimator=estimator)
        outcome = [[a] * len(t.tokens) for t, a in zip(trajectories, scalars, strict=True)]
    mixed = outcome
    if alpha is not None and any(t.step_rewards for t in trajectories):
        mixed = mix(outcome, step_advantages(trajectories, estimator=estimator), alpha)
    factors = weights if weights is not None else [1.0] * len(trajectories)
    return [
        replace(t, advantages=[a * w if on else 0.0 for a, on in zip(values, t.trainable, strict=True)])
        for t, values, w in zip(trajectories, mixed, factors, strict=True)
    ]


def outcome_advantages(rewards: Sequence[float], groups: Sequence[str], *, estimator: Estimator = "grpo") -> list[float]:
    """One scalar per trajectory. [B] rewards and group names -> [B].

    grpo     (r - mean of group) / (std of group + 1e-6); sample std (n - 1); a group of one: mean 0, std 1
    dr_grpo  r - mean of group; no division (arXiv 2503.20783)
    batch    (r - mean of group) / (std of the batch + 1e-6); sample std (n - 1) of all rewards
    rloo     r - mean of the *other* rewards of the group = (r - mean) n / (n - 1); a group of one: r
    """
    values, names = list(rewards), list(groups)
    if estimator == "grpo":
        return _by_group(values, names, _normalised)
    if estimator == "dr_grpo":
        return _by_group(values, names, _centred)
    if estimator == "rloo":
        return _by_group(values, names, _leave_one_out)
    if estimator == "batch":
        scale = (statistics.stdev(values) if len(values) > 1 else 1.0) + EPSILON
        return [a / scale for a in _by_group(values, names, _centred)]
    raise ValueError(f"estimator {estimator!r} gives no scalar per trajectory: use assign_advantages")


def step_rewards(verdicts: Sequence[bool], num_steps: int) -> list[float]:
    """Verdicts of K steps -> y_k / K with y = +1 or -1 (eq. 3). Empty when the counts differ or there is no step: the count gate."""
    if num_steps == 0 or len(verdicts) != num_steps:
        return []
    return [(1.0 if right else -1.0) / num_steps for right in verdicts]


def step_advantages(trajectories: Sequence[Trajectory], *, estimator: Estimator = "grpo") -> list[list[float]]:
    """Per-token step advantages of [B] trajectories -> [B][T].

    All step rewards of a group are normalised together, apart from the outcomes (eq. 5); a token then gets the sum over the steps
    that end at or after it (eq. 6), so 0 after the last step. rloo: leave one out over the group's step set, times 10.
    reinforce_pp: undiscounted reverse sums of raw step rewards over tokens, whitened over the batch's trainable tokens.
    """
    if estimator == "reinforce_pp":
        return _whitened([_suffix_sums(t, t.step_rewards) for t in trajectories], trajectories)
    sets: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        sets[t.group] += t.step_rewards
    rules: dict[str, Callable[[list[float]], list[float]]] = {
        "grpo": _normalised,
        "dr_grpo": _centred,
        "batch": _normalised,
        "rloo": lambda values: [RLOO_STEP_SCALE * z for z in _leave_one_out(values)],
    }
    scored = {group: iter(rules[estimator](values)) for group, values in sets.items()}
    return [_suffix_sums(t, [next(scored[t.group]) for _ in t.step_rewards]) for t in trajectories]


def mix(outcome: Sequence[Sequence[float]], steps: Sequence[Sequence[float]], alpha: float) -> list[list[float]]:
    """(1 - alpha) outcome + alpha steps, token by token. [B][T] each -> [B][T]."""
    return [[(1 - alpha) * o + alpha * s for o, s in zip(a, b, strict=True)] for a, b in zip(outcome, steps, strict=True)]


def _by_group(values: list[float], groups: list[str], rule: Callable[[list[float]], list[float]]) -> list[float]:
    members: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    out = [0.0] * len(values)
    for indices in members.values():
        for i, a in zip(indices, rule([values[i] for i in indices]), strict=True):
            out[i] = a
    return out


def _normalised(values: list[float]) -> list[float]:
    if len(values) < 2:
        return list(values)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + EPSILON) for v in values]


def _centred(values: list[float]) -> list[float]:
    mean = statistics.fmean(values) if len(values) > 1 else 0.0
    return [v - mean for v in values]


def _leave_one_out(values: list[float]) -> list[float]:
    n = len(values)
    if n < 2:
        return list(values)
    total = sum(values)
    return [v - (total - v) / (n - 1) for v in values]


def _suffix_sums(trajectory: Trajectory, scores: Sequence[float]) -> list[float]:
    """[K] scores at the last tokens of the steps -> [T] sums over the steps that end at or after each token."""
    ends = [0.0] * len(trajectory.tokens)
    for (_, end), score in zip(trajectory.steps, scores, strict=bool(scores)):
        ends[end - 1] += score
    total = 0.0
    for i in range(len(ends) - 1, -1, -1):
        total += ends[i]
        ends[i] = total
    return ends


def _whitened(values: list[list[float]], trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """(v - mean) / (std + 1e-6) over the trainable tokens of the batch, sample std (n - 1). [B][T] -> [B][T]."""
    valid = [v for row, t in zip(values, trajectories, strict=True) for v, on in zip(row, t.trainable, strict=True) if on]
    if len(valid) < 2:
        return [list(row) for row in values]
    mean, std = statistics.fmean(valid), statistics.stdev(valid)
    return [[(v - mean) / (std + EPSILON) for v in row] for row in values]
