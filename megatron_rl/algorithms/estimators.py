"""Advantage estimators: pure functions that compare rewards. The config selects an estimator by its name, or a user's
function by `module:name`.

An estimator with (keyword-only) arguments is configured as `{target: asymre, args: {baseline_shift: -0.2}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from megatron_rl.config.base import refusing
from megatron_rl.config.plugins import build, find_function
from megatron_rl.config.schema import ConfigError, Use

# function (rewards [B] float64, group indices [B] int64, trained tokens [B] int64) -> advantages [B] float64
Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
# value of the setting `estimator`: a string, or Use (target, args) for an estimator with arguments
EstimatorName = str | Use

EPSILON = 1e-6  # added to every standard deviation, as in Tango's released code (verl: 1e-6; TRL: 1e-4)


def grpo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns GRPO's advantage (arXiv 2402.03300): (r - mean of group) / (std of group + 1e-6). The std is the sample
    std (n - 1), as in Tango's released code.
    """
    centred, std, _ = compare(rewards, groups)
    return centred / (std + EPSILON)


def dr_grpo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns r - mean of group, without dividing by the std (arXiv 2503.20783)."""
    return compare(rewards, groups)[0]


def batch(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns (r - mean of group) / (std of all rewards of the batch + 1e-6), with sample std (n - 1). If all rewards
    of the batch are equal, 1 is used instead of the std.
    """
    _, std, _ = compare(rewards, np.zeros_like(groups))
    return compare(rewards, groups)[0] / (np.where(std == 0.0, 1.0, std) + EPSILON)


def rloo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns r - mean of the *other* rewards of the group = (r - mean of group) n / (n - 1), without std (arXiv
    2402.14740).

    A reward that is the only one of its group gets 0, as in Tango's released code (verl returns the reward unchanged).
    """
    centred, _, sizes = compare(rewards, groups)
    return centred * sizes / np.maximum(1, sizes - 1)


def reinforce_pp(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the rewards whitened over the trained tokens of the batch: (r - mean) / (std + 1e-6), with sample std (n
    - 1).

    Each token has the reward of its rollout as undiscounted return, so longer answers have more weight in mean and std.
    Groups are ignored.
    """
    total, trained = tokens.sum(), rewards[tokens > 0]
    # if all rewards are equal, return exactly 0, because the computed mean may differ from the rewards by rounding
    if len(trained) == 0 or trained.min() == trained.max():
        return np.zeros_like(rewards)
    centred = rewards - (rewards * tokens).sum() / total
    return centred / (np.sqrt((centred**2 * tokens).sum() / (total - 1)) + EPSILON)


def reinforce_pp_baseline(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns r - mean of group, whitened over the trained tokens of the batch like `reinforce_pp` (arXiv 2501.03262;
    verl uses the root of the variance + 1e-8). Because of the whitening, a group of equal rewards may have a small
    nonzero advantage.
    """
    return reinforce_pp(compare(rewards, groups)[0], groups, tokens)


def opo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns r - (mean of the group's rewards, weighted by the number of trained tokens of each rollout), without std
    (OPO, arXiv 2505.23585). This baseline minimises the variance of the gradient if the gradient norm grows with the
    answer's length.
    """
    return rewards - _means(rewards, groups, tokens.astype(np.float64))[groups]


def opmd(
    rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray, *, baseline: str = "mean", tau: float = 1.0
) -> np.ndarray:
    """Returns r - b. With `baseline` "mean", b is the mean of the group's rewards. With "log_mean_exp", b is tau
    log(mean of exp(r / tau)) over the group (OPMD, arXiv 2501.12599 and 2509.24203).

    The paper also multiplies the whole loss by 1 / (1 + tau). This factor is not applied here and must be included in
    the learning rate. Raises ConfigError for an unknown `baseline` or a `tau` that is not positive.
    """
    if baseline not in ("mean", "log_mean_exp") or not tau > 0:
        raise ConfigError(
            f"estimator opmd: baseline = {baseline!r}, tau = {tau}: give the baseline mean or log_mean_exp, and a tau "
            "above 0"
        )
    if baseline == "mean":
        return compare(rewards, groups)[0]
    top = np.full(int(groups.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(top, groups, rewards)
    means = _means(np.exp((rewards - top[groups]) / tau), groups)
    return rewards - top[groups] - tau * np.log(means[groups])


def asymre(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray, *, baseline_shift: float = -0.1) -> np.ndarray:
    """Returns r - (mean of group + baseline_shift), without std (AsymRE, arXiv 2506.20520).

    A negative shift gives correct answers more weight than wrong ones, which helps if the answers were generated by
    older policies. Intended for a loss without ratio and clipping.
    """
    return compare(rewards, groups)[0] - baseline_shift


def w_reinforce(
    rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray, *, positive_weight: float = 0.1
) -> np.ndarray:
    """Returns `positive_weight` for a correct answer (reward above 0.5) and -1 for a wrong one, without baseline
    (W-REINFORCE, arXiv 2506.01347). With positive_weight 0, only wrong answers are trained on (NSR).
    """
    return np.where(rewards > 0.5, float(positive_weight), -1.0)


def reinforce(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the rewards unchanged, for recipes that subtract their own baseline."""
    return np.array(rewards)


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": grpo, "dr_grpo": dr_grpo, "batch": batch, "rloo": rloo, "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline, "opo": opo, "opmd": opmd, "asymre": asymre,
        "w_reinforce": w_reinforce, "reinforce": reinforce,
    }
)  # fmt: skip
GAE = "gae"  # estimator that needs the values of a critic too, see algorithms.gae and recipes.critics
# Estimators that can give a nonzero advantage to a rollout that is alone in its group.
# These estimators compare rewards over the whole batch, or do not compare rewards.
# Other estimators and user-defined functions never receive a rollout that is the only one in its group.
UNGROUPED = frozenset({"reinforce_pp", "w_reinforce", "reinforce"})


def find_estimator(named: EstimatorName) -> Estimator:
    """Returns the estimator function that the config names, with its arguments bound. `named` is a key of ESTIMATORS or
    `module:name` of a user's function, optionally with arguments. Raises ConfigError if the function is unknown or does
    not accept the arguments.
    """
    use = Use(target=named) if isinstance(named, str) else named
    if ":" in use.target:
        return build(use) if use.args else find_function(use.target)
    if use.target == GAE:
        raise ConfigError(
            f"estimator {GAE!r} needs a critic, which this recipe does not have: use Ppo, Tango or Agents"
        )
    if use.target not in ESTIMATORS:
        raise ConfigError(
            f"estimator {use.target!r}: use {', '.join(ESTIMATORS)}, or module:name of a function of your own"
        )
    if not use.args:
        return ESTIMATORS[use.target]
    estimator = build(replace(use, target=f"{__name__}:{use.target}"))
    # test call, so that an invalid argument is detected before the run starts
    with refusing(lambda error: f"estimator {use.target!r} with {use.args}: {error}", TypeError):
        estimator(np.array([0.0, 1.0]), np.zeros(2, np.int64), np.ones(2, np.int64))
    return estimator


def word_of(named: EstimatorName) -> str:
    """Returns the name of an estimator (a key of ESTIMATORS or `module:name`) without its arguments."""
    return named if isinstance(named, str) else named.target


def compare(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compares each reward r with all rewards of its group. Returns r - mean [B], the sample std (n - 1) of the group
    [B], and the group size n [B].

    For a group of equal rewards, and for a group of one rollout, r - mean and the std are exactly 0 regardless of
    rounding.
    """
    count = np.bincount(groups)
    centred = rewards - _means(rewards, groups)[groups]
    std = np.sqrt(np.bincount(groups, weights=centred**2) / np.maximum(count - 1, 1))
    return centred, std[groups], count[groups]


def _means(values: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Returns the mean of each group, weighted by [B] `weights`. The mean of a group of equal values is exactly this
    value. The mean of a group whose weights are all 0 is 0.
    """
    weights = np.ones(len(values)) if weights is None else weights
    total = np.bincount(groups, weights=weights)
    sums = np.bincount(groups, weights=weights * values)
    mean = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    low, high = np.full(len(total), np.inf), np.full(len(total), -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return np.where(low == high, low, mean)
