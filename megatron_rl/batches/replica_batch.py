"""The data that one replica trains on in an update: its rollouts in the order of its micro-batches, and statistics
computed under earlier weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batches.packed_batch import COUNT, Batch, batch_of
from megatron_rl.batches.rollout_buffer import Counts, Flat, Form
from megatron_rl.config.schema import Lora
from megatron_rl.models.shape import Shape
from megatron_rl.weights.flops import count

# Metrics of an optimizer step: floating-point operations of one forward pass, and of training (forward and backward)
COUNTED = ("forward_flops", "training_flops")


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals and metrics of one optimizer step over all replicas."""

    denominator: float  # divisor of the summed loss
    trained_tokens: float
    packed_tokens: float
    micro_batches: int  # number of micro-batches of each replica
    replica_imbalance: float
    micro_batch_imbalance: float
    replayed: float = 0.0  # share of the tokens for which the engine returned the chosen experts
    # number of packed tokens that the model does not compute again, because they are in a shared prefix
    shared_tokens: float = 0.0

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of the optimizer step from sums over all replicas. The sum `loss` is divided by the
        denominator, a sum with an item count (packed_batch.COUNT) by this count, and other sums by the number of
        trained tokens. FLOP counts are not divided. A metric whose item count is 0 is left out.
        """
        by = {"loss": self.denominator, **dict.fromkeys(COUNTED, 1.0)}
        by |= {name.removeprefix(COUNT): value for name, value in sums.items() if name.startswith(COUNT)}
        divisors = {name: by.get(name, self.trained_tokens) for name in sums if not name.startswith(COUNT)}
        return {name: sums[name] / divisor for name, divisor in divisors.items() if divisor}


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The buffer layout, the buffer sizes and the step totals of an update. Every rank receives this outline (a few
    hundred bytes) before the rollouts are sent.
    """

    form: Form
    steps: Sequence[StepTotals]
    counts: Sequence[Counts]  # array sizes of each replica's buffer
    rescored: bool = False  # True if the trainer's log-probs are to replace the engine's in some rollouts

    @property
    def sizes(self) -> list[int]:
        """Size of each replica's buffer in bytes."""
        return [self.form.size(counts) for counts in self.counts]


class Micro(NamedTuple):
    """The range of rollouts and tokens of a micro-batch in the flat arrays of a replica."""

    first: int  # index of the first rollout
    last: int  # index of the last rollout + 1
    start: int  # index of the first token; `end` is the index after the last token
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The rollouts of one replica as flat arrays. A micro-batch is a slice of the arrays, and the `Batch` of a
    micro-batch is created on demand.

    The tensors have one value per position, as in `Batch`. They are None or empty on ranks that do not compute the
    loss.
    """

    flat: Flat
    steps: Sequence[StepTotals]
    micro_batches: Sequence[Sequence[Micro]]  # micro-batches of each optimizer step
    rescored: bool = False
    # [N] float32, log-probs that replace the engine's; None means that `flat.logprobs` are used
    engine_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None  # [N] float32, log-probs under the policy at the start of the update
    reference_logprobs: Tensor | None = None  # [N] float32, log-probs under the frozen reference
    # statistics that were computed under earlier weights, by name: [N] or [N, k] float32
    values: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def over(cls, buffer: np.ndarray, outline: Outline, replica: int) -> Self:
        """Returns the rollouts of a replica that are stored in a filled buffer. The arrays are views of `buffer`."""
        flat = Flat.over(buffer, outline.form, outline.counts[replica])
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(flat.micro_batches)])
        places = [*zip(bounds.tolist(), bounds[1:].tolist(), flat.starts[bounds].tolist(), strict=False)]
        ends = flat.starts[bounds[1:]].tolist()
        micros = iter([Micro(*place, end) for place, end in zip(places, ends, strict=True)])
        by_step = [[next(micros) for _ in range(step.micro_batches)] for step in outline.steps]
        return cls(flat=flat, steps=outline.steps, micro_batches=by_step, rescored=outline.rescored)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of this replica."""
        return self.flat.num_tokens

    def micros(self, step: int | None = None) -> list[Micro]:
        """Returns the micro-batches of one optimizer step, or of all steps if `step` is None."""
        chosen = self.micro_batches if step is None else [self.micro_batches[step]]
        return [micro for of_step in chosen for micro in of_step]

    def flops(self, step: int, shape: Shape, lora: Lora | None) -> dict[str, float]:
        """Returns {name in COUNTED: number of floating-point operations} of the model in an optimizer step, for the
        rollouts of this replica."""
        flat, micros = self.flat, self.micros(step)
        first, last = micros[0].first, micros[-1].last
        spans = slice(int(flat.span_starts[first]), int(flat.span_starts[last]))
        weighted = flat.span_weights[spans] > 0
        opening = flat.span_starts[first:last][flat.span_counts[first:last] > 0] - spans.start
        # the first token of each rollout is not counted, because no position predicts it
        labels = flat.span_lengths[spans][weighted].sum() - weighted[opening].sum()
        shared = None if flat.shared is None else flat.shared[first:last]
        flops = count(shape, flat.lengths[first:last], shared=shared, labels=float(labels), lora=lora)
        return dict(zip(COUNTED, (flops.forward, flops.training), strict=True))

    def batch(self, micro: Micro) -> Batch:
        """Returns the batch of a micro-batch. The batch is empty if the replica has fewer rollouts than
        micro-batches.
        """
        batch, rows = batch_of(self.flat, micro.first, micro.last), slice(micro.start, micro.end)
        names = ("engine_logprobs", "old_logprobs", "reference_logprobs")
        held = {name: values[rows] for name in names if (values := getattr(self, name)) is not None}
        values = {name: values[rows] for name, values in self.values.items()}
        return replace(batch, values={**batch.values, **values}, **held) if held or values else batch

    def rescore(self, logprobs: Tensor) -> Work:
        """Returns a copy of the work in which the trainer's `logprobs` [N] replace the engine's, for rollouts that were
        generated by several weight versions.
        """
        flat = self.flat
        ours = torch.from_numpy(np.repeat(flat.rescored, flat.lengths))
        return replace(self, engine_logprobs=torch.where(ours, logprobs, torch.from_numpy(flat.logprobs[1:])))
