"""Arranges attention for sequences that share a prompt, so that the prompt is computed only once.

The packed row contains the first of these sequences completely, and the other sequences without the prompt. The queries
of the other sequences attend to the prompt's keys in the first sequence and to the keys of their own tokens. Autograd
sums the gradients of the prompt's keys and values.
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

# Query counts are rounded up to a multiple of this number, so that more sequences can share an attention call.
QUERY_UNIT = 16
MASK_ELEMENTS = 1 << 22  # maximum number of mask elements of a bucket with prompts of different lengths


@dataclass(frozen=True)
class _Tail:
    """The tokens of a sequence after a prompt that the sequence shares with an earlier sequence."""

    prompt: int  # number of prompt tokens
    queries: Tensor  # [n] row indices of the tokens after the prompt
    keys: Tensor  # [prompt + n] row indices of the prompt and of the tokens after the prompt

    @property
    def width(self) -> int:
        """The number of tokens after the prompt, rounded up to a multiple of QUERY_UNIT."""
        return len(self.queries) + -len(self.queries) % QUERY_UNIT


def sharing_layout(
    lengths: Sequence[int], shared: Sequence[int], rotary: RotaryTable, *, like: Tensor, flash: bool = False
) -> SequenceLayout:
    """Returns the layout of sequences that are packed end to end in one row, some of them without their prompt.

    `lengths` [S] has the lengths of the whole sequences. If `shared[s]` is positive, the first `shared[s]` tokens of
    sequence s are not in the row; they are equal to the first tokens of the nearest earlier sequence t with `shared[t]`
    = 0. `rotary` has the rotary tables. `like` is a tensor with the dtype and device of the model. `flash`: whether one
    flash attention call computes the attention of all sequences.
    """
    own_lengths = [n - s for n, s in zip(lengths, shared, strict=True)]
    ends = torch.tensor(own_lengths).cumsum(0).tolist()
    rows = [torch.arange(end - n, end) for end, n in zip(ends, own_lengths, strict=True)]
    unshared, tails, seen = [], [], []
    for number, prompt in enumerate(shared):
        seen.append(torch.cat([rows[unshared[-1]][:prompt], rows[number]]) if prompt else rows[number])
        if prompt:
            tails.append(_Tail(prompt, rows[number], seen[-1]))
        else:
            unshared.append(number)
    positions = torch.cat([torch.arange(s, n) for n, s in zip(lengths, shared, strict=True)])
    layout = replace(
        packed_layout(own_lengths, None, like=like),
        turns=tuple((cos[:, None], sin[:, None]) for cos, sin in rotary.at(positions, like)),
    )
    if flash:
        return replace(layout, runs=varlen.segments(own_lengths, seen, like.device))
    buckets = whole_buckets([lengths[i] for i in unshared], [rows[i] for i in unshared], rotary.windows, ALONE)
    buckets += [_bucket(group, rotary.windows) for group in _groups(tails)]
    return replace(layout, **attention_fields(buckets, like.device))


def _groups(tails: Sequence[_Tail]) -> list[list[_Tail]]:
    """Groups tails (tokens after a shared prompt) with similar numbers of queries and keys, so that padding stays
    within the ratio MAX_PADDING."""
    groups: list[list[_Tail]] = []
    # totals of the last group: number of queries, number of keys without padding, largest key count of a tail
    queries = keys = longest = 0
    for tail in sorted(tails, key=lambda tail: (-tail.width, -len(tail.keys))):
        num_keys = len(tail.keys)
        if groups:
            count, width, most = len(groups[-1]) + 1, groups[-1][0].width, max(longest, num_keys)
            alike = all(member.prompt == tail.prompt for member in (groups[-1][0], groups[-1][-1]))
            padded = max(count * width / (queries + tail.width), count * most / (keys + num_keys))
            if padded <= MAX_PADDING and (alike or count * width * most <= MASK_ELEMENTS):
                groups[-1].append(tail)
                queries, keys, longest = queries + tail.width, keys + num_keys, most
                continue
        groups.append([tail])
        queries, keys, longest = tail.width, num_keys, num_keys
    return groups


def _bucket(group: Sequence[_Tail], windows: Sequence[int | None]) -> AttentionBucket:
    """Returns the attention bucket of a group of tails (tokens after a shared prompt)."""
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
    """Returns the attention mask [queries, keys] of queries after a prompt of `prompt` tokens.

    Padding queries attend to the same keys as the last query, so that no row of the mask is empty. With a `window`, a
    query attends to the last `window` tokens, including itself.
    """
    places = torch.arange(keys)
    query_places = (torch.arange(queries) + prompt).clamp(max=keys - 1)[:, None]
    return places <= query_places if window is None else (places <= query_places) & (places > query_places - window)
