"""Computes advantages from rewards. An estimator compares the outcome rewards of the rollouts of a group. These outcome
advantages can be mixed with step advantages, which Tango computes from rewards on reasoning steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megatron_rl.algorithms.estimators import (
    EPSILON,
    UNGROUPED,
    Estimator,
    EstimatorName,
    find_estimator,
    reinforce_pp,
    rloo,
    w_reinforce,
    word_of,
)
from megatron_rl.batches.units import first_of, join, members, share
from megatron_rl.config.schema import ConfigError, config
from megatron_rl.rewards.reward_functions import LARGEST, in_range
from megatron_rl.types import STEP, TRAINED, Rollout

RLOO_STEP_SCALE = 10.0  # factor on RLOO step advantages, hard-coded in the released Tango code


@config
class StepCredit:
    """Settings of how rewards on reasoning steps are converted to token advantages. The defaults are Tango's (arXiv
    2505.15034, eq. 3, 5, 6).

    `span`: which step rewards a token gets. "rest" means the sum over the token's step and all later steps. "own" means
        only the reward of the token's step; step rewards are then not divided by the number of steps.
    `baseline`: which steps a step's reward is compared with. "group" means all steps of all solutions of the group.
        "step" means only the steps with the same index in these solutions. If only one solution has a step with this
        index, the step gets 0.
    """

    span: Literal["rest", "own"] = "rest"
    baseline: Literal["group", "step"] = "group"


PAPER_CREDIT = StepCredit()


def assign_advantages(
    rollouts: Sequence[Rollout],
    *,
    reward: str | Mapping[str, float],
    estimator: EstimatorName = "grpo",
    alpha: float | Sequence[float] | None = None,
    steps: StepCredit = PAPER_CREDIT,
    weights: Sequence[float] | None = None,
) -> list[Rollout]:
    """Returns [B] rollouts with their `advantages`, computed by comparing rollouts of the same role and group. Each
    rollout gets one number, or [T] float32 if its tokens have different advantages, with exactly 0 for tokens that are
    not in the loss.

    `reward`: name of the outcome reward, or a mapping {name: weight} for a weighted sum. The outcome is stored as the
        reward TRAINED, whose mean is logged as reward/trained.
    `estimator`: name of the function that computes the advantages, see algorithms.estimators.
    `alpha`: weight of the step advantages, one number or [B]. If given, the advantage is Tango's mixture (arXiv
        2505.15034, eq. 7): (1 - alpha) x outcome advantage + alpha x step advantage. If no rollout has scores on its
        reasoning steps, only the outcome is used.
    `steps`: how step rewards are converted to token advantages.
    `weights`: [B] factors on the advantages. For Tango's verifier, these are the class weights of eq. 9.

    The rollouts of one agent in an episode are compared as one (see units.py).
    A rollout that is alone in its group, for instance because the gradings of the other rollouts failed, gets an
    advantage of 0 from every estimator except those in UNGROUPED. This also holds for user-defined estimators.
    Raises ValueError if a reward is missing or not finite, if an alpha is outside [0, 1], and if the number of weights
    or alphas differs from the number of rollouts. Raises ConfigError for an invalid estimator, and for an estimator
    that does not support step rewards if `alpha` is given.
    """
    alphas = [alpha] * len(rollouts) if isinstance(alpha, float | int) else alpha
    for name, factors in (("weights", weights), ("alphas", alphas)):
        if factors is not None and len(factors) != len(rollouts):
            raise ValueError(f"{len(factors)} {name} for {len(rollouts)} rollouts: give one per rollout")
    values = () if alpha is None else np.atleast_1d(alpha).tolist()
    if wrong := [value for value in values if not 0 <= value <= 1]:
        raise ValueError(f"alpha = {wrong[0]}: the weight of the step advantages lies between 0 and 1")
    find_estimator(estimator)
    if alpha is not None and word_of(estimator) == w_reinforce.__name__:
        raise ConfigError("estimator w_reinforce compares correct and wrong answers, and has no rule for step rewards")
    if not rollouts:
        return []
    units = members(rollouts)
    credited = _assigned(
        join(rollouts, units), reward, estimator, alphas=first_of(alphas, units), steps=steps,
        factors=first_of(weights, units),
    )  # fmt: skip
    return share(credited, rollouts) if len(units) < len(rollouts) else credited


def _assigned(
    rollouts: Sequence[Rollout],
    reward: str | Mapping[str, float],
    estimator: EstimatorName,
    *,
    alphas: Sequence[float] | None,
    steps: StepCredit,
    factors: Sequence[float] | None,
) -> list[Rollout]:
    """Returns [B] rollouts, one per unit, with advantages (see `assign_advantages`)."""
    rewards = np.array([total_reward(rollout, reward) for rollout in rollouts])
    tokens, groups = np.array([rollout.num_trainable for rollout in rollouts], np.int64), _groups(rollouts)
    outcomes = _estimated(estimator, rewards, groups, tokens, members=np.bincount(groups)[groups])
    weights = np.ones(len(rollouts)) if factors is None else np.asarray(factors, np.float64)
    if alphas is None or all(r.annotations_of(STEP).scores is None for r in rollouts):
        return [*map(_credited, rollouts, rewards.tolist(), (outcomes * weights).tolist())]
    of_steps = step_advantages(rollouts, estimator=estimator, credit=steps)
    mixed = (w * ((1 - a) * o + a * s) for o, s, w, a in zip(outcomes, of_steps, weights, alphas, strict=True))
    return [*map(_credited, rollouts, rewards.tolist(), mixed)]


def step_rewards(
    verdicts: Sequence[float] | np.ndarray, num_steps: int, *, credit: StepCredit = PAPER_CREDIT
) -> np.ndarray | None:
    """Converts verdicts on K reasoning steps to step rewards y_k / K, where y_k is +1 if step k is judged correct and
    -1 otherwise (Tango, arXiv 2505.15034, eq. 3). Returns [K] float64. A verdict is True or False, or the probability p
    that the step is correct; y_k is then its expectation 2 p - 1.

    Returns None if the number of verdicts differs from the number of steps, or if there is no step (the count gate of
    the paper). If `credit.span` is "own", the rewards are not divided by K.
    """
    if num_steps == 0 or len(verdicts) != num_steps:
        return None
    signs = 2.0 * np.asarray(verdicts, np.float64) - 1.0
    return signs / num_steps if credit.span == "rest" else signs


def step_advantages(
    rollouts: Sequence[Rollout],
    *,
    estimator: EstimatorName = "grpo",
    credit: StepCredit = PAPER_CREDIT,
    rloo_scale: float = RLOO_STEP_SCALE,
) -> Iterable[np.ndarray | float]:
    """Yields the step advantages of each of [B] rollouts, in order (Tango, arXiv 2505.15034): [T] float64, or one
    number if all tokens of the rollout have the same step advantage. For all estimators except "reinforce_pp", the
    result is a generator, because the step advantages of all rollouts together would need 8 bytes per token.

    The step rewards of all rollouts of a group form one set. The estimator is applied to this set, separately from the
    outcomes (eq. 5). Each step counts as one token; tokens without a step reward are not in the set. A token then gets
    the sum over the steps whose last token is not before the token (eq. 6), so exactly 0 after the last step. `credit`
    can change which steps are in the set and in the sum. A set that contains the steps of only one rollout gives 0, as
    in `assign_advantages`.
    With the estimator "rloo", the result is multiplied by `rloo_scale`.
    With the estimator "reinforce_pp", the return of a token is the undiscounted sum of the raw step rewards at or after
    the token. The returns are whitened over the batch's trained tokens with sample std (n - 1) + 1e-6. Tokens after the
    last step and rollouts without steps are included with return 0.
    A rollout whose steps have no rewards because its verification failed is left out of the set and gets 0. Raises
    ValueError for a step that ends outside its rollout.
    """
    estimate = find_estimator(estimator)
    scores = [rollout.annotations_of(STEP).scores for rollout in rollouts]
    if estimate is reinforce_pp:
        judged = [s is not None or not len(r.annotations_of(STEP)) for r, s in zip(rollouts, scores, strict=True)]
        spread = (
            _spread(r, s, credit) if verified else None for r, s, verified in zip(rollouts, scores, judged, strict=True)
        )
        return _whitened([*spread], rollouts)
    sizes = [0 if step_scores is None else len(step_scores) for step_scores in scores]
    rewards = np.concatenate([np.empty(0), *(step_scores for step_scores in scores if step_scores is not None)])
    own_groups = _groups(rollouts)
    groups = np.repeat(own_groups, sizes)
    # for each step: number of rollouts with step rewards in the same group
    members = np.bincount(own_groups[np.array(sizes) > 0])[groups]
    if credit.baseline == "step":
        numbers = np.concatenate([np.arange(size) for size in sizes])
        groups = np.unique(np.stack([groups, numbers]), axis=1, return_inverse=True)[1].reshape(-1)
        members = np.bincount(groups)[groups]
    compared = _estimated(estimator, rewards, groups, np.ones(len(rewards), np.int64), members=members)
    if estimate is rloo:
        compared = compared * rloo_scale
    parts = np.split(compared, np.cumsum(sizes)[:-1])
    return (_spread(r, part if len(part) else None, credit) for r, part in zip(rollouts, parts, strict=True))


def _groups(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns the group index of each of [B] rollouts, [B] int64. Two rollouts have the same index if they have the
    same role and group.
    """
    numbers: dict[tuple[str, str], int] = {}
    return np.array([numbers.setdefault((r.role, r.group), len(numbers)) for r in rollouts], np.int64)


def _estimated(
    named: EstimatorName, rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray, *, members: np.ndarray
) -> np.ndarray:
    """Applies an estimator to [B] rewards.

    `members`: [B] number of rollouts in the group of each reward. An estimator that is not in UNGROUPED does not see
        the rewards of groups with fewer than two members; these rewards get the advantage 0.

    Raises ValueError unless the estimator returns one finite number per reward.
    """
    chosen = (members > 1) | (word_of(named) in UNGROUPED)
    if not chosen.any():
        return np.zeros(len(rewards))
    numbers = np.unique(groups[chosen], return_inverse=True)[1]
    estimate: Estimator = find_estimator(named)
    estimates = np.asarray(estimate(rewards[chosen], numbers, tokens[chosen]), np.float64)
    if estimates.shape != numbers.shape or not np.isfinite(estimates).all():
        raise ValueError(
            f"estimator {word_of(named)!r} gave shape {estimates.shape} for {len(numbers)} rewards, or numbers that "
            "are not finite: it returns one finite number per reward"
        )
    advantages = np.zeros(len(rewards))
    advantages[chosen] = estimates
    return advantages


def total_reward(rollout: Rollout, reward: str | Mapping[str, float]) -> float:
    """Returns the outcome of a rollout: one reward, or the weighted sum of several rewards. Raises ValueError for a
    missing or non-finite reward.
    """
    total = 0.0
    for name, weight in ({reward: 1.0} if isinstance(reward, str) else reward).items():
        if name not in rollout.rewards:
            raise ValueError(f"group {rollout.group!r} has no reward {name!r}; it has {sorted(rollout.rewards)}")
        value = rollout.rewards[name]
        if not in_range(value):
            raise ValueError(
                f"group {rollout.group!r}: reward {name!r} is {value}; give a finite number of at most {LARGEST:g}"
            )
        total += weight * value
    return total


def _spread(rollout: Rollout, scores: np.ndarray | None, credit: StepCredit) -> np.ndarray | float:
    """Converts the [K] scores of a rollout's reasoning steps to the advantage of each token, [T] float64. Returns 0.0
    if `scores` is None.

    A token gets the sum of the scores of all steps that end at or after the token. If `credit.span` is "own", a token
    gets only the score of the first of these steps.
    """
    if scores is None or not len(scores):
        return 0.0
    ends, length = rollout.annotations_of(STEP).ranges[:, 1], len(rollout.tokens)
    order = np.argsort(ends, kind="stable")
    ends = ends[order]
    if not (ends[0] > 0 and ends[-1] <= length):
        wrong = ends[-1] if ends[0] > 0 else ends[0]
        raise ValueError(f"group {rollout.group!r}: a step ends at token {wrong}, but the rollout has {length} tokens")
    ordered = scores[order]
    values = ordered if credit.span == "own" else np.cumsum(ordered[::-1])[::-1]
    return np.repeat(np.append(values, 0.0), np.diff(ends, prepend=0, append=length))


def _whitened(values: Sequence[np.ndarray | float | None], rollouts: Sequence[Rollout]) -> list[np.ndarray | float]:
    """Normalises the values v of [B] rollouts, one number or [T] each: returns (v - mean) / (std + 1e-6), with mean and
    sample std over the trained tokens of the batch. Returns 0 for a rollout whose value is None.
    """
    trained = [
        np.broadcast_to(v, len(r.tokens))[r.trainable] for v, r in zip(values, rollouts, strict=True) if v is not None
    ]
    count = sum(map(len, trained))
    extremes = {float(edge) for returns in trained if len(returns) for edge in (returns.min(), returns.max())}
    if len(extremes) <= 1:  # all values are equal: return exactly 0, without rounding errors of the mean
        return [0.0] * len(values)
    mean = math.fsum(float(returns.sum()) for returns in trained) / count
    std = math.sqrt(math.fsum(float(((returns - mean) ** 2).sum()) for returns in trained) / (count - 1))
    return [0.0 if v is None else (v - mean) / (std + EPSILON) for v in values]


def _credited(rollout: Rollout, reward: float, advantages: np.ndarray | float) -> Rollout:
    """Returns a rollout with its total reward and its advantages, which are 0 for tokens that are not in the loss."""
    if isinstance(advantages, np.ndarray):
        advantages = np.where(rollout.weights != 0, advantages, 0.0).astype(np.float32)
    else:
        advantages = float(advantages)
    return replace(rollout, rewards={**rollout.rewards, TRAINED: reward}, advantages=advantages)
