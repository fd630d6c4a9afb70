"""Continues completions that refits interrupted: joins the parts, derives seeds, and records weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.protocol import Completion


def seed_after(seed: int, written: int) -> int:
    """Returns the seed for continuing a completion that has `written` tokens. The seed differs from the seeds of the
    other samples of the same prompt, which are consecutive.
    """
    return seed if written == 0 else sampling_seeds.stream_key(seed, 0, written) & (1 << 62) - 1


def joined(begun: Completion, more: Completion) -> Completion:
    """Returns the completion `begun` extended by its continuation `more`."""
    offset = len(begun.tokens)
    later = [(start + offset, version) for start, version in more.versions]
    return Completion(
        tokens=np.concatenate([begun.tokens, more.tokens]),
        logprobs=np.concatenate([begun.logprobs, more.logprobs]),
        stop=more.stop,
        model_logprobs=_both(begun.model_logprobs, more.model_logprobs),
        authors=_both(begun.authors, more.authors),
        versions=spans([*begun.versions, *later], offset + len(more.tokens)),
        experts=more.experts,  # the prompt of `more` contained all earlier tokens
    )


def nothing_of(begun: Completion) -> Completion:
    """Returns the completion without its tokens."""
    none = np.empty(0)
    authors = None if begun.authors is None else none
    return replace(begun, tokens=none, logprobs=none, model_logprobs=none, versions=[], authors=authors)


def dated(completion: Completion, version: int) -> Completion:
    """Returns the completion with its weight versions: those that the server reported, or `version` if it reported
    none.
    """
    return replace(completion, versions=spans(completion.versions or [(0, version)], len(completion.tokens)))


def spans(versions: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Returns (first token, version) pairs for a completion of `length` tokens. Drops spans without tokens, and merges
    adjacent spans of the same version.
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
