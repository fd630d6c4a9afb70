"""Runs micro-batches through the pipeline schedule and returns summed losses, or fills in statistics of every label."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.batches.packed_batch import CANDIDATES, Batch, BatchLoss, Statistics, by_name
from megatron_rl.devices.host_to_device import upload
from megatron_rl.megatron import load_balancing, platform, router_replay
from megatron_rl.megatron.attention import ALONE, Context, RotaryTable, SequenceLayout, packed_layout
from megatron_rl.megatron.model import unwrap
from megatron_rl.megatron.shared_prefixes import sharing_layout

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region  # noqa: E402


@dataclass(frozen=True)
class RankPart:
    """How a micro-batch's tokens are arranged and split over the ranks of one data-parallel replica."""

    parts: int = 1  # number of tensor-parallel ranks that the tokens are split over (sequence parallelism)
    part: int = 0  # index of this rank among the `parts` tensor-parallel ranks
    context: Context = ALONE  # context-parallel group of this rank
    unit: int = 1  # each rank's token count must be a multiple of this number, for 8-bit matrix products
    flash: bool = False  # True: one call computes the attention of all packed sequences (kernels/varlen.py)

    @property
    def multiple(self) -> int:
        """A micro-batch's token count, over all context-parallel ranks, must be a multiple of this number."""
        return math.lcm(self.context.multiple(self.parts), self.unit * self.parts * self.context.size)


@dataclass(frozen=True)
class MicroBatch:
    """This rank's model inputs for some sequences, with the indices that map the model's outputs back to positions in
    the packed batch."""

    batch: Batch  # the whole sequences, N tokens in total; all context-parallel ranks have the same batch
    start: int  # index of the first token of `batch` among the tokens of all sequences of this replica
    size: int  # number of tokens of `batch`; 0 for a dummy micro-batch, which has no real tokens
    tokens: Tensor  # [1, N'] token ids on this rank, with alignment padding; a shared prefix is included once
    positions: Tensor  # position of each token in its sequence, in the shape of `tokens`
    labels: Tensor  # [n] ids of the label tokens whose statistics this rank computes
    answers: Tensor  # [n] position of each label in the packed batch
    label_rows: Tensor  # [n] index, in the flattened `tokens`, of the token before each label
    layout: SequenceLayout
    candidates: Tensor | None = None  # [n, k] candidate token ids of each label
    # [N' / parts, layers, k] ids of the experts to replay for the tokens that this rank's routers process
    experts: Tensor | None = None
    balance: load_balancing.Balance | None = None  # tokens of the load-balancing loss; None: there is no such loss


@dataclass(frozen=True)
class Pass:
    """What a pass over micro-batches computes: the gradient of a loss, the value of a loss, or statistics of every
    label."""

    names: tuple[str, ...] = ("logprobs",)  # names of the statistics that the model computes
    loss: BatchLoss | None = None  # loss to compute; None: no loss, the statistics are stored in `into`
    scale: float = 1.0  # factor by which the gradient of the loss is multiplied
    backward: bool = False  # True if gradients are computed
    # tensor [R, tokens of all sequences of this replica] in which the statistics are stored
    # R is the number of rows that batches.packed_batch.num_rows returns.
    into: Tensor | None = None


def make_micro_batch(
    batch: Batch, rotary: RotaryTable | None, *, cut: RankPart, like: Tensor, start: int = 0, balance: float = 0.0
) -> MicroBatch:
    """Converts a batch of sequences to this rank's model inputs.

    `rotary`: the rotary tables; None if Megatron-core and Transformer Engine compute rotary embedding and attention.
    `cut`: how the tokens are arranged and split over the ranks.
    `like`: a tensor with the dtype and device of the model.
    `start`: index of the batch's first token among the tokens of all sequences of this replica.
    `balance`: weight of the load-balancing loss (see load_balancing.Balance); 0: there is no such loss.

    A batch without sequences becomes a dummy micro-batch without labels, so that a rank without work still takes part
    in collectives. Sequences with a shared prefix need `rotary` and must not be split by context parallelism.
    """
    part = batch if batch.num_sequences else batch.dummy(cut.multiple)
    arrange = _sharing if part.repeats else _packed
    places, positions, layout = arrange(part, rotary, cut, like)
    tokens, rows, device = part.tokens[places.clamp(min=0)].masked_fill(places < 0, 0), _rows(part, places), like.device
    answers = (part.counted & (rows >= 0)).nonzero()[:, 0]
    ids, experts = part.values.get(CANDIDATES), None
    if part.experts is not None:
        choices = router_replay.pooled(part.experts, part.repeats) if part.repeats else part.experts
        experts = upload(router_replay.of_tokens(choices, places, parts=cut.parts, part=cut.part), device)
    balances = balance and batch.num_sequences
    return MicroBatch(
        batch=part,
        start=start,
        size=len(batch.tokens),
        tokens=upload(tokens, device),
        positions=upload(positions, device),
        labels=upload(part.labels[answers], device),
        answers=upload(answers, device),
        label_rows=upload(rows[answers], device),
        layout=layout,
        candidates=None if ids is None else upload(ids[answers].long(), device),
        experts=experts,
        balance=load_balancing.balance_of(part, places, balance, parts=cut.parts, part=cut.part, device=device)
        if balances
        else None,
    )


def run(
    chunks: Sequence[Any], micro_batches: Iterable[MicroBatch], *, count: int, longest: int, what: Pass
) -> list[dict]:
    """Runs `count` micro-batches through this rank's pipeline stage. Call it inside `Groups.active()` of the layout.

    `longest` is the token count of the longest micro-batch. The iterator `micro_batches` is advanced when the first
    model chunk processes the next micro-batch. With `what.backward`, gradients of what.scale * (sum of the losses)
    accumulate in the gradient buffers of `chunks`.

    On the last stage, returns one dict per micro-batch with sums by name, which include `loss`. The dicts are empty if
    `what.loss` is None. On other stages, returns an empty list.
    """
    iterators = list(itertools.tee(micro_batches, len(chunks)))
    schedule = get_forward_backward_func()
    for chunk in chunks:
        core = unwrap(chunk)
        core.statistic_names = what.names
        router_replay.forget(core)
        load_balancing.forget(core)
    return schedule(
        forward_step_func=functools.partial(_forward_step, what=what, scale=what.scale * count),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=longest,
        micro_batch_size=1,  # required, but ignored, because pipeline stages send the shapes (variable_seq_lengths)
        forward_only=not what.backward,
    )


def _forward_step(iterator: Iterator[MicroBatch], model: Any, *, what: Pass, scale: float) -> tuple[Tensor, Any]:
    micro = next(iterator)
    core = unwrap(model)
    core.label_rows = micro.label_rows
    router_replay.show(core, micro.experts, training=what.backward)
    load_balancing.show(core, micro.balance, training=what.backward)
    labels = micro.labels[:, None]  # any shape is allowed, because Megatron-core only passes labels on
    if "candidate_logprobs" in what.names:
        assert micro.candidates is not None
        labels = torch.cat([labels, micro.candidates], dim=-1)
    answer = model(micro.tokens, micro.positions, None, labels=labels, packed_seq_params=micro.layout)
    return answer, functools.partial(_reduce, micro=micro, what=what, scale=scale)


def _reduce(answer: Tensor, *, micro: MicroBatch, what: Pass, scale: float) -> tuple[Tensor, dict[str, Any]]:
    """Computes the loss from the last pipeline stage's output [R, n]. Returns (scalar for the backward pass, sums by
    name). `scale` includes the number of micro-batches, because Megatron-core divides the scalar by this number. If
    `what.loss` is None, stores the output in `what.into` and returns a zero and no sums."""
    packed = torch.zeros(len(answer), len(micro.batch.tokens), device=answer.device)
    packed = packed.index_copy(1, micro.answers, answer.float())
    if (
        micro.layout.context.size > 1
    ):  # Every rank gets the whole sequences for the loss, but the gradient flows only to the rank's own tokens.
        packed = reduce_from_tensor_model_parallel_region(packed, group=micro.layout.context.group)
    if what.loss is None:
        assert what.into is not None
        what.into[:, micro.start : micro.start + micro.size] = packed[:, : micro.size].detach()
        return answer.new_zeros(()), {}
    total, sums = what.loss(Statistics(**by_name(what.names, packed)), micro.batch.to(answer.device))
    return total * scale, {"loss": total.detach(), **{name: value.detach() for name, value in sums.items()}}


def _packed(
    part: Batch, rotary: RotaryTable | None, cut: RankPart, like: Tensor
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Arranges sequences end to end in one row, with alignment padding.

    Returns three values: the packed position of each of this rank's tokens ([1, N'], -1 at padding), the position of
    each token in its sequence ([1, N']), and the layout.
    """
    context = cut.context
    unit = 2 * context.size if context.size > 1 else 1
    lengths = [n + -n % unit for n in part.lengths.tolist()]
    extra = -sum(lengths) % cut.multiple
    lengths += [extra] * (extra > 0)
    rows = context.rank_positions(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None, rows]
    layout = packed_layout(lengths, rotary, context=context, like=like, flash=cut.flash)
    return _places(part, lengths)[None, rows], positions, layout


def _sharing(
    part: Batch, rotary: RotaryTable | None, cut: RankPart, like: Tensor
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Arranges sequences end to end, with each shared prefix only in the first sequence that has it.

    Returns three values: the packed position of each token ([1, N'], -1 at padding), the position of each token in its
    sequence ([1, N']), and the layout.
    """
    assert part.shared is not None and rotary is not None and cut.context.size == 1
    lengths, shared = part.lengths.tolist(), part.shared.tolist()
    extra = -(sum(lengths) - sum(shared)) % cut.multiple
    places = [torch.arange(b - n + s, b) for b, n, s in zip(part.cu_seqlens[1:].tolist(), lengths, shared, strict=True)]
    places += [torch.full((extra,), -1)]
    if extra:
        lengths, shared = [*lengths, extra], [*shared, 0]
    positions = torch.cat([torch.arange(s, n) for n, s in zip(lengths, shared, strict=True)])
    return torch.cat(places)[None], positions[None], sharing_layout(lengths, shared, rotary, like=like, flash=cut.flash)


def _places(part: Batch, lengths: list[int]) -> Tensor:
    """Returns the packed position of every token of sequences that are padded to `lengths`, as a tensor [sum of
    lengths]. The value is -1 at padding."""
    starts = part.cu_seqlens.tolist()
    places = [torch.full((n,), -1) for n in lengths]
    for place, a, b in zip(places, starts, starts[1:], strict=False):
        place[: b - a] = torch.arange(a, b)
    return torch.cat(places)


def _rows(part: Batch, places: Tensor) -> Tensor:
    """Inverts `places`, the packed positions of this rank's tokens. Returns a tensor [N] with the index of every packed
    position in the flattened `places`. In every copy of a shared prefix, a token gets the index that it has in the
    first copy. Tokens on another rank get -1."""
    flat = places.flatten()
    held = (flat >= 0).nonzero()[:, 0]
    rows = torch.full((len(part.tokens),), -1)
    rows[flat[held]] = held
    for first, start, length in part.repeats:
        rows[start : start + length] = rows[first : first + length]
    return rows
