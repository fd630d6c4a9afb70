"""One pass of a packed batch through the pipeline schedule: micro-batches in, summed losses or log-probabilities out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.megatron import platform, replay
from megatron_rl.megatron.attention import ALONE, Context, RotaryTable, SequenceLayout, packed_layout, padded_layout
from megatron_rl.megatron.model import IGNORED, unwrap
from megatron_rl.types import Batch

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region  # noqa: E402

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Cut:
    """How the tokens of a micro-batch lie over the ranks of one replica."""

    packed: bool  # sequences end to end; else a row for each, padded
    parts: int = 1  # tensor ranks that share out a rank's tokens (sequence parallelism)
    part: int = 0  # this rank's number among them
    context: Context = ALONE


@dataclass(frozen=True)
class MicroBatch:
    """What this rank's model sees of some sequences, and how its answer goes back to their packed positions."""

    batch: Batch  # the sequences alone, packed: N tokens, the same on all context-parallel ranks
    sequences: tuple[int, ...]  # their numbers in the whole batch
    tokens: Tensor  # [1, N'] packed or [S, L] padded; N' counts alignment padding; this rank's share
    positions: Tensor  # like tokens
    labels: Tensor  # like tokens, IGNORED where no log-probability is wanted
    answers: Tensor  # [n] packed position of each label that this rank answers, in the order of the answers
    layout: SequenceLayout
    experts: Tensor | None = None  # [N' / parts, layers, k] for the tokens that this rank's routers see, in their order


def make_micro_batch(
    batch: Batch, sequences: Sequence[int], rotary: RotaryTable, *, cut: Cut, like: Tensor
) -> MicroBatch:
    """Selects `sequences` of `batch` and lays them out over the ranks of `cut`. `like` gives dtype and device of the model.
    No sequences: one dummy without labels, so that a rank with nothing to do still takes part."""
    context, multiple = cut.context, cut.context.multiple(cut.parts)
    if not sequences:
        empty = torch.zeros(multiple, dtype=torch.int64)
        none = torch.zeros(multiple)
        cu = torch.tensor([0, multiple])
        part = Batch(tokens=empty, labels=empty, mask=empty > 0, engine_logprobs=none, advantages=none, cu_seqlens=cu)
    else:
        part = batch.select(sequences)
    if cut.packed:
        unit = 2 * context.size if context.size > 1 else 1
        lengths = [n + -n % unit for n in part.lengths.tolist()]
        extra = -sum(lengths) % multiple
        lengths += [extra] * (extra > 0)
        places = _places(part, lengths)[None, context.own(lengths)]
        positions = torch.cat([torch.arange(n) for n in lengths])[None, context.own(lengths)]
        layout = packed_layout(lengths, rotary, context=context, like=like)
    else:
        width = int(part.lengths.max())
        width += -width % multiple
        own = context.own([width])
        places = _places(part, [width] * part.num_sequences).view(-1, width)[:, own]
        positions = own.expand(part.num_sequences, -1)
        layout = padded_layout((part.num_sequences, width), rotary, context=context, like=like)
    tokens, labels = (_at(places, values, padding) for values, padding in ((part.tokens, 0), (_wanted(part), IGNORED)))
    answers, device = places[labels != IGNORED], like.device
    experts = None
    if part.experts is not None:
        experts = replay.of_tokens(part.experts, places, parts=cut.parts, part=cut.part).to(device)
    return MicroBatch(
        part, tuple(sequences), tokens.to(device), positions.to(device), labels.to(device), answers, layout, experts
    )


def run(
    chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], *, loss: Loss | None, scale: float, forward_only: bool
) -> list[dict[str, Any]]:
    """Runs all micro-batches through this rank's pipeline stage. Call with the layout's groups active.

    Gradients of `scale` * (sum of the losses) accumulate in the chunks. Returns one dict per micro-batch on the last stage
    (`loss`, sums by name; or `logprobs` [n] when `loss` is None) and an empty list elsewhere.
    """
    iterators = [iter(micro_batches) for _ in chunks]
    lengths = [m.tokens.shape[1] * m.layout.context.size for m in micro_batches]
    schedule = get_forward_backward_func()
    for chunk in chunks:
        replay.forget(unwrap(chunk))
    return schedule(
        forward_step_func=functools.partial(
            _forward_step, loss=loss, scale=scale * len(micro_batches), training=not forward_only
        ),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(lengths),
        micro_batch_size=micro_batches[0].tokens.shape[0],
        forward_only=forward_only,
    )


def _forward_step(
    iterator: Iterator[MicroBatch], model: Any, *, loss: Loss | None, scale: float, training: bool
) -> tuple[Tensor, Any]:
    micro = next(iterator)
    replay.show(unwrap(model), micro.experts, training=training)
    answer = model(micro.tokens, micro.positions, None, labels=micro.labels, packed_seq_params=micro.layout)
    return answer, functools.partial(_reduce, micro=micro, loss=loss, scale=scale)


def _reduce(answer: Tensor, *, micro: MicroBatch, loss: Loss | None, scale: float) -> tuple[Tensor, dict[str, Any]]:
    """[2, n] answers of the last stage -> (scalar for the backward pass, what is reported). Core divides by the number of micro-batches."""
    if loss is None:
        return answer.new_zeros(()), {"logprobs": answer[0].detach().float(), "micro": micro}
    size = len(micro.batch.tokens)
    index = micro.answers.to(answer.device)
    whole = torch.zeros(2, size, device=answer.device).index_copy(1, index, answer.float())
    if (
        micro.layout.context.size > 1
    ):  # every rank takes the loss of whole sequences; its gradient reaches the rank's own tokens alone
        whole = reduce_from_tensor_model_parallel_region(whole, group=micro.layout.context.group)
    total, sums = loss(whole[0], whole[1], _to(micro.batch, answer.device))
    return total * scale, {"loss": total.detach(), **{name: value.detach() for name, value in sums.items()}}


def _places(part: Batch, lengths: list[int]) -> Tensor:
    """Packed position of every place of sequences that are padded to `lengths`, -1 at padding. [sum of lengths]"""
    starts = part.cu_seqlens.tolist()
    places = [torch.full((n,), -1) for n in lengths]
    for place, a, b in zip(places, starts, starts[1:], strict=False):
        place[: b - a] = torch.arange(a, b)
    return torch.cat(places)


def _wanted(part: Batch) -> Tensor:
    """[N] labels, IGNORED where they are not in the loss."""
    return part.labels.masked_fill(~part.counted, IGNORED)


def _at(places: Tensor, values: Tensor, padding: int) -> Tensor:
    """values [N] at places; `padding` where a place is -1."""
    return values[places.clamp(min=0)].masked_fill(places < 0, padding)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    fields = {name: getattr(batch, name) for name in batch.__slots__}  # type: ignore[attr-defined]
    return Batch(**{name: None if value is None else value.to(device) for name, value in fields.items()})
