"""The packed batch that a loss sees, the statistics that a model gives of it, and the protocol of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_rl.batches.rollout_buffer import Counts, Flat, fill, form_of
from megatron_rl.host_to_device import upload
from megatron_rl.lazy_import import LazyModule
from megatron_rl.types import Rollout

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LazyModule("torch"), Any

CANDIDATES = "candidates"  # the name of the Rollout.values that `candidate_logprobs` are asked for: token ids [T, k]
# What a model can tell of a label's distribution. The last has k numbers a label, the others one.
STATISTICS = ("logprobs", "entropy", "vocab_mean", "candidate_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rollouts packed end to end. Position i predicts token i + 1 of the same rollout: what is said of position i is
    said of its label.

    The last position of a rollout has no label. What stands at a place whose weight is 0 means nothing.
    """

    tokens: Tensor  # [N] int64
    labels: Tensor  # [N] int64, the next token
    mask: Tensor  # [N] bool, True where the role's policy sampled the label
    weights: Tensor  # [N] float32, weight of the label's loss; 0 where it is not in the loss
    engine_logprobs: Tensor  # [N] float32, of the author that sampled the label
    advantages: Tensor  # [N] float32; zeros for a loss that uses none
    cu_seqlens: Tensor  # [S + 1] int64
    old_logprobs: Tensor | None = None  # [N] float32, the trainer's own at the start of the update; None: the live ones
    reference_logprobs: Tensor | None = None  # [N] float32, the frozen reference's; None: not asked for
    values: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # [N] or [N, k], float32 or int32: what else the loss asked for by name
    experts: Tensor | None = None  # [N, L, k] int16: the experts that the engine chose, FREE where that is not known
    # [S] int64, leading tokens in common with the sequence before, which the model computes once for both
    shared: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """[N] bool, True where the label is in the loss: what is trained, and what a partner wrote if that has a
        weight."""
        return self.weights > 0

    @property
    def old(self) -> Tensor:
        """The trainer's log-probs at the start of the update, [N]; a loss fills them in for its objective."""
        if self.old_logprobs is None:
            raise ValueError("this batch has no old log-probs: take the live ones, as PolicyLoss does")
        return self.old_logprobs

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[S] int64, tokens of each rollout."""
        return self.cu_seqlens.diff()

    @property
    def repeats(self) -> list[tuple[int, int, int]]:
        """Lists the prefixes that stand here again and are not computed again: (position of the first sequence that
        has it, position of the sequence that begins with it too, number of tokens)."""
        if self.shared is None:
            return []
        out, first = [], 0
        for start, tokens in zip(self.cu_seqlens.tolist(), self.shared.tolist(), strict=False):
            if tokens:
                out.append((first, start, tokens))
            else:
                first = start
        return out

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sums values [N] over each rollout. -> [S], with gradient."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths.to(values.device), unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """Repeats one value per rollout at each of its positions. [S] -> [N], with gradient."""
        return values.repeat_interleave(self.lengths.to(values.device))

    def cleaned(self) -> Batch:
        """Puts 0 wherever the label is not in the loss, so that nothing which stands there, nan included, reaches a sum
        or a gradient."""
        names = ("engine_logprobs", "advantages", "old_logprobs", "reference_logprobs")
        own = {name: value for name in names if (value := _field(self, name)) is not None}
        clean = {name: at(self.counted, value) for name, value in own.items()}
        values = {name: at(self.counted, value) for name, value in self.values.items()}
        return replace(self, values=values, **clean)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        if self.tokens.device == device:
            return self
        moved = {f.name: _field(self, f.name) for f in fields(self) if f.name != "values"}
        values = {name: upload(value, device) for name, value in self.values.items()}
        own = {name: None if value is None else upload(value, device) for name, value in moved.items()}
        return Batch(values=values, **own)  # type: ignore[arg-type]

    def dummy(self, length: int) -> Batch:
        """A batch of one sequence without labels that has the same optional fields as this one."""
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
    """Statistics that a model gives of the labels of a batch, [N] each; None where it was not asked."""

    logprobs: Tensor  # log p(label)
    entropy: Tensor | None = None  # of the label's distribution
    vocab_mean: Tensor | None = None  # mean over the vocabulary of log p; without gradient
    candidate_logprobs: Tensor | None = None  # [N, k] log p of the tokens in the batch's values `candidates`

    def at(self, mask: Tensor) -> Statistics:
        """The same with 0 where `mask` [N] is False."""
        every = (self.logprobs, self.entropy, self.vocab_mean, self.candidate_logprobs)
        return Statistics(*(None if one is None else at(mask, one) for one in every))  # type: ignore[arg-type]


class BatchLoss(Protocol):
    """A loss over packed positions. It returns sums, never means: a batch may be cut into micro-batches anywhere
    between rollouts."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of what it reads beside log-probs: others of STATISTICS, old, reference, or names of Rollout.values."""
        ...

    @property
    def uses_advantages(self) -> bool:
        """False: it trains on rollouts that have none."""
        ...

    def aggregate(self, counts: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
        """[S] weighted numbers of labels and group numbers of an optimizer step's rollouts -> ([S] float32 weights,
        denominator)."""
        ...

    def __call__(self, live: Statistics, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted sum to differentiate, and detached sums over trained labels by name."""
        ...


def batch_of(flat: Flat, first: int, last: int) -> Batch:
    """Packs rollouts first .. last - 1. This is the only place where a token becomes the label of the position before
    it."""
    start, end = int(flat.starts[first]), int(flat.starts[last])
    after = slice(start + 1, end + 1)
    mask, weights = _shares(flat, first, last)
    tokens = torch.from_numpy(flat.tokens[start : end + 1].astype(np.int64))
    return Batch(
        tokens=tokens[:-1],
        labels=tokens[1:],
        mask=torch.from_numpy(mask),
        weights=torch.from_numpy(weights),
        engine_logprobs=torch.from_numpy(flat.logprobs[after]),
        advantages=torch.from_numpy(_advantages(flat, first, last)),
        cu_seqlens=torch.from_numpy(flat.starts[first : last + 1] - start),
        values={name: torch.from_numpy(values[after]) for name, values in flat.values.items()},
        experts=None if flat.experts is None else torch.from_numpy(flat.experts[start:end]),
        shared=None if flat.shared is None else torch.from_numpy(flat.shared[first:last].astype(np.int64)),
    )


def pack(rollouts: Sequence[Rollout]) -> Batch:
    """Packs rollouts in order into one batch that weighs all of them alike, with the values that they all have.

    Raises ValueError for no rollouts and for a rollout without advantages.
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
    """Values [N] or [N, k] where `mask` [N] is True, 0 elsewhere: what stands elsewhere reaches no sum and no gradient,
    not even nan."""
    return torch.where(mask if values.dim() == 1 else mask[:, None], values, 0)


def statistics_needed(needs: frozenset[str]) -> tuple[str, ...]:
    """Names of the statistics that a model is asked for, in the order of STATISTICS."""
    return tuple(name for name in STATISTICS if name == "logprobs" or name in needs)


def values_needed(needs: frozenset[str]) -> tuple[str, ...]:
    """Names of Rollout.values among the needs of a loss."""
    ids = {CANDIDATES} if "candidate_logprobs" in needs else set()
    return tuple(sorted((needs | ids) - {*STATISTICS, "old", "reference"}))


def num_rows(names: Sequence[str], candidates: int) -> int:
    """Number of rows [N] that statistics of these names have, of which `candidate_logprobs` has k."""
    return sum(candidates if name == "candidate_logprobs" else 1 for name in names)


def by_name(names: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
    """Tells apart the rows [R, N] of statistics, which stand in the order of `names`: [N] each, and [N, k] of
    `candidate_logprobs`, the last."""
    out = dict(zip(names, rows, strict=False))
    if "candidate_logprobs" in out:
        out["candidate_logprobs"] = rows[len(names) - 1 :].T
    return out


def _field(batch: Batch, name: str) -> Tensor | None:
    return getattr(batch, name)


def _shares(flat: Flat, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which labels of rollouts first .. last - 1 are trained and what each label weighs, [n] bool and [n]
    float32.

    Spans are repeated as often as they have labels: the first loses its first token, which nothing predicts, and the
    last gains the place behind it. Positions that end a rollout are then put to 0.
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


def _advantages(flat: Flat, first: int, last: int) -> np.ndarray:
    """[n] float32 of the labels of rollouts first .. last - 1."""
    start, end = int(flat.starts[first]), int(flat.starts[last])
    if flat.advantages is None:
        return np.zeros(end - start, np.float32)
    if flat.form.advantages == "rollout":
        return np.repeat(flat.advantages[first:last], flat.lengths[first:last])
    return flat.advantages[start + 1 : end + 1]
