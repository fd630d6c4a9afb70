"""Arranges the attention of sequences that begin with the same prompt, which is computed once for all of them.

The first of such sequences lies in the packed row whole, the others without the prompt. The queries of these others see
the keys of the prompt where the first has them, and their own; autograd sums the gradients of the prompt's keys and
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.megatron import platform
from megatron_rl.megatron.attention import (
    ALONE,
    MAX_PADDING,
    AttentionBucket,
    RotaryTable,
    SequenceLayout,
    attention_fields,
    grid,
    packed_layout,
    whole_buckets,
)
from megatron_rl.megatron.kernels import varlen

platform.install()

QUERY_UNIT = 16  # queries are grouped as if their numbers were multiples of it: a call costs more than a few of them
MASK_ELEMENTS = 1 << 22  # the most elements of a bucket's mask where its sequences have prompts of different lengths


@dataclass(frozen=True)
class _Tail:
    """A sequence behind a prompt that an earlier sequence has."""

    prompt: int  # number of its tokens
    queries: Tensor  # [n] rows of its own tokens
    keys: Tensor  # [prompt + n] rows of the prompt and of its own tokens

    @property
    def width(self) -> int:
        """Returns the number of its queries, rounded up to QUERY_UNIT."""
        return len(self.queries) + -len(self.queries) % QUERY_UNIT


def sharing_layout(
    lengths: Sequence[int], shared: Sequence[int], rotary: RotaryTable, *, like: Tensor, flash: bool = False
) -> SequenceLayout:
    """Returns the layout of sequences that lie end to end in one row, some without their prompt.

    `lengths` [S] are those of whole sequences. The first `shared[s]` tokens of sequence s, 0 for most, are those of the
    last sequence before it that has its own prompt, and are not in the row. `like`, `flash`: as for `packed_layout`.
    """
    own = [n - s for n, s in zip(lengths, shared, strict=True)]
    ends = torch.tensor(own).cumsum(0).tolist()
    rows = [torch.arange(end - n, end) for end, n in zip(ends, own, strict=True)]
    whole, tails, seen = [], [], []
    for number, prompt in enumerate(shared):
        seen.append(torch.cat([rows[whole[-1]][:prompt], rows[number]]) if prompt else rows[number])
        if prompt:
            tails.append(_Tail(prompt, rows[number], seen[-1]))
        else:
            whole.append(number)
    positions = torch.cat([torch.arange(s, n) for n, s in zip(lengths, shared, strict=True)])
    layout = replace(
        packed_layout(own, None, like=like),
        turns=tuple((cos[:, None], sin[:, None]) for cos, sin in rotary.at(positions, like)),
    )
    if flash:
        return replace(layout, runs=varlen.segments(own, seen, like.device))
    buckets = whole_buckets([lengths[i] for i in whole], [rows[i] for i in whole], rotary.windows, ALONE)
    buckets += [_bucket(group, rotary.windows) for group in _groups(tails)]
    return replace(layout, **attention_fields(buckets, like.device))


def _groups(tails: Sequence[_Tail]) -> list[list[_Tail]]:
    """Puts tails into groups that common numbers of queries and keys pad little."""
    groups: list[list[_Tail]] = []
    queries = keys = longest = 0  # of the last group: its queries and keys without padding, and the most keys of a tail
    for tail in sorted(tails, key=lambda tail: (-tail.width, -len(tail.keys))):
        own = len(tail.keys)
        if groups:
            count, width, most = len(groups[-1]) + 1, groups[-1][0].width, max(longest, own)
            alike = all(one.prompt == tail.prompt for one in (groups[-1][0], groups[-1][-1]))
            padded = max(count * width / (queries + tail.width), count * most / (keys + own))
            if padded <= MAX_PADDING and (alike or count * width * most <= MASK_ELEMENTS):
                groups[-1].append(tail)
                queries, keys, longest = queries + tail.width, keys + own, most
                continue
        groups.append([tail])
        queries, keys, longest = tail.width, own, own
    return groups


def _bucket(group: Sequence[_Tail], windows: Sequence[int | None]) -> AttentionBucket:
    """Returns the attention call of a group of tails."""
    queries, keys = grid([tail.queries for tail in group]), grid([tail.keys for tail in group], repeats=True)
    prompts = [tail.prompt for tail in group]
    distinct = prompts if len(set(prompts)) > 1 else prompts[:1]
    widths = queries.shape[1], keys.shape[1]
    return AttentionBucket(
        queries=queries,
        keys=keys,
        masks=tuple(torch.stack([_mask(n, *widths, window) for n in distinct])[:, None] for window in windows),
    )


def _mask(prompt: int, queries: int, keys: int, window: int | None) -> Tensor:
    """Returns which keys the queries behind a prompt see, [queries, keys]. Padding behind them sees some key, too.

    With a `window` a query sees so many tokens, itself among them.
    """
    places = torch.arange(keys)
    own = (torch.arange(queries) + prompt).clamp(max=keys - 1)[:, None]
    return places <= own if window is None else (places <= own) & (places > own - window)
