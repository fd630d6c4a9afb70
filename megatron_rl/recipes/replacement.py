"""Decides which failed samples of an iteration are replaced by new samples of the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

ROUNDS = 2  # maximum number of new samples in place of one sample


def to_replace(failed: Collection[int], *, count: int, group_size: int) -> list[int]:
    """Returns the indices of the samples to replace, in order. `failed`: indices of the samples that failed for a
    reason that the policy did not cause. `count`: number of samples.

    A failure that a new sample cannot cure is not a reason to sample: if all samples of a group failed, the problem is
    the likely cause, and if all samples of groups of one sample failed, the grader or the environment.
    """
    whole = count if group_size == 1 else group_size
    sizes = Counter(place // whole for place in failed)
    return [place for place in sorted(failed) if sizes[place // whole] < whole]
