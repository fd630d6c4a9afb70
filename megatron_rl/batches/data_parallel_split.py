"""Splits an update's rollouts into optimizer steps, micro-batches and replicas, and computes their loss weights. Runs
on the driver and uses only the rollouts' spans and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_rl.batches.micro_batches import Prefixes, Shares
from megatron_rl.batches.packed_batch import IN_ADVANTAGES, BatchLoss, values_needed
from megatron_rl.batches.replica_batch import Outline, StepTotals
from megatron_rl.batches.rollout_buffer import Counts, fill, form_of
from megatron_rl.batches.units import members
from megatron_rl.types import FREE, Author, Rollout


class Partitioner(Protocol):
    """The methods that a policy must have so that rollouts can be split over its data-parallel replicas."""

    @property
    def replays(self) -> bool:
        """True if training uses, for each token, the experts that the engine chose (router replay)."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """True if the policy computes a prompt only once for all rollouts of a micro-batch that begin with this
        prompt."""
        ...

    def shares(self, lengths: np.ndarray, prefixes: Prefixes | None = None, groups: np.ndarray | None = None) -> Shares:
        """Splits S sequences of the given lengths into micro-batches for the policy's replicas. Called on the driver
        only. The result depends only on the arguments. `prefixes`: the prefixes that sequences share; None if the
        policy does not share prefixes. `groups`: [S] group indices; None if a group may be split over micro-batches.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ReplicaShares:
    """The rollouts of an update on the driver, with the share of each data-parallel replica."""

    outline: Outline
    rollouts: Sequence[Rollout]
    orders: Sequence[np.ndarray]  # for each replica: indices of its rollouts, in the order of its micro-batches
    micro_batches: Sequence[Sequence[int]]  # for each replica: number of rollouts in each of its micro-batches
    weights: np.ndarray  # [S] float32, loss weight of each rollout's tokens
    rescored: np.ndarray  # [S] bool, True if the trainer's log-probs are to replace the engine's
    shared: np.ndarray  # [S] int64, number of leading tokens shared with the previous rollout of the same micro-batch

    def buffer(self, replica: int) -> np.ndarray:
        """Returns the rollouts of a replica as a byte buffer. The buffer is sent to the replica's ranks."""
        order, outline = self.orders[replica], self.outline
        buffer = np.empty(outline.sizes[replica], np.uint8)
        arrays = {
            "weights": self.weights[order],
            "rescored": self.rescored[order],
            "numbers": order,
            "micro_batches": np.asarray(self.micro_batches[replica], np.int32),
        }
        arrays |= {"shared": self.shared[order]} if outline.form.shared else {}
        fill(buffer, outline.form, outline.counts[replica], [self.rollouts[i] for i in order], arrays)
        return buffer


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of tokens, spans (runs of tokens with the same author) and labels (predicted tokens) of each rollout, in
    arrays of shape [S]. The first token of a rollout is not predicted by any position, so it is not counted as a label.
    """

    lengths: np.ndarray  # int64, number of tokens
    spans: np.ndarray  # int64, number of spans
    trained: np.ndarray  # float64, number of labels (predicted tokens) that the policy sampled
    weighted: np.ndarray  # float64, sum of the weights of the labels in the loss
    mixed: np.ndarray  # bool, True if several weight versions of the policy generated tokens
    groups: np.ndarray  # int64, index of the rollout's group; groups of different roles have different indices
    units: np.ndarray  # int64, index of the rollout's unit (see units.py), in the order of their first rollouts


def tally(rollouts: Sequence[Rollout]) -> Tally:
    """Returns the counts of tokens, spans and labels of each rollout, computed from its spans."""
    size = len(rollouts)
    counts = np.fromiter((len(r.spans) for r in rollouts), np.int64, size)
    spans = np.concatenate([r.spans for r in rollouts] or [np.empty((0, 4), np.int32)])
    owner = np.repeat(np.arange(size), counts)
    start, end, author, version = spans.T.astype(np.int64)
    labels = (end - np.maximum(start, 1)).clip(min=0).astype(np.float64)
    ours = author == Author.POLICY
    trained = np.bincount(owner, labels * ours, size)
    partner = np.bincount(owner, labels * (author == Author.PARTNER), size)
    newest, oldest = np.full(size, -np.inf), np.full(size, np.inf)
    np.maximum.at(newest, owner[ours], version[ours])
    np.minimum.at(oldest, owner[ours], version[ours])
    numbers: dict[tuple[str, str], int] = {}
    units = np.empty(size, np.int64)
    for number, unit in enumerate(members(rollouts)):
        units[unit] = number
    return Tally(
        lengths=np.fromiter((len(r.tokens) for r in rollouts), np.int64, size),
        spans=counts,
        trained=trained,
        weighted=trained + partner * np.fromiter((r.partner_weight for r in rollouts), np.float64, size),
        mixed=newest > oldest,
        groups=np.fromiter((numbers.setdefault((r.role, r.group), len(numbers)) for r in rollouts), np.int64, size),
        units=units,
    )


def split_over_replicas(
    rollouts: Sequence[Rollout],
    partitioner: Partitioner,
    *,
    loss: BatchLoss | None = None,
    samples_per_step: int | None = None,
    rescore: bool = False,
) -> ReplicaShares:
    """Splits S rollouts into ceil(S / samples_per_step) consecutive optimizer steps of nearly equal size, and each step
    into micro-batches. The rollouts of one agent in an episode count as one sample, and stay in one optimizer step.

    Without a loss (to compute log-probs only), advantages and trained tokens are not required. Raises ValueError if
    there are no rollouts, if an optimizer step has no trained token, if a rollout or a pair of rollouts has more tokens
    than fit into a micro-batch, or if a rollout lacks an input of the loss.
    """
    if not rollouts:
        raise ValueError("no rollouts: nothing to train on")
    needs = loss.needs if loss is not None else frozenset()
    if paired := "pairs" in needs:
        rollouts = in_pairs(rollouts)
    elif samples_per_step is not None:
        rollouts = [rollouts[index] for unit in members(rollouts) for index in unit]
    signals = needs & IN_ADVANTAGES
    form = form_of(rollouts, values=values_needed(needs), advantages=bool(signals), experts=partitioner.replays)
    form = replace(form, shared=partitioner.shares_prefixes)
    counted, weights, shared = tally(rollouts), np.ones(len(rollouts), np.float32), np.zeros(len(rollouts), np.int64)
    steps, cuts = [], []
    for part in _optimizer_steps(counted.units, samples_per_step, paired=paired):
        span = slice(part.start, part.stop)
        prefixes = prefixes_of(rollouts[span]) if form.shared else None
        groups, denominator = counted.groups[span] if paired else None, 1.0
        shares = partitioner.shares(counted.lengths[span], prefixes, groups)
        shared[span] = 0 if prefixes is None else _repeated(shares, prefixes)
        if loss is not None:
            weights[span], denominator = _aggregated(loss, counted, span)
        cuts.append([[[i + part.start for i in micro] for micro in share] for share in shares.sequences])
        totals = _totals(shares, denominator, rollouts[span], counted, span, partitioner.replays)
        steps.append(replace(totals, shared_tokens=float(shared[span].sum())))
    replicas = range(len(cuts[0]))
    shares_of = [[micro for cut in cuts for micro in cut[r]] for r in replicas]
    orders = [np.array([i for micro in share for i in micro], np.int64) for share in shares_of]
    micros = [[len(micro) for micro in share] for share in shares_of]
    mixed = counted.mixed if rescore else np.zeros(len(rollouts), bool)
    sizes = [(len(order), int(counted.spans[order].sum()), int(counted.lengths[order].sum())) for order in orders]
    counts = [Counts(*size, len(micro)) for size, micro in zip(sizes, micros, strict=True)]
    outline = Outline(form=form, steps=steps, counts=counts, rescored=bool(mixed.any()))
    return ReplicaShares(
        outline=outline, rollouts=rollouts, orders=orders, micro_batches=micros, weights=weights, rescored=mixed,
        shared=shared,
    )  # fmt: skip


def _optimizer_steps(units: np.ndarray, samples_per_step: int | None, *, paired: bool) -> list[range]:
    """Splits S rollouts into optimizer steps. The rollouts of a unit stay together, unless pairs stay together.

    `units`: [S] index of each rollout's unit; the rollouts of a unit are adjacent if `samples_per_step` is given.
    """
    if paired or samples_per_step is None:
        return split(len(units), samples_per_step, unit=2 if paired else 1)
    bounds = np.flatnonzero(np.diff(units, prepend=-1, append=-1)).tolist()
    return [range(bounds[part.start], bounds[part.stop]) for part in split(len(bounds) - 1, samples_per_step)]


def _aggregated(loss: BatchLoss, counts: Tally, step: slice) -> tuple[np.ndarray, float]:
    """Returns the loss weights [S] of an optimizer step's rollouts, and the denominator. A unit counts once in means
    over rollouts. Raises ValueError if the rollouts have no trained token."""
    if not counts.trained[step].any():
        raise ValueError(f"rollouts {step.start} to {step.stop - 1} have no trained token: nothing to learn")
    _, firsts, numbers = np.unique(counts.units[step], return_index=True, return_inverse=True)
    labels = np.bincount(numbers, counts.weighted[step])
    weights, denominator = loss.aggregate(labels, counts.groups[step][firsts])
    return weights[numbers], denominator


def prefixes_of(rollouts: Sequence[Rollout]) -> Prefixes:
    """Finds which of the S rollouts begin with the same prompt tokens, regardless of their group.

    The prompt consists of the tokens before the first token that a model generated. The prompt never includes the last
    token of a rollout.
    """
    lengths = np.fromiter((max(0, min(r.start, len(r.tokens) - 1)) for r in rollouts), np.int64, len(rollouts))
    numbers: dict[bytes | int, int] = {}
    keys = (r.tokens[:n].tobytes() if n else i for i, (r, n) in enumerate(zip(rollouts, lengths.tolist(), strict=True)))
    return Prefixes(
        numbers=np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(rollouts)),
        lengths=lengths,
    )


def in_pairs(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts sorted by group, so that the two rollouts of each group are adjacent. Groups are in the
    order of their first rollouts, and the order within a group is preserved. Raises ValueError if a group does not have
    exactly two rollouts.
    """
    groups: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout.role, rollout.group), []).append(rollout)
    for (_, name), pair in groups.items():
        if len(pair) != 2:
            raise ValueError(
                f"group {name!r} has {len(pair)} rollouts, and the loss compares two: give each group the preferred "
                "rollout and then the other one"
            )
    return [rollout for pair in groups.values() for rollout in pair]


def split(sequences: int, size: int | None, *, unit: int = 1) -> list[range]:
    """Splits S sequences into ceil(S / size) consecutive ranges whose lengths differ by at most `unit`. If `size` is
    None, returns one range. `unit`: number of consecutive sequences that stay together; S is a multiple of it.
    """
    units = sequences // unit
    count = 1 if size is None else min(-(-sequences // size), units)
    return [range(i * units // count * unit, (i + 1) * units // count * unit) for i in range(count)]


def _repeated(shares: Shares, prefixes: Prefixes) -> np.ndarray:
    """Returns [S] int64: the number of leading tokens that each rollout shares with the previous rollout of its
    micro-batch.
    """
    shared = np.zeros(len(prefixes.lengths), np.int64)
    for micro in (micro for share in shares.sequences for micro in share):
        previous, later = np.array(micro[:-1], np.int64), np.array(micro[1:], np.int64)
        same = prefixes.numbers[previous] == prefixes.numbers[later]
        shared[later[same]] = prefixes.lengths[later[same]]
    return shared


def _totals(
    shares: Shares, denominator: float, rollouts: Sequence[Rollout], counted: Tally, span: slice, replays: bool
) -> StepTotals:
    tokens = int(counted.lengths[span].sum())
    chosen = [r.experts[:, -1, 0] for r in rollouts if replays and r.experts is not None]
    replayed = sum(int((first != FREE).sum()) for first in chosen)
    return StepTotals(
        denominator=denominator,
        trained_tokens=float(counted.trained[span].sum()),
        packed_tokens=float(tokens),
        micro_batches=len(shares.sequences[0]),
        replica_imbalance=shares.replica_imbalance,
        micro_batch_imbalance=shares.micro_batch_imbalance,
        replayed=replayed / tokens,
    )
