"""The packed batch that a loss reads, the statistics that a model computes for the batch, and the protocol
of losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_rl.batches.rollout_buffer import Counts, Flat, fill, form_of
from megatron_rl.devices.host_to_device import upload
from megatron_rl.lib.lazy_import import LazyModule
from megatron_rl.types import Rollout

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any

# key in Rollout.values; the value is the array [T, k] of the token ids for which `candidate_logprobs` are computed
CANDIDATES = "candidates"
# If a metric NAME is averaged over other items than trained tokens, the number of these items has the key COUNT + NAME.
COUNT = "count/"
# Names of the statistics that a model can compute for a label (predicted token).
# `candidate_logprobs` has k values per label, the other statistics have one value.
STATISTICS = ("logprobs", "entropy", "vocab_mean", "candidate_logprobs")
# Signals, which are the data of rollouts from which a policy learns, except those that are keys of Rollout.values.
# "pairs": the two rollouts of a group are the preferred response and the other one. "targets": the trained tokens are
# texts to imitate. "demonstrations": some rollouts of a group were written by another author, not by the policy.
# Three signals are values in Rollout.advantages. "advantages": rewards compared with other rewards. "rewards": rewards
# without a comparison. "labels": numbers above 0 mark desirable responses.
ADVANTAGES = "advantages"
IN_ADVANTAGES = frozenset({ADVANTAGES, "rewards", "labels"})
SIGNALS = IN_ADVANTAGES | {"pairs", "targets", "demonstrations"}
# Name of the statistic that is the output of a model's head (one number per token).
# Critics and reward models have only this statistic; a policy with a value head has it in addition to others.
VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rollouts packed end to end. Position i predicts token i + 1 of the same rollout, which is called the label of
    position i. The tensors with N values describe the labels of the positions.

    The last position of a rollout has no label. Values at positions with weight 0 are undefined.
    """

    tokens: Tensor  # [N] int64
    labels: Tensor  # [N] int64, id of the next token
    mask: Tensor  # [N] bool, True if the role's policy sampled the label
    weights: Tensor  # [N] float32, weight of the label's loss; 0 if the label is not in the loss
    # [N] float32, log-prob of the label under the distribution from which the engine sampled the label
    engine_logprobs: Tensor
    advantages: Tensor  # [N] float32, advantage of the label; zeros if the loss does not use advantages
    cu_seqlens: Tensor  # [S + 1] int64, cumulative sequence lengths, from 0
    # [N] float32, the trainer's log-probs at the start of the update; None: the loss uses the current log-probs instead
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None  # [N] float32, log-probs of the frozen reference; None if not requested
    values: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # further inputs of the loss by name: [N] or [N, k], float32 or int32
    experts: Tensor | None = None  # [N, L, k] int16: ids of the experts that the engine chose, FREE if unknown
    # [S] int64, number of leading tokens shared with the previous sequence; shared tokens are computed once
    shared: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """[N] bool, True if the label is in the loss: trained labels, and the labels that a partner (another model)
        generated, if their weight is above 0."""
        return self.weights > 0

    @property
    def old(self) -> Tensor:
        """The trainer's log-probs at the start of the update, [N]. The loss sets `old_logprobs` before it calls the
        objective that reads this property.
        """
        if self.old_logprobs is None:
            raise ValueError("this batch has no old log-probs: take the live ones, as PolicyLoss does")
        return self.old_logprobs

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[S] int64, number of tokens of each rollout."""
        return self.cu_seqlens.diff()

    @property
    def repeats(self) -> list[tuple[int, int, int]]:
        """The repeated prefixes, which the model does not compute again. Each item is (start of the first sequence with
        the prefix, start of a later sequence with the same prefix, number of tokens).
        """
        if self.shared is None:
            return []
        repeats, first = [], 0
        for start, tokens in zip(self.cu_seqlens.tolist(), self.shared.tolist(), strict=False):
            if tokens:
                repeats.append((first, start, tokens))
            else:
                first = start
        return repeats

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sums values [N] over each rollout. Returns [S], differentiable."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths.to(values.device), unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """Repeats one value per rollout at each position of the rollout. [S] -> [N], differentiable."""
        return values.repeat_interleave(self.lengths.to(values.device))

    def cleaned(self) -> Batch:
        """Returns a copy with 0 at all positions whose label is not in the loss, so that undefined values (also nan)
        affect no sum and no gradient.
        """
        names = ("engine_logprobs", "advantages", "old_logprobs", "reference_logprobs")
        present = {name: value for name in names if (value := getattr(self, name)) is not None}
        clean = {name: at(self.counted, value) for name, value in present.items()}
        values = {name: at(self.counted, value) for name, value in self.values.items()}
        return replace(self, values=values, **clean)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """Returns the same batch on another device."""
        if self.tokens.device == device:
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "values"}
        values = {name: upload(value, device) for name, value in self.values.items()}
        uploaded = {name: None if value is None else upload(value, device) for name, value in moved.items()}
        return Batch(values=values, **uploaded)  # type: ignore[arg-type]

    def dummy(self, length: int) -> Batch:
        """Returns a batch of one sequence of `length` tokens without labels in the loss. The dummy batch has zeros for
        the optional log-probs and `values` that this batch has. Its `experts` and `shared` are None.
        """
        none = torch.zeros(length)
        empty = torch.zeros(length, dtype=torch.int64)
        return Batch(
            tokens=empty,
            labels=empty,
            mask=empty > 0,
            weights=none,
            engine_logprobs=none,
            advantages=none,
            cu_seqlens=torch.tensor([0, length]),
            old_logprobs=None if self.old_logprobs is None else none,
            reference_logprobs=None if self.reference_logprobs is None else none,
            values={name: value.new_zeros(length, *value.shape[1:]) for name, value in self.values.items()},
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics that a model computes for the labels of a batch, with one value per position unless stated otherwise.
    A statistic that was not requested is None.
    """

    # log p of the label; None only if the model has a head and the loss reads no log-probs
    logprobs: Tensor = None  # type: ignore[assignment]
    entropy: Tensor | None = None  # entropy of the label's distribution
    vocab_mean: Tensor | None = None  # mean of log p over the vocabulary, without gradient
    candidate_logprobs: Tensor | None = None  # [N, k] log p of the tokens in batch.values["candidates"]
    value: Tensor | None = None  # output of a model's head at the position before the label

    def at(self, mask: Tensor) -> Statistics:
        """Returns the statistics with 0 where `mask` [N] is False."""
        every = (self.logprobs, self.entropy, self.vocab_mean, self.candidate_logprobs, self.value)
        return Statistics(*(None if tensor is None else at(mask, tensor) for tensor in every))  # type: ignore[arg-type]


class BatchLoss(Protocol):
    """A loss on a batch of packed rollouts. The loss returns sums, never means, so a batch may be split into
    micro-batches at any rollout boundary.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Names of the inputs that the loss reads in addition to the log-probs. The trainer computes the inputs in
        STATISTICS, VALUE, "old" (log-probs at the start of the update) and "reference" (log-probs of the frozen
        reference). The rollouts must have the other inputs, which are in SIGNALS or are keys of Rollout.values. With
        "pairs", the two rollouts of each group are in one batch, one after the other. VALUE stands for the outputs of
        a head; a loss that needs VALUE reads log-probs only if it needs "logprobs" too.
        """
        ...

    def aggregate(self, counts: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the loss weight of each rollout in an optimizer step, and the divisor of the summed loss.

        `counts`: [S] sum of the label weights of each rollout. `groups`: [S] group index of each rollout.
        Returns ([S] float32 weights, denominator).
        """
        ...

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted sum of the losses (differentiable), and a dictionary of metrics, which are detached sums
        over the trained labels. If a metric NAME is to be averaged over other items than the trained labels, the key
        COUNT + NAME has the number of these items. `live`: statistics of the current forward pass.
        """
        ...


def batch_of(flat: Flat, first: int, last: int) -> Batch:
    """Returns the packed batch of the rollouts with indices first .. last - 1 in `flat`. This is the only function that
    shifts token values to the previous position, which predicts the token.
    """
    start, end = int(flat.starts[first]), int(flat.starts[last])
    predicted = slice(start + 1, end + 1)
    mask, weights = _shares(flat, first, last)
    tokens = torch.from_numpy(flat.tokens[start : end + 1].astype(np.int64))
    if flat.advantages is None:
        advantages = np.zeros(end - start, np.float32)
    elif flat.form.advantages == "rollout":
        advantages = np.repeat(flat.advantages[first:last], flat.lengths[first:last])
    else:
        advantages = flat.advantages[predicted]
    return Batch(
        tokens=tokens[:-1],
        labels=tokens[1:],
        mask=torch.from_numpy(mask),
        weights=torch.from_numpy(weights),
        engine_logprobs=torch.from_numpy(flat.logprobs[predicted]),
        advantages=torch.from_numpy(advantages),
        cu_seqlens=torch.from_numpy(flat.starts[first : last + 1] - start),
        values={name: torch.from_numpy(values[predicted]) for name, values in flat.values.items()},
        experts=None if flat.experts is None else torch.from_numpy(flat.experts[start:end]),
        shared=None if flat.shared is None else torch.from_numpy(flat.shared[first:last].astype(np.int64)),
    )


def pack(rollouts: Sequence[Rollout]) -> Batch:
    """Packs rollouts in order into one batch. All rollouts have the same weight. `values` of the batch has the keys of
    Rollout.values that all rollouts have.

    Raises ValueError for an empty list and for a rollout without advantages.
    """
    if not rollouts:
        raise ValueError("cannot pack an empty list of rollouts")
    names = sorted(set.intersection(*({*r.values} for r in rollouts)))
    form = form_of(rollouts, values=tuple(names), experts=True)
    counts = Counts(len(rollouts), sum(len(r.spans) for r in rollouts), sum(len(r.tokens) for r in rollouts))
    buffer = np.empty(form.size(counts), np.uint8)
    alike = {"weights": np.ones(1), "numbers": np.arange(len(rollouts)), "rescored": np.zeros(1, bool)}
    fill(buffer, form, counts, rollouts, alike | {"micro_batches": np.array([len(rollouts)])})
    return batch_of(Flat.over(buffer, form, counts), 0, len(rollouts))


def at(mask: Tensor, values: Tensor) -> Tensor:
    """Returns `values` [N] or [N, k] with 0 at the positions where `mask` [N] is False. Values at these positions, even
    nan, then affect no sum and no gradient.
    """
    return torch.where(mask if values.dim() == 1 else mask[:, None], values, 0)


def reads_logprobs(needs: frozenset[str]) -> bool:
    """Returns whether a loss with these `needs` reads log-probs. The loss of a model that has only a head reads no
    log-probs."""
    return VALUE not in needs or "logprobs" in needs


def statistics_needed(needs: frozenset[str]) -> tuple[str, ...]:
    """Returns the names of the statistics that a model must compute for a loss with these `needs`. VALUE is the first
    name if it is needed. The other names are in the order of STATISTICS, and include "logprobs" if the loss reads
    log-probs.
    """
    others = (n for n in STATISTICS if n in needs or (n == "logprobs" and reads_logprobs(needs)))
    return (*([VALUE] if VALUE in needs else []), *others)


def inputs_of_rollouts(needs: frozenset[str]) -> frozenset[str]:
    """Returns the inputs that a loss with these `needs` reads and that the trainer does not compute, so that the
    rollouts must have them (see BatchLoss.needs)."""
    ids = {CANDIDATES} if "candidate_logprobs" in needs else set()
    return (needs | ids) - {*STATISTICS, VALUE, "old", "reference"}


def values_needed(needs: frozenset[str]) -> tuple[str, ...]:
    """Returns the keys of Rollout.values that a loss with these `needs` reads (see BatchLoss.needs), in sorted
    order."""
    return tuple(sorted(inputs_of_rollouts(needs) - SIGNALS))


def num_rows(names: Sequence[str], candidates: int) -> int:
    """Returns the number of rows of a tensor [rows, N] that holds the named statistics. `candidate_logprobs` has
    `candidates` rows, every other statistic has one.
    """
    return sum(candidates if name == "candidate_logprobs" else 1 for name in names)


def by_name(names: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
    """Splits a tensor [R, N], which holds statistics in the order of `names`, into one tensor per name: [N, k] for
    `candidate_logprobs`, which must be the last name, and [N] for every other name.
    """
    statistics = dict(zip(names, rows, strict=False))
    if "candidate_logprobs" in statistics:
        statistics["candidate_logprobs"] = rows[len(names) - 1 :].T
    return statistics


def _shares(flat: Flat, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which labels of rollouts first .. last - 1 are trained, [n] bool, and the weight of each label, [n]
    float32.

    The values of each span are repeated once per token and shifted by one position, because a position predicts the
    next token: the first span has one repetition less, and the last span one more. The values at the last position of
    each rollout, which predicts no token, are then set to False and 0.
    """
    spans = slice(int(flat.span_starts[first]), int(flat.span_starts[last]))
    counts = flat.span_lengths[spans].copy()
    if len(counts):
        counts[0] -= 1
        counts[-1] += 1
    mask, weights = np.repeat(flat.span_trained[spans], counts), np.repeat(flat.span_weights[spans], counts)
    ends = flat.starts[first + 1 : last + 1] - flat.starts[first] - 1
    mask[ends], weights[ends] = False, 0.0
    return mask, weights
