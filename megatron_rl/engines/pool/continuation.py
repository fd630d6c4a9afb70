"""Continues completions that refits interrupted: joins the parts, derives seeds, and records weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.protocol import Completion


def seed_after(seed: int, written: int) -> int:
    """Returns the seed for continuing a completion that has `written` tokens. This seed differs from the seeds of the
    prompt's other samples, which are consecutive numbers.
    """
    return seed if written == 0 else sampling_seeds.stream_key(seed, 0, written) & (1 << 62) - 1


def joined(begun: Completion, more: Completion) -> Completion:
    """Joins two parts of a completion to one completion. `begun`: the first part. `more`: the continuation."""
    offset = len(begun.tokens)
    later = [(start + offset, version) for start, version in more.versions]
    return Completion(
        tokens=np.concatenate([begun.tokens, more.tokens]),
        logprobs=np.concatenate([begun.logprobs, more.logprobs]),
        stop=more.stop,
        model_logprobs=_both(begun.model_logprobs, more.model_logprobs),
        authors=_both(begun.authors, more.authors),
        top_ids=_both(begun.top_ids, more.top_ids),
        top_logprobs=_both(begun.top_logprobs, more.top_logprobs),
        versions=spans([*begun.versions, *later], offset + len(more.tokens)),
        # The continuation has the expert choices of all tokens, because its prompt contained the earlier tokens.
        experts=more.experts,
    )


def nothing_of(begun: Completion) -> Completion:
    """Returns a copy of the completion without tokens."""
    names = ("tokens", "logprobs", "model_logprobs", "authors", "top_ids", "top_logprobs")
    held = {name: values[:0] for name in names if (values := getattr(begun, name)) is not None}
    return replace(begun, versions=[], **held)


def dated(completion: Completion, version: int) -> Completion:
    """Returns the completion with its `versions` set: the weight versions that the server reported, or `version` for
    all tokens if the server reported no versions.
    """
    return replace(completion, versions=spans(completion.versions or [(0, version)], len(completion.tokens)))


def spans(versions: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Cleans up the weight versions of a completion of `length` tokens, which are pairs of (index of the first token,
    version). Drops pairs that cover no tokens, and merges adjacent pairs with the same version.
    """
    out: list[tuple[int, int]] = []
    for start, version in versions:
        if out and out[-1][0] == start:
            out.pop()
        if (start < length or start == 0) and (not out or out[-1][1] != version):
            out.append((start, version))
    return out


def _both(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return None if one is None or other is None else np.concatenate([one, other])
