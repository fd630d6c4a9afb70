"""One pass of micro-batches through the pipeline schedule: summed losses come out, or statistics of every label."""

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
from megatron_rl.host_to_device import upload
from megatron_rl.megatron import platform, router_replay
from megatron_rl.megatron.attention import ALONE, Context, RotaryTable, SequenceLayout, packed_layout, padded_layout
from megatron_rl.megatron.model import unwrap
from megatron_rl.megatron.shared_prefixes import sharing_layout

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region  # noqa: E402


@dataclass(frozen=True)
class RankPart:
    """The way in which the tokens of a micro-batch lie over the ranks of one replica."""

    packed: bool  # sequences end to end; else a row for each, padded
    parts: int = 1  # tensor ranks that share out a rank's tokens (sequence parallelism)
    part: int = 0  # this rank's number among them
    context: Context = ALONE
    unit: int = 1  # tokens by which a rank's number of them must divide, as products of 8-bit numbers need it
    flash: bool = False  # one call attends for all sequences that lie end to end (kernels/varlen.py)

    @property
    def multiple(self) -> int:
        """Returns what the number of tokens over all context-parallel ranks must divide by."""
        return math.lcm(self.context.multiple(self.parts), self.unit * self.parts * self.context.size)


@dataclass(frozen=True)
class MicroBatch:
    """The part of some sequences that this rank's model sees, and the way back to their positions."""

    batch: Batch  # N tokens, the same on all context-parallel ranks
    start: int  # place of its first token in the replica's work
    size: int  # tokens of the work that it holds; 0: a dummy
    # [1, N'] packed or [S, L] padded; N' counts alignment padding, and shared prefixes once; this rank's share
    tokens: Tensor
    positions: Tensor  # like tokens
    labels: Tensor  # [n] those that are in the loss and that this rank answers
    answers: Tensor  # [n] packed position of each of these labels
    wanted: Tensor  # [n] the place in the flattened `tokens` of which the label is the next token
    layout: SequenceLayout
    told: SequenceLayout | None  # the layout that the model is told; Transformer Engine wants none of padded sequences
    candidates: Tensor | None = None  # [n, k] of each label
    experts: Tensor | None = None  # [N' / parts, layers, k] for the tokens that this rank's routers see, in their order


@dataclass(frozen=True)
class Pass:
    """The purpose of a pass over micro-batches: the gradient of a loss, its value, or statistics of every label."""

    names: tuple[str, ...] = ("logprobs",)  # statistics that the model is asked for
    loss: BatchLoss | None = None  # None: statistics are written to `into`
    scale: float = 1.0  # factor of the loss's gradient
    backward: bool = False
    into: Tensor | None = None  # [R, N of the work], R rows as batches.packed_batch.num_rows counts them


def make_micro_batch(
    batch: Batch, rotary: RotaryTable | None, *, cut: RankPart, like: Tensor, start: int = 0
) -> MicroBatch:
    """Lays a batch out over the ranks of `cut`. `like` gives dtype and device of the model. `rotary`: None where core
    and Transformer Engine turn queries and keys, and attend. A batch without sequences becomes a dummy without
    labels, so that a rank with nothing to do still takes part. Sequences that share a prefix must be packed, on one
    context-parallel rank and with `rotary`."""
    part = batch if batch.num_sequences else batch.dummy(cut.multiple)
    if part.repeats:
        places, positions, layout = _sharing(part, rotary, cut, like)
    elif cut.packed:
        places, positions, layout = _packed(part, rotary, cut, like)
    else:
        places, positions, layout = _padded(part, rotary, cut, like)
    tokens, rows, device = part.tokens[places.clamp(min=0)].masked_fill(places < 0, 0), _rows(part, places), like.device
    answers = (part.counted & (rows >= 0)).nonzero()[:, 0]
    ids, experts = part.values.get(CANDIDATES), None
    if part.experts is not None:
        known = router_replay.pooled(part.experts, part.repeats) if part.repeats else part.experts
        experts = upload(router_replay.of_tokens(known, places, parts=cut.parts, part=cut.part), device)
    return MicroBatch(
        batch=part,
        start=start,
        size=len(batch.tokens),
        tokens=upload(tokens, device),
        positions=upload(positions, device),
        labels=upload(part.labels[answers], device),
        answers=upload(answers, device),
        wanted=upload(rows[answers], device),
        layout=layout,
        told=layout if cut.packed or rotary is not None else None,
        candidates=None if ids is None else upload(ids[answers].long(), device),
        experts=experts,
    )


def run(
    chunks: Sequence[Any], micro_batches: Iterable[MicroBatch], *, count: int, longest: int, what: Pass
) -> list[dict]:
    """Runs `count` micro-batches, the longest of so many tokens, through this rank's pipeline stage; each is made when
    the first model chunk asks for it. Call with the layout's groups active.

    With `what.backward`, gradients of scale * (sum of the losses) accumulate in the chunks. Returns one dict of sums
    per micro-batch on the last stage, `loss` among them (empty where there is no loss), and an empty list elsewhere.
    """
    iterators = list(itertools.tee(micro_batches, len(chunks)))
    schedule = get_forward_backward_func()
    for chunk in chunks:
        core = unwrap(chunk)
        core.asked = what.names
        router_replay.forget(core)
    return schedule(
        forward_step_func=functools.partial(_forward_step, what=what, scale=what.scale * count),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=longest,
        micro_batch_size=1,  # shapes vary: stages tell each other
        forward_only=not what.backward,
    )


def _forward_step(iterator: Iterator[MicroBatch], model: Any, *, what: Pass, scale: float) -> tuple[Tensor, Any]:
    micro = next(iterator)
    core = unwrap(model)
    core.wanted = micro.wanted
    router_replay.show(core, micro.experts, training=what.backward)
    labels = micro.labels[:, None]  # core hands labels of any shape on
    if "candidate_logprobs" in what.names:
        assert micro.candidates is not None
        labels = torch.cat([labels, micro.candidates], dim=-1)
    answer = model(micro.tokens, micro.positions, None, labels=labels, packed_seq_params=micro.told)
    return answer, functools.partial(_reduce, micro=micro, what=what, scale=scale)


def _reduce(answer: Tensor, *, micro: MicroBatch, what: Pass, scale: float) -> tuple[Tensor, dict[str, Any]]:
    """[R, n] answers of the last stage -> (scalar for the backward pass, sums). Core divides by the number of
    micro-batches."""
    whole = torch.zeros(len(answer), len(micro.batch.tokens), device=answer.device)
    whole = whole.index_copy(1, micro.answers, answer.float())
    if (
        micro.layout.context.size > 1
    ):  # every rank takes the loss of whole sequences; its gradient reaches the rank's own tokens alone
        whole = reduce_from_tensor_model_parallel_region(whole, group=micro.layout.context.group)
    if what.loss is None:
        assert what.into is not None
        what.into[:, micro.start : micro.start + micro.size] = whole[:, : micro.size].detach()
        return answer.new_zeros(()), {}
    total, sums = what.loss(Statistics(**by_name(what.names, whole)), micro.batch.to(answer.device))
    return total * scale, {"loss": total.detach(), **{name: value.detach() for name, value in sums.items()}}


def _packed(
    part: Batch, rotary: RotaryTable | None, cut: RankPart, like: Tensor
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Lays sequences end to end -> packed position of each of this rank's places [1, N'], -1 at padding; position of
    each in its sequence; the layout."""
    context = cut.context
    unit = 2 * context.size if context.size > 1 else 1
    lengths = [n + -n % unit for n in part.lengths.tolist()]
    extra = -sum(lengths) % cut.multiple
    lengths += [extra] * (extra > 0)
    own = context.own(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None, own]
    layout = packed_layout(lengths, rotary, context=context, like=like, flash=cut.flash)
    return _places(part, lengths)[None, own], positions, layout


def _padded(
    part: Batch, rotary: RotaryTable | None, cut: RankPart, like: Tensor
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Gives each sequence a row -> the same as `_packed`, [S, L]."""
    width, count = int(part.lengths.max()), part.num_sequences
    width += -width % cut.multiple
    own = cut.context.own([width])
    places = _places(part, [width] * count).view(-1, width)[:, own]
    return places, own.expand(count, -1), padded_layout((count, width), rotary, context=cut.context, like=like)


def _sharing(
    part: Batch, rotary: RotaryTable | None, cut: RankPart, like: Tensor
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Lays sequences end to end, those with a shared prefix without it but for the first -> the same as `_packed`."""
    assert part.shared is not None and rotary is not None and cut.packed and cut.context.size == 1
    lengths, shared = part.lengths.tolist(), part.shared.tolist()
    extra = -(sum(lengths) - sum(shared)) % cut.multiple
    places = [torch.arange(b - n + s, b) for b, n, s in zip(part.cu_seqlens[1:].tolist(), lengths, shared, strict=True)]
    places += [torch.full((extra,), -1)]
    if extra:
        lengths, shared = [*lengths, extra], [*shared, 0]
    positions = torch.cat([torch.arange(s, n) for n, s in zip(lengths, shared, strict=True)])
    return torch.cat(places)[None], positions[None], sharing_layout(lengths, shared, rotary, like=like, flash=cut.flash)


def _places(part: Batch, lengths: list[int]) -> Tensor:
    """Packed position of every place of sequences that are padded to `lengths`, -1 at padding. [sum of lengths]"""
    starts = part.cu_seqlens.tolist()
    places = [torch.full((n,), -1) for n in lengths]
    for place, a, b in zip(places, starts, starts[1:], strict=False):
        place[: b - a] = torch.arange(a, b)
    return torch.cat(places)


def _rows(part: Batch, places: Tensor) -> Tensor:
    """Returns the place of every packed position, [N], in the flattened `places`; that of the first sequence which has
    it where a prefix is shared; -1 where another rank has it."""
    flat = places.flatten()
    held = (flat >= 0).nonzero()[:, 0]
    rows = torch.full((len(part.tokens),), -1)
    rows[flat[held]] = held
    for first, start, length in part.repeats:
        rows[start : start + length] = rows[first : first + length]
    return rows
