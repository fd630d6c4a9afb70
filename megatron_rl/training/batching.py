"""Cuts a batch of sequences into micro-batches by token budget, balanced over micro-batches and data-parallel replicas by cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron_rl.weights.sizes import Sizes


@dataclass(frozen=True)
class Cost:
    """What a sequence costs to train on, in tokens that attend to nothing: L + L^2 / balance. `balance` 0: its tokens."""

    balance: float = 0.0

    @classmethod
    def of_model(cls, sizes: Sizes, experts_per_token: int) -> Self:
        """The balance is the length at which a layer's causal attention (2 L^2 x heads x head size FLOPs) costs as much as its products
        with the weights that a token meets (2 L x their number)."""
        attention = 2 * sizes.hidden * (sizes.heads + sizes.kv_heads) * sizes.head_dim
        wide = sizes.expert_ffn * experts_per_token + sizes.shared_ffn if sizes.experts else sizes.ffn
        return cls(balance=(attention + 3 * sizes.hidden * wide) / (sizes.heads * sizes.head_dim))

    def of(self, length: int) -> float:
        return length + (length * length / self.balance if self.balance else 0.0)


@dataclass(frozen=True)
class Shares:
    """Sequence numbers by replica and micro-batch, and how uneven they are."""

    sequences: list[list[list[int]]]  # [replicas][M]
    replica_imbalance: float  # cost of the dearest replica over the mean, minus 1
    micro_batch_imbalance: float  # of the dearest micro-batch, likewise: what pipeline stages wait for


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int, replicas: int, multiple: int = 1, cost: Cost | None = None
) -> Shares:
    """[S] lengths -> M micro-batches for each of the replicas, each within `max_tokens`.

    The number of micro-batches is the smallest multiple of `multiple` that the budget allows; sequences are dealt dearest first to
    the cheapest one that has room, then micro-batches are dealt to replicas the same way. A list is empty only when there are fewer
    sequences than lists. Raises ValueError when one sequence alone exceeds the budget.
    """
    if max(lengths) > max_tokens:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens exceeds micro_batch_tokens = {max_tokens}: raise it or shorten max_tokens"
        )
    costs = [(cost or Cost()).of(n) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // (max_tokens * replicas * multiple))) * multiple
    while (bins := _deal(lengths, costs, order, count * replicas, max_tokens)) is None:
        count += multiple
    weights = [sum(costs[i] for i in b) for b in bins]
    by_weight = sorted(range(len(bins)), key=lambda b: (-weights[b], b))
    shares: list[list[list[int]]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for start in range(
        0, len(bins), replicas
    ):  # every replica gets one bin of each size class, the least loaded the dearest
        for replica, b in zip(
            sorted(range(replicas), key=lambda r: (loads[r], r)), by_weight[start : start + replicas], strict=True
        ):
            shares[replica].append(sorted(bins[b], key=lambda i: (lengths[i], i)))
            loads[replica] += weights[b]
    return Shares(shares, _imbalance(loads), _imbalance(weights))


def _imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) - 1.0


def _deal(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """In `order` to the cheapest of `count` bins that has room. [S] -> [count] lists; None where there is no room."""
    heap = [(0.0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for i in order:
        full = []
        while heap and filled[heap[0][1]] + lengths[i] > max_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        weight, b = heapq.heappop(heap)
        bins[b].append(i)
        filled[b] += lengths[i]
        heapq.heappush(heap, (weight + costs[i], b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins
