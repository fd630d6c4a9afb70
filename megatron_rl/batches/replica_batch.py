"""What one replica trains on in an update: its own rollouts in the order of its micro-batches, and the statistics of
earlier weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batches.packed_batch import Batch, batch_of
from megatron_rl.batches.rollout_buffer import Counts, Flat, Form
from megatron_rl.config.schema import Lora
from megatron_rl.models.shape import Shape
from megatron_rl.weights.flops import count

# Operations of an optimizer step: of a forward pass (statistics of earlier weights), and of its training.
COUNTED = ("forward_flops", "training_flops")


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Metrics of one optimizer step over all replicas."""

    denominator: float  # the loss's sum is divided by it
    trained_tokens: float
    packed_tokens: float
    micro_batches: int  # of each replica
    replica_imbalance: float
    micro_batch_imbalance: float
    replayed: float = 0.0  # share of tokens whose experts are known
    shared_tokens: float = 0.0  # packed tokens that are not computed, because another rollout begins with them too


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The summary that every rank is told of an update before its own rollouts come; a few hundred bytes."""

    form: Form
    steps: Sequence[StepTotals]
    counts: Sequence[Counts]  # by replica
    rescored: bool = False  # some rollout's log-probs are to be the trainer's

    @property
    def sizes(self) -> list[int]:
        """Bytes of each replica's buffer."""
        return [self.form.size(counts) for counts in self.counts]


class Micro(NamedTuple):
    """The place of a micro-batch in a replica's work."""

    first: int  # rollout
    last: int  # rollout behind its last one
    start: int  # token
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The rollouts of one replica, held as flat arrays. A micro-batch is a slice of them; its batch is made when its
    turn comes.

        The tensors are of positions, as in `Batch`; ranks that take no loss leave them out.
    """

    flat: Flat
    steps: Sequence[StepTotals]
    micro_batches: Sequence[Sequence[Micro]]  # of each step
    rescored: bool = False
    engine_logprobs: Tensor | None = None  # [N] float32; None: those of `flat`
    old_logprobs: Tensor | None = None  # [N] float32
    reference_logprobs: Tensor | None = None  # [N] float32
    values: Mapping[str, Tensor] = field(default_factory=dict)  # [N] float32, statistics of earlier weights

    @classmethod
    def over(cls, buffer: np.ndarray, outline: Outline, replica: int) -> Self:
        """The work that a filled buffer holds."""
        flat = Flat.over(buffer, outline.form, outline.counts[replica])
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(flat.micro_batches)])
        places = [*zip(bounds.tolist(), bounds[1:].tolist(), flat.starts[bounds].tolist(), strict=False)]
        ends = flat.starts[bounds[1:]].tolist()
        micros = iter([Micro(*place, end) for place, end in zip(places, ends, strict=True)])
        own = [[next(micros) for _ in range(step.micro_batches)] for step in outline.steps]
        return cls(flat=flat, steps=outline.steps, micro_batches=own, rescored=outline.rescored)

    @property
    def num_tokens(self) -> int:
        """N, of this replica."""
        return self.flat.num_tokens

    def micros(self, step: int | None = None) -> list[Micro]:
        """Micro-batches of one optimizer step, or of all."""
        chosen = self.micro_batches if step is None else [self.micro_batches[step]]
        return [micro for one in chosen for micro in one]

    def flops(self, step: int, shape: Shape, lora: Lora | None) -> dict[str, float]:
        """Returns the operations of the model on the replica's share of an optimizer step, by the names of COUNTED."""
        flat, micros = self.flat, self.micros(step)
        first, last = micros[0].first, micros[-1].last
        spans = slice(int(flat.span_starts[first]), int(flat.span_starts[last]))
        weighted = flat.span_weights[spans] > 0
        opening = flat.span_starts[first:last][flat.span_counts[first:last] > 0] - spans.start
        labels = flat.span_lengths[spans][weighted].sum() - weighted[opening].sum()  # no token predicts the first one
        shared = None if flat.shared is None else flat.shared[first:last]
        found = count(shape, flat.lengths[first:last], shared=shared, labels=float(labels), lora=lora)
        return dict(zip(COUNTED, (found.forward, found.training), strict=True))

    def batch(self, micro: Micro) -> Batch:
        """Makes the batch of a micro-batch; it has no sequence when there are fewer rollouts than micro-batches."""
        batch, own = batch_of(self.flat, micro.first, micro.last), slice(micro.start, micro.end)
        names = ("engine_logprobs", "old_logprobs", "reference_logprobs")
        held = {name: values[own] for name in names if (values := getattr(self, name)) is not None}
        values = {name: values[own] for name, values in self.values.items()}
        return replace(batch, values={**batch.values, **values}, **held) if held or values else batch

    def rescore(self, logprobs: Tensor) -> Work:
        """The same work with the trainer's log-probs [N] in place of the engine's for the rollouts that several
        versions wrote."""
        flat = self.flat
        ours = torch.from_numpy(np.repeat(flat.rescored, flat.lengths))
        return replace(self, engine_logprobs=torch.where(ours, logprobs, torch.from_numpy(flat.logprobs[1:])))
