"""Completions that refits cut short: which versions wrote what, the seed to go on with, how parts are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.protocol import Completion


def seed_after(seed: int, written: int) -> int:
    """Returns the seed for continuing a completion of so many tokens. It differs from the seeds of the other samples of
    the same prompt, which are consecutive.
    """
    return seed if written == 0 else sampling_seeds.stream_key(seed, 0, written) & (1 << 62) - 1


def joined(begun: Completion, more: Completion) -> Completion:
    """Returns a completion with what was written after it."""
    offset = len(begun.tokens)
    later = [(start + offset, version) for start, version in more.versions]
    return Completion(
        tokens=np.concatenate([begun.tokens, more.tokens]),
        logprobs=np.concatenate([begun.logprobs, more.logprobs]),
        stop=more.stop,
        model_logprobs=_both(begun.model_logprobs, more.model_logprobs),
        authors=_both(begun.authors, more.authors),
        versions=spans([*begun.versions, *later], offset + len(more.tokens)),
        experts=more.experts,  # all of the text was its prompt
    )


def nothing_of(begun: Completion) -> Completion:
    """Returns the completion without its tokens."""
    none = np.empty(0)
    authors = None if begun.authors is None else none
    return replace(begun, tokens=none, logprobs=none, model_logprobs=none, versions=[], authors=authors)


def dated(completion: Completion, version: int) -> Completion:
    """Returns the completion with the versions that wrote it: as the server says, or `version` where it is silent."""
    return replace(completion, versions=spans(completion.versions or [(0, version)], len(completion.tokens)))


def spans(versions: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Returns (first token, version) without the spans that hold none of the `length` tokens, and those that go on with
    the version of the one before.
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
