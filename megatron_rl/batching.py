"""Cuts a batch of sequences into micro-batches by token budget, balanced over data-parallel replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], *, max_tokens: int, replicas: int, multiple: int = 1) -> list[list[list[int]]]:
    """[S] lengths -> [replicas][M] lists of sequence numbers: M equal for all replicas, each list within `max_tokens`.

    The number of micro-batches is the smallest multiple of `multiple` that the budget allows; sequences are dealt longest first to
    the emptiest one, then micro-batches are dealt to replicas the same way. A list is empty only when there are fewer sequences than lists.
    Raises ValueError when one sequence alone exceeds the budget.
    """
    if max(lengths) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds micro_batch_tokens = {max_tokens}: raise it or shorten max_tokens")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // (max_tokens * replicas * multiple))) * multiple
    while True:
        bins = _deal(lengths, order, count * replicas)
        if max(sum(lengths[i] for i in b) for b in bins) <= max_tokens:
            break
        count += multiple
    weights = [sum(lengths[i] for i in b) for b in bins]
    by_weight = sorted(range(len(bins)), key=lambda b: (-weights[b], b))
    shares: list[list[list[int]]] = [[] for _ in range(replicas)]
    for start in range(0, len(bins), replicas):  # snake order: every replica gets one bin of each size class
        row = by_weight[start : start + replicas]
        for replica, b in enumerate(row if (start // replicas) % 2 == 0 else row[::-1]):
            shares[replica].append(sorted(bins[b], key=lambda i: (lengths[i], i)))
    return shares


def _deal(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """Longest first to the emptiest of `count` bins. [S] -> [count] lists."""
    heap = [(0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        weight, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (weight + lengths[i], b))
    return bins
