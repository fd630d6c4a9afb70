"""Cuts a batch of sequences into micro-batches by token budget, balanced over micro-batches and data-parallel replicas
by cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from megatron_rl.models.sizes import Sizes


@dataclass(frozen=True)
class Cost:
    """The cost of training on a sequence, in tokens that attend to nothing: L + L^2 / balance. `balance` 0: its
    tokens."""

    balance: float = 0.0

    @classmethod
    def of_model(cls, sizes: Sizes, experts_per_token: int) -> Self:
        """The balance is the length at which a layer's causal attention (L^2 x heads x (head size + value size) FLOPs)
        costs as much as its products with the weights that a token meets (2 L x their number), in the mean of all
        layers."""
        sparse = sizes.expert_layers / sizes.num_layers
        wide = sparse * (sizes.expert_ffn * experts_per_token + sizes.shared_ffn) + (1 - sparse) * sizes.ffn
        weights = sizes.attention_weights + 3 * sizes.hidden * wide
        return cls(balance=weights / (sizes.heads * (sizes.head_dim + sizes.value_width) / 2))

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """[S] -> [S] float64."""
        sizes = np.asarray(lengths, np.float64)
        return sizes + (sizes * sizes / self.balance if self.balance else 0.0)


@dataclass(frozen=True)
class Shares:
    """Sequence numbers by replica and micro-batch, and how uneven they are."""

    sequences: list[list[list[int]]]  # [replicas][M]
    replica_imbalance: float  # cost of the dearest replica over the mean, minus 1
    micro_batch_imbalance: float  # of the dearest micro-batch, likewise: what pipeline stages wait for


def micro_batches(
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    replicas: int,
    multiple: int = 1,
    cost: Cost | None = None,
) -> Shares:
    """[S] lengths -> M micro-batches for each of the replicas, each within `max_tokens`.

    The number of micro-batches is the smallest multiple of `multiple` that the budget allows (beyond 64 of them, within
    a sixty-fourth of it); sequences are dealt dearest first to the cheapest micro-batch that has room, then
    micro-batches are dealt to replicas the same way. A list is empty only when there are fewer sequences than lists.
    Raises ValueError when one sequence alone exceeds the budget.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.max() > max_tokens:
        raise ValueError(
            f"a sequence of {sizes.max()} tokens exceeds micro_batch_tokens = {max_tokens}: "
            "raise it or shorten max_tokens"
        )
    costs = (cost or Cost()).of(sizes)
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order].tolist(), costs[order].tolist()
    least = max(-(-int(sizes.sum()) // max_tokens), int((2 * sizes > max_tokens).sum()), 1)
    rounds = -(-least // (replicas * multiple))
    while (places := _deal(*falling, rounds * multiple * replicas, max_tokens)) is None:
        rounds += max(1, rounds // 64)
    bins: list[list[int]] = [[] for _ in range(rounds * multiple * replicas)]
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[order] = places
    for i in np.argsort(sizes, kind="stable").tolist():  # shortest first
        bins[bin_of[i]].append(i)
    weights = np.bincount(places, costs[order], len(bins)).tolist()
    shares, loads = _over_replicas(bins, weights, replicas)
    return Shares(shares, _imbalance(loads), _imbalance(weights))


def _over_replicas(
    bins: list[list[int]], weights: Sequence[float], replicas: int
) -> tuple[list[list[list[int]]], list[float]]:
    """Gives every replica one bin of each size class, the least loaded one the dearest. -> [replicas][M] bins and the
    replicas' loads."""
    by_weight = sorted(range(len(bins)), key=lambda b: (-weights[b], b))
    shares: list[list[list[int]]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for start in range(0, len(bins), replicas):
        cheapest = sorted(range(replicas), key=lambda r: (loads[r], r))
        for replica, b in zip(cheapest, by_weight[start : start + replicas], strict=True):
            shares[replica].append(bins[b])
            loads[replica] += weights[b]
    return shares, loads


def _imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) - 1.0


def _deal(lengths: Sequence[int], costs: Sequence[float], count: int, max_tokens: int) -> list[int] | None:
    """Deals sequences, longest first, each to the cheapest of `count` bins that has room. [S] -> [S] bins; None where
    there is no room.

    A bin without room for a sequence waits aside until a sequence comes that is short enough: lengths fall, so that
    each bin is put aside at most once per sequence that it holds.
    """
    open_bins = [(0.0, b) for b in range(count)]
    aside: list[tuple[int, float, int]] = []  # (-room, weight, bin)
    filled = [0] * count
    places = []
    for length, cost in zip(lengths, costs, strict=True):
        while aside and -aside[0][0] >= length:
            _, weight, b = heapq.heappop(aside)
            heapq.heappush(open_bins, (weight, b))
        while open_bins and filled[open_bins[0][1]] + length > max_tokens:
            weight, b = heapq.heappop(open_bins)
            heapq.heappush(aside, (filled[b] - max_tokens, weight, b))
        if not open_bins:
            return None
        weight, b = open_bins[0]
        heapq.heapreplace(open_bins, (weight + cost, b))
        places.append(b)
        filled[b] += length
    return places
