"""From rewards to per-token advantages: group estimators for outcomes, and Tango's step advantages mixed into them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from megatron_rl.types import Trajectory

Estimator = Literal["grpo", "dr_grpo", "batch", "rloo", "reinforce_pp"]

EPSILON = 1e-6  # added to every standard deviation, as in Tango's released code (verl: 1e-6; TRL: 1e-4)
RLOO_STEP_SCALE = 10.0  # hard-coded factor of the released Tango code on its RLOO step advantages


def assign_advantages(
    trajectories: Sequence[Trajectory],
    *,
    reward: str | Mapping[str, float],
    estimator: Estimator = "grpo",
    alpha: float | None = None,
    weights: Sequence[float] | None = None,
) -> list[Trajectory]:
    """Fills `advantages` of [B] trajectories, compared within `group`; exactly 0 where a token is not in the loss.

    The outcome is `rewards[reward]`, or the sum of `weight * rewards[name]` over a mapping {name: weight}. reinforce_pp: the outcome
    counts at every trainable token (its undiscounted return), whitened over the batch's trainable tokens: (r - mean) / (std + 1e-6),
    sample std (n - 1); groups play no part. The other estimators: `outcome_advantages`, the same at every token.
    With `alpha`, Tango's mixture of both (arXiv 2505.15034, eq. 7); when no trajectory of the batch has step rewards, A = A_outcome.
    `weights` [B] multiply a trajectory's advantages (the verifier's class weights, eq. 9).
    Raises ValueError for a missing or non-finite reward, an alpha outside [0, 1], and another number of weights than trajectories.
    """
    if weights is not None and len(weights) != len(trajectories):
        raise ValueError(f"{len(weights)} weights for {len(trajectories)} trajectories: give one per trajectory")
    rewards = [_outcome(t, reward) for t in trajectories]
    if estimator == "reinforce_pp":
        values = _whitened([[r] * len(t.tokens) for t, r in zip(trajectories, rewards, strict=True)], trajectories)
    else:
        scalars = outcome_advantages(rewards, [t.group for t in trajectories], estimator=estimator)
        values = [[a] * len(t.tokens) for t, a in zip(trajectories, scalars, strict=True)]
    if alpha is not None and any(t.step_rewards for t in trajectories):
        values = mix(values, step_advantages(trajectories, estimator=estimator), alpha)
    factors = [1.0] * len(trajectories) if weights is None else weights
    return [
        replace(t, advantages=[a * w if on else 0.0 for a, on in zip(row, t.weights, strict=True)])
        for t, row, w in zip(trajectories, values, factors, strict=True)
    ]


def outcome_advantages(
    rewards: Sequence[float], groups: Sequence[str], *, estimator: Estimator = "grpo"
) -> list[float]:
    """One scalar per reward. [B] rewards and group names -> [B]. A group of equal rewards gets exactly 0.

    grpo     (r - mean of group) / (std of group + 1e-6); sample std (n - 1), as in the Tango code (arXiv 2402.03300)
    dr_grpo  r - mean of group; no std (arXiv 2503.20783)
    batch    (r - mean of group) / (std of all rewards of the batch + 1e-6); sample std (n - 1), and 1 when all are equal
    rloo     r - mean of the *other* rewards of the group = (r - mean of group) n / (n - 1); no std (arXiv 2402.14740)

    A group of one has mean 0 and std 1, so its reward stays (almost, for the epsilon) as it is.
    Raises ValueError for lists of different lengths, and for reinforce_pp, whose unit is the token (see assign_advantages).
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards for {len(groups)} group names: give one name per reward")
    members: dict[str, list[float]] = defaultdict(list)
    for r, group in zip(rewards, groups, strict=True):
        members[group].append(r)
    moments = {group: _mean_and_std(values) for group, values in members.items()}
    centred = [r - moments[group][0] for r, group in zip(rewards, groups, strict=True)]
    match estimator:
        case "grpo":
            return [c / (moments[group][1] + EPSILON) for c, group in zip(centred, groups, strict=True)]
        case "dr_grpo":
            return centred
        case "batch":
            _, std = _mean_and_std(rewards)
            return [c / ((std or 1.0) + EPSILON) for c in centred]
        case "rloo":
            sizes = {group: len(values) for group, values in members.items()}
            return [c * sizes[group] / max(1, sizes[group] - 1) for c, group in zip(centred, groups, strict=True)]
        case _:
            raise ValueError(f"estimator {estimator!r} gives no scalar per reward: use grpo, dr_grpo, batch or rloo")


def step_rewards(verdicts: Sequence[bool], num_steps: int) -> list[float]:
    """Verdicts of K steps -> y_k / K with y = +1 or -1 (eq. 3). Empty when the counts differ or there is no step: the count gate."""
    if num_steps == 0 or len(verdicts) != num_steps:
        return []
    return [(1.0 if right else -1.0) / num_steps for right in verdicts]


def step_advantages(
    trajectories: Sequence[Trajectory], *, estimator: Estimator = "grpo", rloo_scale: float = RLOO_STEP_SCALE
) -> list[list[float]]:
    """Per-token step advantages of [B] trajectories -> [B][T].

    All step rewards of a group's trajectories are one set, treated by `outcome_advantages` apart from the outcomes (eq. 5; tokens
    without a step reward are not in the set); a token then gets the sum over the steps whose last token is at or after it (eq. 6),
    so exactly 0 after the last step. rloo: times `rloo_scale`.
    reinforce_pp: undiscounted reverse sums of the raw step rewards over the tokens, whitened over the batch's trainable tokens
    (those without a step to come, and trajectories without step rewards, included with return 0), sample std (n - 1) + 1e-6.
    Raises ValueError for a step that ends outside its trajectory.
    """
    if estimator == "reinforce_pp":
        return _whitened([_suffix_sums(t, t.step_rewards) for t in trajectories], trajectories)
    rewards = [r for t in trajectories for r in t.step_rewards]
    groups = [t.group for t in trajectories for _ in t.step_rewards]
    scale = rloo_scale if estimator == "rloo" else 1.0
    scores = iter([scale * z for z in outcome_advantages(rewards, groups, estimator=estimator)])
    return [_suffix_sums(t, [next(scores) for _ in t.step_rewards]) for t in trajectories]


def mix(outcome: Sequence[Sequence[float]], steps: Sequence[Sequence[float]], alpha: float) -> list[list[float]]:
    """(1 - alpha) outcome + alpha steps, token by token (eq. 7). [B][T] each -> [B][T]. Raises ValueError for alpha outside [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha = {alpha}: the weight of the step advantages lies between 0 and 1")
    return [
        [(1 - alpha) * o + alpha * s for o, s in zip(a, b, strict=True)] for a, b in zip(outcome, steps, strict=True)
    ]


def _outcome(trajectory: Trajectory, reward: str | Mapping[str, float]) -> float:
    """One reward, or the weighted sum of several."""
    total = 0.0
    for name, weight in ({reward: 1.0} if isinstance(reward, str) else reward).items():
        if name not in trajectory.rewards:
            raise ValueError(f"group {trajectory.group!r} has no reward {name!r}; it has {sorted(trajectory.rewards)}")
        value = trajectory.rewards[name]
        if not math.isfinite(value):
            raise ValueError(
                f"group {trajectory.group!r}: reward {name!r} is {value}; a reward function must return a finite number"
            )
        total += weight * value
    return total


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample std (n - 1); (0, 1) for fewer than two values. Equal values have exactly themselves as mean, and std 0."""
    n = len(values)
    if n < 2:
        return 0.0, 1.0
    if min(values) == max(values):  # their rounded sum may not be n times the value
        return values[0], 0.0
    mean = math.fsum(values) / n
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))


def _suffix_sums(trajectory: Trajectory, scores: Sequence[float]) -> list[float]:
    """[K] scores at the last tokens of the steps, or none -> [T] sums over the steps that end at or after each token."""
    sums = [0.0] * len(trajectory.tokens)
    for (_, end), score in zip(trajectory.steps, scores, strict=bool(scores)):
        if not 0 < end <= len(sums):
            raise ValueError(f"group {trajectory.group!r}: a step ends at {end}, outside its {len(sums)} tokens")
        sums[end - 1] += score
    for i in range(len(sums) - 2, -1, -1):
        sums[i] += sums[i + 1]
    return sums


def _whitened(values: list[list[float]], trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """(v - mean) / (std + 1e-6), mean and sample std over the trainable tokens of the batch. [B][T] -> [B][T]."""
    valid = [
        v for row, t in zip(values, trajectories, strict=True) for v, on in zip(row, t.trainable, strict=True) if on
    ]
    mean, std = _mean_and_std(valid)
    return [[(v - mean) / (std + EPSILON) for v in row] for row in values]
