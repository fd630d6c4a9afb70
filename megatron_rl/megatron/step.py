"""One pass of a packed batch through the pipeline schedule: micro-batches in, summed losses or log-probabilities out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.megatron import platform
from megatron_rl.megatron.attention import RotaryTable, SequenceLayout, packed_layout, padded_layout
from megatron_rl.megatron.model import IGNORED
from megatron_rl.types import Batch

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class MicroBatch:
    """What the model sees of some sequences, and how its answer goes back to their packed positions."""

    batch: Batch  # the sequences alone, packed: N tokens
    sequences: tuple[int, ...]  # their numbers in the whole batch
    tokens: Tensor  # [1, N'] packed or [S, L] padded; N' counts alignment padding
    positions: Tensor  # like tokens
    labels: Tensor  # like tokens, IGNORED where no log-probability is wanted
    answers: Tensor  # [n] packed position of each answered label, in the order of the answers
    layout: SequenceLayout


def make_micro_batch(batch: Batch, sequences: Sequence[int], rotary: RotaryTable, *, packed: bool, align: int, like: Tensor) -> MicroBatch:
    """Selects `sequences` of `batch` and lays them out, the length rounded up to a multiple of `align` (the tensor ranks under
    sequence parallelism). `like` gives dtype and device of the model. No sequences: one dummy without labels, so that a rank
    with nothing to do still takes part."""
    device = like.device
    if not sequences:
        empty = torch.zeros(align, dtype=torch.int64)
        none = torch.zeros(align)
        part = Batch(tokens=empty, labels=empty, mask=empty > 0, engine_logprobs=none, advantages=none, cu_seqlens=torch.tensor([0, align]))
    else:
        part = batch.select(sequences)
    lengths = part.lengths.tolist()
    if packed:
        extra = -sum(lengths) % align
        wanted = part.labels.masked_fill(~part.mask, IGNORED)
        tokens = torch.cat([part.tokens, part.tokens.new_zeros(extra)])[None]
        labels = torch.cat([wanted, wanted.new_full((extra,), IGNORED)])[None]
        layout = packed_layout(lengths + [extra] * (extra > 0), rotary, dtype=like.dtype, device=device)
        positions = torch.cat([torch.arange(n) for n in [*lengths, extra]])[None]
        answers = part.mask.nonzero()[:, 0]
    else:
        width = max(lengths) + (-max(lengths) % align)
        tokens, labels, places = _padded(part, lengths, width)
        layout = padded_layout(width, rotary, dtype=like.dtype, device=device)
        positions = torch.arange(width).expand(len(lengths), -1)
        answers = places[labels != IGNORED]
    return MicroBatch(part, tuple(sequences), tokens.to(device), positions.to(device), labels.to(device), answers, layout)


def run(
    chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], *, loss: Loss | None, scale: float, forward_only: bool
) -> list[dict[str, Any]]:
    """Runs all micro-batches through this rank's pipeline stage. Call with the layout's groups active.

    Gradients of `scale` * (sum of the losses) accumulate in the chunks. Returns one dict per micro-batch on the last stage
    (`loss`, sums by name; or `logprobs` [n] when `loss` is None) and an empty list elsewhere.
    """
    iterators = [iter(micro_batches) for _ in chunks]
    lengths = [m.tokens.shape[1] for m in micro_batches]
    schedule = get_forward_backward_func()
    return schedule(
        forward_step_func=functools.partial(_forward_step, loss=loss, scale=scale * len(micro_batches)),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(lengths),
        micro_batch_size=micro_batches[0].tokens.shape[0],
        forward_only=forward_only,
    )


def _forward_step(iterator: Iterator[MicroBatch], model: Any, *, loss: Loss | None, scale: float) -> tuple[Tensor, Any]:
    micro = next(iterator)
    answer = model(micro.tokens, micro.positions, None, labels=micro.labels, packed_seq_params=micro.layout)
    return answer, functools.partial(_reduce, micro=micro, loss=loss, scale=scale)


def _reduce(answer: Tensor, *, micro: MicroBatch, loss: Loss | None, scale: float) -> tuple[Tensor, dict[str, Any]]:
    """[2, n] answers of the last stage -> (scalar for the backward pass, what is reported). Core divides by the number of micro-batches."""
    if loss is None:
        return answer.new_zeros(()), {"logprobs": answer[0].detach().float(), "micro": micro}
    size = len(micro.batch.tokens)
    index = micro.answers.to(answer.device)
    logprobs = torch.zeros(size, device=answer.device).index_copy(0, index, answer[0].float())
    entropy = torch.zeros(size, device=answer.device).index_copy(0, index, answer[1].float())
    total, sums = loss(logprobs, entropy, _to(micro.batch, answer.device))
    return total * scale, {"loss": total.detach(), **{name: value.detach() for name, value in sums.items()}}


def _padded(part: Batch, lengths: list[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed [N] -> tokens, labels, packed positions, each [S, width]."""
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
    labels = torch.full((len(lengths), width), IGNORED)
    places = torch.zeros(len(lengths), width, dtype=torch.int64)
    start = 0
    for row, n in enumerate(lengths):
        span = slice(start, start + n)
        tokens[row, :n] = part.tokens[span]
        labels[row, :n] = part.labels[span].masked_fill(~part.mask[span], IGNORED)
        places[row, :n] = torch.arange(start, start + n)
        start += n
    return tokens, labels, places


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    fields = {name: getattr(batch, name) for name in batch.__slots__}  # type: ignore[attr-defined]
    return Batch(**{name: None if value is None else value.to(device) for name, value in fields.items()})
