"""Estimators compare rewards to give advantages: pure functions, named in the config by a word or `module:name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from megatron_rl.config.plugins import find
from megatron_rl.config.schema import ConfigError

# (rewards [B] float64, group numbers [B] int64, trained tokens [B] int64) -> advantages [B] float64
Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

EPSILON = 1e-6  # added to every standard deviation, as in Tango's released code (verl: 1e-6; TRL: 1e-4)


def grpo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns (r - mean of group) / (std of group + 1e-6); sample std (n - 1), as Tango's code (arXiv 2402.03300)."""
    centred, std, _ = compare(rewards, groups)
    return centred / (std + EPSILON)


def dr_grpo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns r - mean of group; no std (arXiv 2503.20783)."""
    return compare(rewards, groups)[0]


def batch(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns (r - mean of group) / (std of all rewards of the batch + 1e-6); sample std (n - 1), and 1 when all are
    equal."""
    _, std, _ = compare(rewards, np.zeros_like(groups))
    return compare(rewards, groups)[0] / (np.where(std == 0.0, 1.0, std) + EPSILON)


def rloo(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns r - mean of the *other* rewards of the group = (r - mean of group) n / (n - 1); no std (arXiv
    2402.14740)."""
    centred, _, sizes = compare(rewards, groups)
    return centred * sizes / np.maximum(1, sizes - 1)


def reinforce_pp(rewards: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the rewards whitened over the trained tokens of the batch, each of which has its rollout's reward as
    undiscounted return: (r - mean) / (std + 1e-6), sample std (n - 1). Long answers count more; groups play no part."""
    total = tokens.sum()
    if total < 2:
        return rewards / (1.0 + EPSILON)
    own = rewards[tokens > 0]
    if own.min() == own.max():  # the rounded mean may not be the value
        return rewards - own[0]
    centred = rewards - (rewards * tokens).sum() / total
    return centred / (np.sqrt((centred**2 * tokens).sum() / (total - 1)) + EPSILON)


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "batch": batch, "rloo": rloo, "reinforce_pp": reinforce_pp}
)


def find_estimator(name: str) -> Estimator:
    """Returns the estimator with this name: one of this file's words, or a function of yours as `module:name`. Raises
    ConfigError."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise ConfigError(f"estimator {name!r}: use {', '.join(ESTIMATORS)}, or module:name of a function of your own")
    return find(name)


def compare(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compares rewards with those of their group. -> [B] r - mean, [B] sample std (n - 1) of the group, [B] its size n.

    Equal rewards have exactly 0 and std 0, whatever rounding does to their mean. A group of one has mean 0 and std 1.
    """
    count = np.bincount(groups)
    mean = np.bincount(groups, weights=rewards) / np.maximum(count, 1)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, groups, rewards)
    np.maximum.at(high, groups, rewards)
    mean = np.where(low == high, low, mean)
    mean[count == 1] = 0.0
    centred = rewards - mean[groups]
    std = np.sqrt(np.bincount(groups, weights=centred**2) / np.maximum(count - 1, 1))
    std[count == 1] = 1.0
    return centred, std[groups], count[groups]
