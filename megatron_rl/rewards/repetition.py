"""Penalises responses that repeat n-grams (arXiv 2502.03373, appendix C.2)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def grade(response: str, payload: Mapping[str, Any], *, ngram_size: int = 3, max_penalty: float = -1.0) -> float:
    """Returns `max_penalty` times the share of the response's n-grams that are repetitions. The n-grams consist of
    words, in lower case.
    """
    return max_penalty * repeated_share(response.lower().split(), ngram_size) or 0.0  # never -0.0


def repeated_share(items: Sequence[Hashable], size: int) -> float:
    """Returns 1 - (number of distinct n-grams) / (number of n-grams), where an n-gram is `size` consecutive items;
    0.0 for fewer than `size` items.
    """
    grams = list(zip(*(items[i:] for i in range(size)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
