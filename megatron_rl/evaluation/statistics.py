"""Computes metrics from scores: pass@k, votes, bootstrap intervals, paired tests and calibration. Pure functions.

Shapes: P problems, n samples of one problem, R resamples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

RESAMPLES = 2000  # number of bootstrap resamples
EXACT_SIGNS = 16  # up to this number of differences that are not 0, `sign_flip` tries all sign patterns


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """The comparison of two models on the same problems. `difference`: mean score of the second model minus mean score
    of the first model."""

    problems: int
    difference: Interval
    p_permutation: float  # two-sided p-value of the sign-flip permutation test of the mean difference
    p_mcnemar: float | None  # p-value of the exact McNemar test; None unless every score is 0 or 1
    better: int  # number of problems on which the second model is better
    worse: int


@dataclass(frozen=True, slots=True)
class Bin:
    """Statistics of the predictions whose confidence is in one interval. [0, 1] is divided into intervals of equal
    width."""

    count: int
    confidence: float  # mean confidence
    accuracy: float  # share of the predictions that are true


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well a model's confidences match the share of its predictions that are true."""

    ece: float  # expected calibration error: mean |confidence - accuracy| over bins, weighted by the bins' counts
    brier: float  # Brier score: mean squared difference of confidence and truth (0 or 1)
    bins: tuple[Bin, ...]  # the bins that are not empty


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns pass@k: the probability that k of n samples, c of which are correct, include a correct sample.

    The estimator 1 - C(n-c, k) / C(n, k) is unbiased (arXiv 2107.03374). Raises ValueError unless 1 <= k <= n and
    0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} samples with {c} correct: k must lie in 1..n, the correct ones in 0..n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def majority(keys: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Returns the score of the most frequent answer to one problem. `keys`, `scores`: normal form and score of the
    answer of each of n samples.

    The key None means that a sample has no answer, and is not counted. The score of an answer is the mean over its
    samples. In a tie, the result is the mean score of the tied answers: the expected score if ties are broken at random
    (`votes.elect` takes the earliest, because training needs one label). Returns 0.0 if no sample has an answer.
    """
    return weighted_vote(keys, scores, [1.0] * len(keys))


def weighted_vote(keys: Sequence[Hashable | None], scores: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the score of the answer with the largest sum of weights. Everything else is as in `majority`.

    `weights`: [n] weights of the samples. Returns 0.0 if all weights are 0.
    """
    votes: dict[Hashable, float] = defaultdict(float)
    members: dict[Hashable, list[float]] = defaultdict(list)
    for key, score, weight in zip(keys, scores, weights, strict=True):
        if key is not None:
            votes[key] += weight
            members[key].append(score)
    most = max(votes.values(), default=0.0)
    return fmean(fmean(members[key]) for key, vote in votes.items() if math.isclose(vote, most)) if most > 0 else 0.0


def best_of_n(scores: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the score of the sample with the largest weight. In a tie, returns the mean score of the tied samples;
    without samples, 0.0."""
    most = max(weights, default=0.0)
    return fmean(score for score, weight in zip(scores, weights, strict=True) if weight == most) if scores else 0.0


def mean_interval(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Returns the mean over problems with its bootstrap interval. `values`: [P] values, one for each problem; must
    not be empty."""
    return macro_interval([values], seed=seed, resamples=resamples)


def macro_interval(sets: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Returns the equal-weight mean of the sets' means, with an interval from resampling the problems of each set.

    `sets`: for each problem set, the values of its problems; no set may be empty.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for values in sets:
        means += _resampled_means(np.asarray(values, dtype=float), rng, resamples) / len(sets)
    return Interval(fmean(fmean(values) for values in sets), *_percentiles(means))


def bootstrap(
    count: int, statistic: Callable[[np.ndarray], float | None], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Returns a statistic of `count` problems with its bootstrap interval; None if the statistic is undefined for the
    problems.

    `statistic`: function of an array of `count` problem indices. It returns None for resamples for which the statistic
    is not defined; such resamples are left out.
    """
    value = statistic(np.arange(count)) if count else None
    if value is None:
        return None
    rng = np.random.default_rng(seed)
    resampled = [statistic(rng.integers(0, count, count)) for _ in range(resamples)]
    return Interval(value, *_percentiles(np.array([f for f in resampled if f is not None])))


def paired(
    first: Mapping[str, float], second: Mapping[str, float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Paired:
    """Compares two models on the problems for which both have a score. `first`, `second`: {problem: score}.

    Raises ValueError if the models have no problem in common.
    """
    shared = [key for key in first if key in second]
    if not shared:
        raise ValueError("the two results have no problem in common: compare evaluations of the same sets")
    a, b = (np.array([scores[key] for key in shared], dtype=float) for scores in (first, second))
    difference = b - a
    rng = np.random.default_rng(seed)
    interval = Interval(float(difference.mean()), *_percentiles(_resampled_means(difference, rng, resamples)))
    binary = bool(np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all())
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    return Paired(
        problems=len(shared),
        difference=interval,
        p_permutation=sign_flip(difference, seed=seed),
        p_mcnemar=mcnemar(better, worse) if binary else None,
        better=better,
        worse=worse,
    )


def mcnemar(better: int, worse: int) -> float:
    """Returns the exact two-sided p-value of McNemar's test for two models. It is the probability that tosses of a fair
    coin, one for each problem with different results, give at least as uneven counts. `better`, `worse`: number of
    problems on which the second model is better, and worse."""
    total = better + worse
    tail = sum(math.comb(total, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**total)


def sign_flip(difference: np.ndarray, *, seed: int = 0, permutations: int = 10_000) -> float:
    """Returns the two-sided p-value of a mean difference in a sign-flip permutation test. `difference`: [P] difference
    of the two scores of each problem.

    If at most EXACT_SIGNS differences are not 0, all patterns of their signs are enumerated. Otherwise, random patterns
    are drawn. `permutations`: number of random patterns.
    """
    nonzero = difference[difference != 0]
    if not len(nonzero):
        return 1.0
    at_least = abs(nonzero.sum()) * (1 - 1e-12)
    if len(nonzero) <= EXACT_SIGNS:
        patterns = (np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero)) & 1) * 2 - 1
        return float((np.abs(patterns @ nonzero) >= at_least).mean())
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(0, permutations, 1000):
        signs = rng.integers(0, 2, (1000, len(nonzero))) * 2 - 1
        hits += int((np.abs(signs @ nonzero) >= at_least).sum())
    return (hits + 1) / (permutations + 1)


def calibration(confidences: Sequence[float], truths: Sequence[bool], *, bins: int = 10) -> Calibration | None:
    """Returns the calibration of N predictions. `confidences`: [N] values in [0, 1]. `truths`: [N], whether each
    prediction is true.

    Returns None if there are no predictions.
    """
    if not confidences:
        return None
    inside: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for confidence, truth in zip(confidences, truths, strict=True):
        inside[min(int(confidence * bins), bins - 1)].append((confidence, truth))
    filled = tuple(
        Bin(len(rows), fmean(c for c, _ in rows), fmean(float(t) for _, t in rows))
        for _, rows in sorted(inside.items())
    )
    ece = sum(b.count * abs(b.confidence - b.accuracy) for b in filled) / len(confidences)
    brier = fmean((c - float(t)) ** 2 for c, t in zip(confidences, truths, strict=True))
    return Calibration(ece=ece, brier=brier, bins=filled)


def _resampled_means(values: np.ndarray, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """Returns an array of the means of R = `resamples` bootstrap resamples of `values`, drawn with replacement."""
    return np.array([values[rng.integers(0, len(values), len(values))].mean() for _ in range(resamples)])


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
