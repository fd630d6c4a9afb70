"""Decides which failed samples of an iteration are replaced by new samples of the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

ROUNDS = 2  # maximum number of times that a failed sample is replaced by a new sample


def to_replace(failed: Collection[int], *, count: int, group_size: int) -> list[int]:
    """Returns the indices of the failed samples to replace, in ascending order.

    `failed`: indices of the samples that failed for a reason that the policy did not cause. `count`: number of all
    samples. `group_size`: number of samples of each problem.

    If all samples of a problem failed, they are not replaced, because the problem is the likely cause. If `group_size`
    is 1 and all `count` samples failed, none is replaced, because the grader or the environment is the likely cause.
    """
    limit = count if group_size == 1 else group_size
    sizes = Counter(place // limit for place in failed)
    return [place for place in sorted(failed) if sizes[place // limit] < limit]
