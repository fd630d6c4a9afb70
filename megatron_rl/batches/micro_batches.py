"""Splits a batch of sequences into micro-batches within a token budget, and balances the computational cost over
micro-batches and data-parallel replicas. Sequences with the same prompt stay together if the prompt is computed once
for all of them. Sequences that a loss compares, such as the two rollouts of a preference pair, always stay together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatron_rl.models.sizes import Sizes

# Sequences that share a prefix are split into units that cost at most about 1 / n of a replica's mean cost; n = 0 means
# no bound on the cost. These are the candidates for n, and the one whose most expensive replica is cheapest is used.
# With one replica, or if whole groups of sequences stay together, only the first candidate is used.
PIECES = (0, 1, 2, 4)


@dataclass(frozen=True)
class Cost:
    """The cost model for training on a sequence of length L: L + L^2 / balance. The unit is the cost of one token
    without attention. With `balance` 0 the cost is L.
    """

    balance: float = 0.0

    @classmethod
    def of_model(cls, sizes: Sizes, experts_per_token: int) -> Self:
        """Returns the cost model of a transformer, averaged over its layers.

        `balance` is the length at which a layer's causal attention (L^2 x heads x (head size + value size) FLOPs) costs
        as much as the matrix products with the layer's active weights (2 L x number of weights).
        """
        sparse = sizes.expert_layers / sizes.num_layers
        wide = sparse * (sizes.expert_ffn * experts_per_token + sizes.shared_ffn) + (1 - sparse) * sizes.ffn
        weights = sizes.attention_weights + 3 * sizes.hidden * wide
        return cls(balance=weights / (sizes.heads * (sizes.head_dim + sizes.value_width) / 2))

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the cost of sequences of the given lengths. [S] -> [S] float64"""
        sizes = np.asarray(lengths, np.float64)
        return sizes + (sizes * sizes / self.balance if self.balance else 0.0)


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """The prefixes (leading tokens) that sequences share, as two arrays of shape [S]. Sequences with the same entry in
    `numbers` begin with the same prefix, and have the same entry in `lengths`.
    """

    numbers: np.ndarray  # int64, index of the prefix
    lengths: np.ndarray  # int64, length of the prefix; less than the length of the sequence


@dataclass(frozen=True)
class Shares:
    """An assignment of sequences to replicas and micro-batches, and the imbalance of the costs."""

    sequences: list[list[list[int]]]  # [replicas][M]: indices of the sequences of each micro-batch
    replica_imbalance: float  # maximum cost of a replica divided by the mean, minus 1
    # maximum cost of a micro-batch divided by the mean, minus 1; the higher this value, the longer pipeline stages wait
    # for the slowest micro-batch
    micro_batch_imbalance: float


def micro_batches(
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    replicas: int,
    multiple: int = 1,
    cost: Cost | None = None,
    prefixes: Prefixes | None = None,
    groups: np.ndarray | None = None,
) -> Shares:
    """Splits S sequences of the given lengths into M micro-batches per replica, each with at most `max_tokens` tokens.

    M is the smallest multiple of `multiple` with which all sequences fit (if M is large, up to about 1/64 more). In
    order of decreasing length, each sequence goes to the cheapest micro-batch with enough free tokens. Micro-batches
    are then assigned to replicas in order of decreasing cost. A micro-batch is empty only if there are fewer sequences
    than micro-batches.

    With `prefixes`, sequences with the same prefix are adjacent in a micro-batch, and the prefix is counted once. These
    sequences are assigned together, unless they exceed `max_tokens`, or unless splitting them makes the most expensive
    replica cheaper although the prefix is then computed several times.
    `groups`: [S] int64, index of each sequence's group. All sequences of a group are put into one micro-batch, adjacent
        and in the given order.
    Raises ValueError if a single sequence or a whole group exceeds `max_tokens`.
    """
    sizes, cost = np.asarray(lengths, np.int64), cost or Cost()
    if sizes.max() > max_tokens:
        raise ValueError(
            f"a sequence of {sizes.max()} tokens exceeds micro_batch_tokens = {max_tokens}: "
            "raise it or shorten max_tokens"
        )
    if prefixes is None and groups is None:
        return _cut(sizes, cost.of(sizes), max_tokens=max_tokens, replicas=replicas, multiple=multiple)
    prefixes = prefixes or Prefixes(numbers=np.arange(len(sizes)), lengths=np.zeros_like(sizes))
    best: tuple[float, list[_Family], Shares] | None = None
    grouped = None if groups is None else _whole_groups(sizes, prefixes, cost, groups=groups, max_tokens=max_tokens)
    for pieces in PIECES[: 1 if replicas == 1 or grouped is not None else None]:
        families = grouped or _families(sizes, prefixes, cost, max_tokens=max_tokens, pieces=pieces * replicas)
        tokens, costs = np.array([f.tokens for f in families]), np.array([f.cost for f in families])
        shares = _cut(tokens, costs, max_tokens=max_tokens, replicas=replicas, multiple=multiple)
        dearest = (1 + shares.replica_imbalance) * float(costs.sum())
        if best is None or dearest < best[0]:
            best = dearest, families, shares
    assert best is not None
    _, families, shares = best

    def members(micro: list[int]) -> list[int]:
        return [i for family in sorted(micro, key=lambda f: families[f].number) for i in families[family].sequences]

    return replace(shares, sequences=[[members(micro) for micro in share] for share in shares.sequences])


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Sequences that are assigned to one micro-batch together, with their cost if a shared prefix is computed once."""

    number: int  # entry of the first sequence in Prefixes.numbers
    sequences: list[int]
    tokens: int
    cost: float


def _families(sizes: np.ndarray, prefixes: Prefixes, cost: Cost, *, max_tokens: int, pieces: int) -> list[_Family]:
    """Groups S sequences of the given sizes by prefix. Splits groups that have more than `max_tokens` tokens. If
    `pieces` is positive, also splits groups that have more than 1 / pieces of the total cost, into parts of about this
    cost.
    """
    shared, prefix_costs = prefixes.lengths, cost.of(prefixes.lengths)
    tails, own_costs = sizes - shared, cost.of(sizes) - prefix_costs
    order = np.lexsort((np.arange(len(sizes)), -tails, prefixes.numbers))
    bounds = np.flatnonzero(np.diff(prefixes.numbers[order], prepend=-1, append=-1))
    firsts = order[bounds[:-1]]
    most = np.inf if not pieces else float(own_costs.sum() + prefix_costs[firsts].sum()) / pieces
    families = []
    for start, end in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
        first, members = int(order[start]), order[start:end]
        room, prefix = max_tokens - int(shared[first]), float(prefix_costs[first])
        tokens, costs = tails[members].tolist(), own_costs[members].tolist()
        count = max(1, -(-sum(tokens) // room), min(len(members), math.ceil((prefix + sum(costs)) / most)))
        while (places := _deal(tokens, costs, count, room)) is None:
            count += 1
        for part in range(count):
            mine = [i for i, place in enumerate(places) if place == part]
            if mine:
                families.append(
                    _Family(
                        number=int(prefixes.numbers[first]),
                        sequences=members[mine].tolist(),
                        tokens=int(shared[first]) + sum(tokens[i] for i in mine),
                        cost=prefix + sum(costs[i] for i in mine),
                    )
                )
    return families


def _whole_groups(
    sizes: np.ndarray, prefixes: Prefixes, cost: Cost, *, groups: np.ndarray, max_tokens: int
) -> list[_Family]:
    """Returns one `_Family` (sequences that stay together) for each group of sequences, in the order of the group
    indices. `sizes` and `groups` are [S]. A prefix of adjacent sequences of a group is counted once. Raises ValueError
    if a group exceeds `max_tokens`.
    """
    order = np.argsort(groups, kind="stable")
    numbers, bounds = prefixes.numbers[order], np.flatnonzero(np.diff(groups[order], prepend=-1, append=-1))
    repeated = np.diff(numbers, prepend=-1) == 0
    repeated[bounds[:-1]] = False
    shared = np.where(repeated, prefixes.lengths[order], 0)
    tokens = np.add.reduceat(sizes[order] - shared, bounds[:-1])
    costs = np.add.reduceat(cost.of(sizes[order]) - cost.of(shared), bounds[:-1])
    if tokens.max() > max_tokens:
        raise ValueError(
            f"{tokens.max()} tokens of rollouts that are compared with each other exceed micro_batch_tokens = "
            f"{max_tokens}: raise it, or shorten max_tokens"
        )
    return [
        _Family(number=int(numbers[start]), sequences=order[start:end].tolist(), tokens=int(size), cost=float(price))
        for start, end, size, price in zip(bounds, bounds[1:], tokens, costs, strict=False)
    ]


def _cut(sizes: np.ndarray, costs: np.ndarray, *, max_tokens: int, replicas: int, multiple: int) -> Shares:
    """Assigns U units (groups of sequences that stay together), with the given token counts and costs, to
    micro-batches, and the micro-batches to replicas.
    """
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order].tolist(), costs[order].tolist()
    least = max(-(-int(sizes.sum()) // max_tokens), int((2 * sizes > max_tokens).sum()), 1)
    rounds = -(-least // (replicas * multiple))
    while (places := _deal(*falling, rounds * multiple * replicas, max_tokens)) is None:
        rounds += max(1, rounds // 64)
    bins: list[list[int]] = [[] for _ in range(rounds * multiple * replicas)]
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[order] = places
    for i in np.argsort(sizes, kind="stable").tolist():  # the shortest units come first within a micro-batch
        bins[bin_of[i]].append(i)
    weights = np.bincount(places, costs[order], len(bins)).tolist()
    shares, loads = _over_replicas(bins, weights, replicas)
    return Shares(shares, _imbalance(loads), _imbalance(weights))


def _over_replicas(
    bins: list[list[int]], weights: Sequence[float], replicas: int
) -> tuple[list[list[list[int]]], list[float]]:
    """Assigns bins (micro-batches) to replicas in order of decreasing cost. In each round every replica gets one bin;
    the least loaded replica gets the most expensive bin. Returns the bins of each replica ([replicas][M]) and the total
    cost of each replica.
    """
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
    """Assigns sequences to `count` bins (micro-batches) of at most `max_tokens` tokens. The longest sequence comes
    first; each sequence goes to the cheapest bin with enough free tokens. Returns the bin of each sequence, [S], or
    None if some sequence does not fit into any bin.

    A bin with too few free tokens for the current sequence is set aside until a later sequence is short enough for the
    bin. Lengths decrease, so each bin is set aside at most once per sequence that it holds.
    """
    open_bins = [(0.0, b) for b in range(count)]
    aside: list[tuple[int, float, int]] = []  # heap of the bins set aside: (-free tokens, cost, index of the bin)
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
